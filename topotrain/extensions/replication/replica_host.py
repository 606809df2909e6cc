"""Servers of one process in a job where every server has two copies.

The launcher, which sees all processes of the job, decides which copy is the primary and sends the placement
(`arrange`). This module carries it out. A standby becomes the primary and is published where its peers look for it. A
primary without its standby stops waiting for it and connects to the new one.

A lost connection alone does not prove that a process is dead. A primary that has lost its standby sends nothing more
until the launcher reports the end of the standby. A server that has lost the coordinator calls it again. Both report
the loss. If there is no answer within GRACE_S seconds, and APART_S more for each further slot, the process ends itself
and is replaced.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import torch

from topotrain.comm.backoff import spread
from topotrain.comm.router import Router, RouterConfig, published_kind
from topotrain.comm.security.handshake import Peer
from topotrain.comm.transport import Refused, TransportError
from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Message, ProtocolError
from topotrain.core.server.server import Server
from topotrain.extensions.checkpointing.checkpoint_extension import snapshots_of
from topotrain.extensions.checkpointing.checkpoint_writer import SnapshotPort, SnapshotWriter
from topotrain.extensions.elastic.membership import ElasticGroups
from topotrain.extensions.replication.replica_placement import ReplicaSet
from topotrain.extensions.replication.replication_messages import ReplicaReleased
from topotrain.extensions.replication.state_machine import Out, Primary, ReplicatedServer, Standby
from topotrain.extensions.replication.state_transfer import restore, save

GRACE_S, APART_S = 15.0, 4.0
"""Seconds to wait for a report of an end, and additional seconds per slot.

Of two processes that have lost each other only one should end."""
_AGAIN_S = 0.5
_END_S = 5.0
"""Seconds until the end of a dead server's connection must have been noticed."""

Trouble = Callable[[], None]
"""Called inside `except` on the thread that handled a message, when this process cannot continue."""


@dataclass(frozen=True, slots=True)
class ReplicaSlot:
    """Interface between the launcher and a server process.

    Attributes:
        standing: the placement when the process begins.
        taken: called once with a function that the launcher calls with each new placement.
        covered: called with (server, number of standbys so far) when the standby of a server has its whole state.
        differs: called with the same when a standby was found to differ from its primary.
        despair: called with the reason; ends the process, which is then replaced.
        missed: called with a server that has lost the connection to another server, without a report of its end.
    """

    standing: Mapping[int, ReplicaSet]
    taken: Callable[[Callable[[Mapping[int, ReplicaSet]], None]], None]
    covered: Callable[[Address, int], None]
    differs: Callable[[Address, int], None]
    despair: Callable[[str], None]
    missed: Callable[[Address], None] = lambda server: None


def shadow_of(server: Address) -> Address:
    """Return the address of a server's standby."""
    return Address(Role.SHADOW, server.group, server.index)


class PrimaryEndpoint:
    """The primary at its server's address. It handles one event at a time.

    Args:
        lead: the primary.
        roads: its transports.
        change: notified when the server may be done.
        trouble: see Trouble.
        seat: the interface to the launcher.
        parted: called with this server and another when the connection between them has ended.
        grace_s: seconds for which the standby may be missed before this process ends.
        shadows: the number of standbys so far.
    """

    def __init__(
        self,
        lead: Primary,
        roads: Router,
        change: threading.Condition,
        trouble: Trouble,
        seat: ReplicaSlot,
        parted: Callable[[Address, Address], None],
        grace_s: float,
        shadows: int = 0,
    ) -> None:
        self.lead, self.server = lead, lead.copy.server
        self.shadows = shadows
        self._aside: SnapshotPort | None = None
        self._seat, self._differed = seat, 0
        self._parted, self._grace_s = parted, grace_s
        self._roads, self._change, self._trouble = roads, change, trouble
        self._lock = threading.Lock()
        self._told_covered = self._dismissed = False
        self._alarm: threading.Timer | None = None

    def write_snapshots(self, writer: SnapshotWriter, from_another: bool = False) -> None:
        """Let this process write the server's snapshots.

        `from_another`: another process has done so before.
        """
        self._aside = writer.follow(self.lead.me, snapshots_of(self.server), self.poke, from_another)

    # --- calls by the transport ----------------------------------------------------------------------------------

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        """See `wire.Endpoint.place`."""
        with self._lock:
            return self.server.place(sender, message, viewable)

    def handle(self, sender: Address, message: Message) -> None:
        """See `wire.Endpoint.handle`."""

        def hear() -> Out:
            return self.lead.hear(sender, message)

        fault = self._do(hear)
        if fault is not None:
            raise fault

    def lost(self, peer: Address, reason: str) -> None:
        """See `wire.Endpoint.lost`."""
        if peer == self.lead.shadow:
            if not self._roads.has_route(self.lead.me, peer):  # else a new standby is connected already
                self._missing()
        elif peer.role is Role.SERVER:
            if not self._roads.has_route(self.lead.me, peer):  # else there is a new connection already
                with self._lock:
                    self.lead.parted(peer)
                self._parted(self.lead.me, peer)
        else:
            self._do(lambda: self.lead.lost(peer) if peer in self.lead.up else [])

    def poke(self) -> None:
        """Handle messages from this process, such as those of the snapshot writer."""
        self._do(list)

    def told(self, message: Message) -> None:
        """Handle a message of the launcher, sent in the server's own name.

        The standby gets it, too.
        """
        self._do(lambda: self.lead.hear(self.lead.me, message))

    def may_change(self, group: int, wish: str) -> str:
        """Return why a group may not change now, or "". See `process_host`."""
        with self._lock:
            return self.server.extension(ElasticGroups).may_change(group, wish)

    # --- orders of the launcher ----------------------------------------------------------------------------------

    def do(self, what: Callable[[Primary], Out]) -> None:
        """Run `what` with the primary and send the messages that it returns."""
        self._do(lambda: what(self.lead))

    def probe(self) -> int:
        """Ask the standby for a confirmation.

        Returns the number of the event, see `Primary.confirmed`.
        """
        self.do(lambda lead: lead.probe())
        return self.lead.copy.events

    def alone(self, shadows: int) -> None:
        """Continue without the standby, which is gone.

        `shadows` is the number of the next standby.
        """
        self._calm()
        self._told_covered = False
        self.shadows = shadows
        self.do(lambda lead: lead.alone())

    def join(self, shadows: int) -> None:
        """Send the state to standby number `shadows`, unless it has been replaced already."""
        self.do(lambda lead: lead.join() if shadows == self.shadows else [])

    def _missing(self) -> None:
        """Handle the end of the connection to the standby."""
        with self._lock:
            waits = self.lead.joined and not self._dismissed and self._alarm is None
            if waits:
                why = f"{self.lead.me} has lost the connection to its second copy, and no end of it was reported"
                self._alarm = threading.Timer(self._grace_s, self._seat.despair, (why,))
                self._alarm.daemon = True  # the process may end while it waits
                self._alarm.start()
        if waits:
            self._seat.missed(self.lead.me)
        self._look()

    def _calm(self) -> None:
        with self._lock:
            if self._alarm is not None:
                self._alarm.cancel()
                self._alarm = None

    # --- inside --------------------------------------------------------------------------------------------------

    def _do(self, what: Callable[[], Out]) -> ProtocolError | None:
        try:
            with self._lock:
                self.lead.begin()
                out = what()
                self._compare()  # the launcher must know of a difference before any message is sent
                self._say(out)
                fault = self.lead.fault
                self._hear()
        except ProtocolError:
            raise
        except Exception:
            self._trouble()
            raise
        self._look()
        return fault

    def _compare(self) -> None:
        if self.lead.differs > self._differed:
            self._differed, self._told_covered = self.lead.differs, False
            self._seat.differs(self.lead.me, self.shadows)

    def _hear(self) -> None:
        if self._aside is not None:
            for message in self._aside.heard():
                self._say(self.lead.hear(self.lead.me, message))

    def _say(self, out: Out) -> None:
        for to, message in out:
            with suppress(TransportError):  # the transport will call `lost`
                self._roads.send(self.lead.me, to, message)

    def _look(self) -> None:
        if self.lead.covered and not self._told_covered:
            self._told_covered = True
            self._seat.covered(self.lead.me, self.shadows)
        if self.server.done:
            with self._change:
                self._change.notify_all()

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self.server.done and self.lead.clear

    def dismiss(self) -> None:
        """Release the standby, which has nothing left to do either."""
        with self._lock:
            self._dismissed = True
            if self._alarm is not None:
                self._alarm.cancel()
            self._say([(self.lead.shadow, ReplicaReleased())])


class StandbyEndpoint:
    """A standby at its own address.

    Args:
        server: the address of its server.
        shadow: the standby.
        roads, change, trouble: as for PrimaryEndpoint.
    """

    def __init__(
        self, server: Address, shadow: Standby, roads: Router, change: threading.Condition, trouble: Trouble
    ) -> None:
        self._server, self._me, self._shadow = server, shadow_of(server), shadow
        self._roads, self._change, self._trouble = roads, change, trouble
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        """See `wire.Endpoint.place`."""
        with self._lock:
            return self._shadow.place(message)

    def handle(self, sender: Address, message: Message) -> None:
        """See `wire.Endpoint.handle`."""
        if sender != self._server:
            raise ProtocolError(f"{self._me} accepts messages from {self._server} only")
        try:
            with self._lock:
                self._answer(self._shadow.receipt(message))
                self._answer(self._shadow.hear(message))
        except ProtocolError:
            raise
        except Exception:
            self._trouble()
            raise
        if self._shadow.over:
            with self._change:
                self._change.notify_all()

    def _answer(self, message: Message | None) -> None:
        if message is not None:
            with suppress(TransportError):
                self._roads.send(self._me, self._server, message)

    def lost(self, peer: Address, reason: str) -> None:
        """See `wire.Endpoint.lost`."""
        self._ended.set()

    def succeed(self) -> ReplicatedServer:
        """Return the replicated server, which becomes the primary.

        The process of the primary is gone.

        Raises:
            RuntimeError: this standby does not have the whole state.
        """
        self._ended.wait(_END_S)  # the last events of the primary are handled first; they are useful, not necessary
        with self._lock:
            copy = self._shadow.succeed()
        if copy is None:
            raise RuntimeError(f"{self._me} must become the primary, but has no state")
        return copy

    @property
    def done(self) -> bool:
        """Whether the primary has released this standby."""
        return self._shadow.over


class ServerFactory(Protocol):
    """Makes a server with all extensions that the job asks for."""

    def __call__(self, me: Address, deliver: Callable[[Address, Message], None]) -> Server:
        """The server at address `me`, which hands each of its messages to `deliver`."""


class ReplicatedServers:
    """The replicated servers of one process. It replaces `process_host.HostedServers`.

    Args:
        place, roads, trouble, writer: as there.
        make: makes a server of this job.
        me: the server with the slot of this process.
        seat: the interface to the launcher.
        opened: called with this object when another primary starts here.
    """

    def __init__(
        self,
        place: RouterConfig,
        roads: Router,
        make: ServerFactory,
        me: Address,
        trouble: Trouble,
        writer: SnapshotWriter | None,
        seat: ReplicaSlot,
        opened: "Callable[[ReplicatedServers], None]" = lambda _: None,
    ) -> None:
        self._opened = opened
        self._place, self._roads, self._make, self._me = place, roads, make, me
        self._trouble, self._writer = trouble, writer
        self._seat, self._standing = seat, dict(seat.standing)
        self._grace_s = GRACE_S + APART_S * (me.index % 4)
        self._change = threading.Condition()
        self._servers = place.topology.servers(me.group)
        self._speakers: dict[Address, PrimaryEndpoint] = {}
        self._listeners: dict[Address, StandbyEndpoint] = {}
        self._orders: SimpleQueue[Mapping[int, ReplicaSet]] = SimpleQueue()
        roads.set_admission(self)

    # --- start ---------------------------------------------------------------------------------------------------

    def open(self, serving: Callable[[Address, tuple[str, ...]], None]) -> None:
        """Start the copies of this slot.

        `serving` is called with the URLs once the server can be reached, or could be.
        """
        urls: tuple[str, ...] = ()
        for server in self._servers:
            where = self._standing[server.index]
            if where.shadow == self._me.index:
                urls = self._listen(server, where)
        if self._standing[self._me.index].lead == self._me.index:
            urls = self._begin(self._me)
        threading.Thread(target=self._obey, name="seats", daemon=True).start()
        serving(self._me, urls)

    def _begin(self, me: Address) -> tuple[str, ...]:
        """Start a primary in the first process of a server."""
        speaker = self._speaker(ReplicatedServer(partial(self._make, me)))
        if self._writer is not None:
            speaker.write_snapshots(self._writer)
        urls = self._roads.attach(me, speaker)
        self._roads.publish("door", me, urls)
        if me.index:
            coordinator = self._servers[0]
            self._roads.connect(me, coordinator, "door")
            speaker.do(lambda lead: lead.connected(coordinator))
        self._follow(speaker, self._standing[me.index])
        self._roads.publish("server", me, urls)
        self._opened(self)
        return urls

    def _listen(self, server: Address, where: ReplicaSet) -> tuple[str, ...]:
        shadow = Standby(partial(self._make_shadow, server), restore)
        listener = StandbyEndpoint(server, shadow, self._roads, self._change, self._trouble)
        self._listeners[server] = listener
        urls = self._roads.attach(shadow_of(server), listener)
        self._roads.publish(f"shadow-{where.shadows}", server, urls)
        return urls

    def _make_shadow(self, me: Address, deliver: Callable[[Address, Message], None]) -> Server:
        """Make the server of a standby.

        Only the process of the primary writes snapshots, but both servers must act as if they did.
        """
        server = self._make(me, deliver)
        snapshots_of(server).follow(lambda work: None)
        return server

    def _speaker(self, copy: ReplicatedServer, shadows: int = 0) -> PrimaryEndpoint:
        lead, ways = Primary(copy, save), (self._roads, self._change, self._trouble)
        speaker = PrimaryEndpoint(lead, *ways, self._seat, self._parted, self._grace_s, shadows)
        self._speakers[lead.me] = speaker
        return speaker

    def coordinator(self, group: int) -> PrimaryEndpoint | None:
        """Return the primary of the coordinator, or None if it is in another process."""
        return self._speakers.get(self._servers[0])

    # --- changes of the placement --------------------------------------------------------------------------------

    def arrange(self, standing: Mapping[int, ReplicaSet]) -> None:
        """Take over a new placement. May be called on any thread."""
        self._orders.put(standing)

    def _obey(self) -> None:
        """Carry out new placements on a thread of its own.

        The thread flushes denormals to zero, as servers do.
        """
        while True:
            standing = self._orders.get()
            try:
                self._rearrange(standing)
            except Exception:
                self._trouble()
                raise

    def _rearrange(self, new: Mapping[int, ReplicaSet]) -> None:
        old, self._standing = self._standing, dict(new)
        risen = [s for s in self._servers if new[s.index].lead == self._me.index and s not in self._speakers]
        for server in self._servers:
            speaker = self._speakers.get(server)
            follower = new[server.index]
            if speaker is not None and (old[server.index].shadows != follower.shadows or follower.shadow < 0):
                speaker.alone(follower.shadows)
        for server in risen:
            self._rise(server, new[server.index])
        for server, speaker in self._speakers.items():
            where, before = new[server.index], old[server.index]
            if where.shadow >= 0 and (server in risen or before.shadows != where.shadows):
                self._apart(partial(self._follow, speaker, where), server)
        self._meet(old, new, risen)

    def _rise(self, server: Address, where: ReplicaSet) -> None:
        """Turn a standby into the primary."""
        copy = self._listeners.pop(server).succeed()
        speaker = self._speaker(copy, where.shadows)
        if self._writer is not None:
            speaker.write_snapshots(self._writer, from_another=True)
        urls = self._roads.attach(server, speaker)
        speaker.do(lambda lead: lead.orphaned())
        self._roads.publish("server", server, urls)
        self._roads.publish(published_kind(where.moves), server, urls)
        self._opened(self)

    def _meet(self, old: Mapping[int, ReplicaSet], new: Mapping[int, ReplicaSet], risen: list[Address]) -> None:
        """Connect the other servers to the coordinator after either side has moved."""
        coordinator = self._servers[0]
        moved = old[0].moves != new[0].moves
        for server, speaker in self._speakers.items():
            if server != coordinator and (moved or server in risen):
                if coordinator in self._speakers:
                    self._roads.connect_inside(server, coordinator)
                    speaker.do(lambda lead: lead.reconnected(coordinator))
                else:
                    self._apart(partial(self._call, speaker, new[0].moves), server)

    def _parted(self, me: Address, peer: Address) -> None:
        """Reconnect to the coordinator after the connection to it has ended."""
        if me in self._speakers and peer == self._servers[0]:
            self._apart(partial(self._seek, self._speakers[me], self._standing[0].moves), me)

    def _seek(self, speaker: PrimaryEndpoint, moves: int) -> None:
        """Call the coordinator at its old address until the launcher reports a move.

        This host may be the one that is cut off, and another process may be the primary by now. Then the standby
        confirms nothing. A call would take the connection away from the new primary, so the standby is asked first.
        """
        self._seat.missed(speaker.lead.me)
        until = time.monotonic() + self._grace_s
        while self._standing[0].moves == moves and not speaker.done:
            index = speaker.probe()
            time.sleep(spread(_AGAIN_S))
            with suppress(TransportError, TimeoutError):
                if speaker.lead.confirmed(index):
                    self._call(speaker, moves)
                    return
            if time.monotonic() > until:
                self._seat.despair(f"{speaker.lead.me} has lost {self._servers[0]}, and no end of it was reported")

    def admit(self, peer: Peer, connected: bool) -> None:
        """Refuse a former primary that does not know yet that it was replaced."""
        if peer.address in self._speakers:
            raise Refused("FENCED", f"{peer.address} has moved to another process")

    def _call(self, speaker: PrimaryEndpoint, moves: int) -> None:
        coordinator = self._servers[0]
        self._roads.connect(speaker.lead.me, coordinator, published_kind(moves), anew=True)
        speaker.do(lambda lead: lead.reconnected(coordinator))

    def _follow(self, speaker: PrimaryEndpoint, where: ReplicaSet) -> None:
        """Connect to the standby and send it the state."""
        if where.shadow < 0:
            return
        me = speaker.lead.me
        self._roads.connect(me, speaker.lead.shadow, f"shadow-{where.shadows}", anew=True)
        speaker.join(where.shadows)

    def _apart(self, do: Callable[[], None], server: Address) -> None:
        """Run `do` on a thread of its own, because it waits for a process that may die."""

        def live() -> None:
            with suppress(TransportError, TimeoutError):
                do()

        threading.Thread(target=live, name=f"of {server}", daemon=True).start()

    # --- end -----------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until the job no longer needs this process."""
        poll_s = self._place.job.cluster.poll_time / 1000
        dismissed: set[Address] = set()
        with self._change:
            while True:
                speakers = list(self._speakers.values())
                for speaker in speakers:
                    if speaker.done and speaker.lead.me not in dismissed:
                        dismissed.add(speaker.lead.me)
                        speaker.dismiss()
                listeners = list(self._listeners.values())
                if all(s.done for s in speakers) and all(x.done for x in listeners) and (speakers or listeners):
                    return
                self._change.wait(poll_s)
