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
from topotrain.extensions.checkpointing.snapshot_coordinator import NoFiles
from topotrain.extensions.elastic.group_departure import GroupDeparture
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
        subscribe: called once with a function that the launcher calls with each new placement.
        covered: called with (server, number of standbys so far) when the standby of a server has its whole state.
        differs: called with the same when a standby was found to differ from its primary.
        despair: called with the reason; ends the process, which is then replaced.
        missed: called with a server that has lost the connection to another server, without a report of its end.
    """

    standing: Mapping[int, ReplicaSet]
    subscribe: Callable[[Callable[[Mapping[int, ReplicaSet]], None]], None]
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
        router: its transports.
        change: notified when the server may be done.
        trouble: see Trouble.
        slot: the interface to the launcher.
        on_disconnect: called with this server and another when the connection between them has ended.
        grace_s: seconds for which the standby may be missed before this process ends.
        shadows: the number of standbys so far.
    """

    def __init__(
        self,
        lead: Primary,
        router: Router,
        change: threading.Condition,
        trouble: Trouble,
        slot: ReplicaSlot,
        on_disconnect: Callable[[Address, Address], None],
        grace_s: float,
        shadows: int = 0,
    ) -> None:
        self.lead, self.server = lead, lead.copy.server
        self.shadows = shadows
        self._snapshots: SnapshotPort | None = None
        self._slot, self._differed = slot, 0
        self._on_disconnect, self._grace_s = on_disconnect, grace_s
        self._router, self._change, self._trouble = router, change, trouble
        self._lock = threading.Lock()
        self._reported_covered = self._released = False
        self._alarm: threading.Timer | None = None

    def write_snapshots(self, writer: SnapshotWriter, from_another: bool = False) -> None:
        """Let this process write the server's snapshots.

        `from_another`: another process has done so before.
        """
        self._snapshots = writer.attach(snapshots_of(self.server), self, from_another)

    # --- calls by the transport ----------------------------------------------------------------------------------

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        """See `wire.Endpoint.place`."""
        with self._lock:
            return self.server.place(sender, message, viewable)

    def handle(self, sender: Address, message: Message) -> None:
        """See `wire.Endpoint.handle`."""
        fault = self._run(lambda: self.lead.handle(sender, message))
        if fault is not None:
            raise fault

    def lost(self, peer: Address, reason: str) -> None:
        """See `wire.Endpoint.lost`."""
        if peer == self.lead.standby:
            if not self._router.has_route(self.lead.me, peer):  # else a new standby is connected already
                self._on_standby_lost()
        elif peer.role is Role.SERVER:
            if not self._router.has_route(self.lead.me, peer):  # else there is a new connection already
                with self._lock:
                    self.lead.disconnected(peer)
                self._on_disconnect(self.lead.me, peer)
        else:
            self._run(lambda: self.lead.lost(peer) if peer in self.lead.up else [])

    def poke(self) -> None:
        """Handle messages from this process, such as those of the snapshot writer."""
        self._run(list)

    def handle_own(self, message: Message) -> None:
        """Handle a message of the launcher, sent in the server's own name.

        The standby gets it, too.
        """
        self._run(lambda: self.lead.handle(self.lead.me, message))

    def may_change(self, group: int, request: str) -> str:
        """Return why a group may not change now, or "". See `process_host`."""
        with self._lock:
            return self.server.extension(GroupDeparture).may_change(group, request)

    # --- orders of the launcher ----------------------------------------------------------------------------------

    def run(self, what: Callable[[Primary], Out]) -> None:
        """Run `what` with the primary and send the messages that it returns."""
        self._run(lambda: what(self.lead))

    def probe(self) -> int:
        """Ask the standby for a confirmation.

        Returns the number of the event, see `Primary.confirmed`.
        """
        self.run(lambda lead: lead.probe())
        return self.lead.copy.events

    def drop_standby(self, shadows: int) -> None:
        """Continue without the standby, which is gone.

        `shadows` is the number of the next standby.
        """
        self._cancel_alarm()
        self._reported_covered = False
        self.shadows = shadows
        self.run(lambda lead: lead.drop_standby())

    def add_standby(self, shadows: int) -> None:
        """Send the state to standby number `shadows`, unless it has been replaced already."""
        self.run(lambda lead: lead.add_standby() if shadows == self.shadows else [])

    def _on_standby_lost(self) -> None:
        """Handle the end of the connection to the standby."""
        with self._lock:
            waits = self.lead.joined and not self._released and self._alarm is None
            if waits:
                why = f"{self.lead.me} has lost the connection to its second copy, and no end of it was reported"
                self._alarm = threading.Timer(self._grace_s, self._slot.despair, (why,))
                self._alarm.daemon = True  # the process may end while it waits
                self._alarm.start()
        if waits:
            self._slot.missed(self.lead.me)
        self._report()

    def _cancel_alarm(self) -> None:
        with self._lock:
            if self._alarm is not None:
                self._alarm.cancel()
                self._alarm = None

    # --- inside --------------------------------------------------------------------------------------------------

    def _run(self, what: Callable[[], Out]) -> ProtocolError | None:
        try:
            with self._lock:
                self.lead.begin()
                out = what()
                self._compare()  # the launcher must know of a difference before any message is sent
                self._send(out)
                fault = self.lead.fault
                self._read_snapshots()
        except ProtocolError:
            raise
        except Exception:
            self._trouble()
            raise
        self._report()
        return fault

    def _compare(self) -> None:
        if self.lead.differs > self._differed:
            self._differed, self._reported_covered = self.lead.differs, False
            self._slot.differs(self.lead.me, self.shadows)

    def _read_snapshots(self) -> None:
        if self._snapshots is not None:
            for message in self._snapshots.messages():
                self._send(self.lead.handle(self.lead.me, message))

    def _send(self, out: Out) -> None:
        for to, message in out:
            with suppress(TransportError):  # the transport will call `lost`
                self._router.send(self.lead.me, to, message)

    def _report(self) -> None:
        if self.lead.covered and not self._reported_covered:
            self._reported_covered = True
            self._slot.covered(self.lead.me, self.shadows)
        if self.server.done:
            with self._change:
                self._change.notify_all()

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self.server.done and self.lead.clear

    def release_standby(self) -> None:
        """Release the standby, which has nothing left to do either."""
        with self._lock:
            self._released = True
            if self._alarm is not None:
                self._alarm.cancel()
            self._send([(self.lead.standby, ReplicaReleased())])


class StandbyEndpoint:
    """A standby at its own address.

    Args:
        server: the address of its server.
        shadow: the standby.
        router, change, trouble: as for PrimaryEndpoint.
    """

    def __init__(
        self, server: Address, shadow: Standby, router: Router, change: threading.Condition, trouble: Trouble
    ) -> None:
        self._server, self._me, self._standby = server, shadow_of(server), shadow
        self._router, self._change, self._trouble = router, change, trouble
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        """See `wire.Endpoint.place`."""
        with self._lock:
            return self._standby.place(message)

    def handle(self, sender: Address, message: Message) -> None:
        """See `wire.Endpoint.handle`."""
        if sender != self._server:
            raise ProtocolError(f"{self._me} accepts messages from {self._server} only")
        try:
            with self._lock:
                self._answer(self._standby.early_ack(message))
                self._answer(self._standby.handle(message))
        except ProtocolError:
            raise
        except Exception:
            self._trouble()
            raise
        if self._standby.over:
            with self._change:
                self._change.notify_all()

    def _answer(self, message: Message | None) -> None:
        if message is not None:
            with suppress(TransportError):
                self._router.send(self._me, self._server, message)

    def lost(self, peer: Address, reason: str) -> None:
        """See `wire.Endpoint.lost`."""
        self._ended.set()

    def promote(self) -> ReplicatedServer:
        """Return the replicated server, which becomes the primary.

        The process of the primary is gone.

        Raises:
            RuntimeError: this standby does not have the whole state.
        """
        self._ended.wait(_END_S)  # the last events of the primary are handled first; they are useful, not necessary
        with self._lock:
            copy = self._standby.promote()
        if copy is None:
            raise RuntimeError(f"{self._me} must become the primary, but has no state")
        return copy

    @property
    def done(self) -> bool:
        """Whether the primary has released this standby."""
        return self._standby.over


class ServerFactory(Protocol):
    """Makes a server with all extensions that the job asks for."""

    def __call__(self, me: Address, deliver: Callable[[Address, Message], None]) -> Server:
        """The server at address `me`, which hands each of its messages to `deliver`."""


class ReplicatedServers:
    """The replicated servers of one process. It replaces `process_host.HostedServers`.

    Args:
        place, router, trouble, writer: as there.
        make: makes a server of this job.
        me: the server with the slot of this process.
        slot: the interface to the launcher.
        opened: called with this object when another primary starts here.
    """

    def __init__(
        self,
        place: RouterConfig,
        router: Router,
        make: ServerFactory,
        me: Address,
        trouble: Trouble,
        writer: SnapshotWriter | None,
        slot: ReplicaSlot,
        opened: "Callable[[ReplicatedServers], None]" = lambda _: None,
    ) -> None:
        self._opened = opened
        self._place, self._router, self._make, self._me = place, router, make, me
        self._trouble, self._writer = trouble, writer
        self._slot, self._standing = slot, dict(slot.standing)
        self._grace_s = GRACE_S + APART_S * (me.index % 4)
        self._change = threading.Condition()
        self._servers = place.topology.servers(me.group)
        self._primaries: dict[Address, PrimaryEndpoint] = {}
        self._standbys: dict[Address, StandbyEndpoint] = {}
        self._orders: SimpleQueue[Mapping[int, ReplicaSet]] = SimpleQueue()
        router.set_admission(self)

    # --- start ---------------------------------------------------------------------------------------------------

    def open(self, serving: Callable[[Address, tuple[str, ...]], None]) -> None:
        """Start the copies of this slot.

        `serving` is called with the URLs once the server can be reached, or could be.
        """
        urls: tuple[str, ...] = ()
        for server in self._servers:
            where = self._standing[server.index]
            if where.shadow == self._me.index:
                urls = self._add_standby(server, where)
        if self._standing[self._me.index].lead == self._me.index:
            urls = self._begin(self._me)
        threading.Thread(target=self._run_placements, name="placements", daemon=True).start()
        serving(self._me, urls)

    def _begin(self, me: Address) -> tuple[str, ...]:
        """Start a primary in the first process of a server."""
        primary = self._add_primary(ReplicatedServer(partial(self._make, me)))
        if self._writer is not None:
            primary.write_snapshots(self._writer)
        urls = self._router.attach(me, primary)
        self._router.publish("door", me, urls)
        if me.index:
            coordinator = self._servers[0]
            self._router.connect(me, coordinator, "door")
            primary.run(lambda lead: lead.connected(coordinator))
        self._connect_standby(primary, self._standing[me.index])
        self._router.publish("server", me, urls)
        self._opened(self)
        return urls

    def _add_standby(self, server: Address, where: ReplicaSet) -> tuple[str, ...]:
        shadow = Standby(partial(self._make_standby, server), restore)
        endpoint = StandbyEndpoint(server, shadow, self._router, self._change, self._trouble)
        self._standbys[server] = endpoint
        urls = self._router.attach(shadow_of(server), endpoint)
        self._router.publish(f"shadow-{where.shadows}", server, urls)
        return urls

    def _make_standby(self, me: Address, deliver: Callable[[Address, Message], None]) -> Server:
        """Make the server of a standby.

        Only the process of the primary writes snapshots, but both servers must act as if they did.
        """
        server = self._make(me, deliver)
        snapshots_of(server).attach_host(NoFiles())
        return server

    def _add_primary(self, copy: ReplicatedServer, shadows: int = 0) -> PrimaryEndpoint:
        lead, ways = Primary(copy, save), (self._router, self._change, self._trouble)
        primary = PrimaryEndpoint(lead, *ways, self._slot, self._on_disconnect, self._grace_s, shadows)
        self._primaries[lead.me] = primary
        return primary

    def coordinator(self, group: int) -> PrimaryEndpoint | None:
        """Return the primary of the coordinator, or None if it is in another process."""
        return self._primaries.get(self._servers[0])

    # --- changes of the placement --------------------------------------------------------------------------------

    def arrange(self, standing: Mapping[int, ReplicaSet]) -> None:
        """Take over a new placement. May be called on any thread."""
        self._orders.put(standing)

    def _run_placements(self) -> None:
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
        promoted = [s for s in self._servers if new[s.index].lead == self._me.index and s not in self._primaries]
        for server in self._servers:
            primary = self._primaries.get(server)
            follower = new[server.index]
            if primary is not None and (old[server.index].shadows != follower.shadows or follower.shadow < 0):
                primary.drop_standby(follower.shadows)
        for server in promoted:
            self._promote(server, new[server.index])
        for server, primary in self._primaries.items():
            where, before = new[server.index], old[server.index]
            if where.shadow >= 0 and (server in promoted or before.shadows != where.shadows):
                self._in_background(partial(self._connect_standby, primary, where), server)
        self._connect_moved(old, new, promoted)

    def _promote(self, server: Address, where: ReplicaSet) -> None:
        """Turn a standby into the primary."""
        copy = self._standbys.pop(server).promote()
        primary = self._add_primary(copy, where.shadows)
        if self._writer is not None:
            primary.write_snapshots(self._writer, from_another=True)
        urls = self._router.attach(server, primary)
        primary.run(lambda lead: lead.take_over())
        self._router.publish("server", server, urls)
        self._router.publish(published_kind(where.moves), server, urls)
        self._opened(self)

    def _connect_moved(
        self, old: Mapping[int, ReplicaSet], new: Mapping[int, ReplicaSet], promoted: list[Address]
    ) -> None:
        """Connect the other servers to the coordinator after either side has moved."""
        coordinator = self._servers[0]
        moved = old[0].moves != new[0].moves
        for server, primary in self._primaries.items():
            if server != coordinator and (moved or server in promoted):
                if coordinator in self._primaries:
                    self._router.connect_inside(server, coordinator)
                    primary.run(lambda lead: lead.reconnected(coordinator))
                else:
                    self._in_background(partial(self._reconnect, primary, new[0].moves), server)

    def _on_disconnect(self, me: Address, peer: Address) -> None:
        """Reconnect to the coordinator after the connection to it has ended."""
        if me in self._primaries and peer == self._servers[0]:
            self._in_background(partial(self._search, self._primaries[me], self._standing[0].moves), me)

    def _search(self, primary: PrimaryEndpoint, moves: int) -> None:
        """Call the coordinator at its old address until the launcher reports a move.

        This host may be the one that is cut off, and another process may be the primary by now. Then the standby
        confirms nothing. A call would take the connection away from the new primary, so the standby is asked first.
        """
        self._slot.missed(primary.lead.me)
        until = time.monotonic() + self._grace_s
        while self._standing[0].moves == moves and not primary.done:
            index = primary.probe()
            time.sleep(spread(_AGAIN_S))
            with suppress(TransportError, TimeoutError):
                if primary.lead.confirmed(index):
                    self._reconnect(primary, moves)
                    return
            if time.monotonic() > until:
                self._slot.despair(f"{primary.lead.me} has lost {self._servers[0]}, and no end of it was reported")

    def admit(self, peer: Peer, connected: bool) -> None:
        """Refuse a former primary that does not know yet that it was replaced."""
        if peer.address in self._primaries:
            raise Refused("FENCED", f"{peer.address} has moved to another process")

    def _reconnect(self, primary: PrimaryEndpoint, moves: int) -> None:
        coordinator = self._servers[0]
        self._router.connect(primary.lead.me, coordinator, published_kind(moves), anew=True)
        primary.run(lambda lead: lead.reconnected(coordinator))

    def _connect_standby(self, primary: PrimaryEndpoint, where: ReplicaSet) -> None:
        """Connect to the standby and send it the state."""
        if where.shadow < 0:
            return
        me = primary.lead.me
        self._router.connect(me, primary.lead.standby, f"shadow-{where.shadows}", anew=True)
        primary.add_standby(where.shadows)

    def _in_background(self, do: Callable[[], None], server: Address) -> None:
        """Run `do` on a thread of its own, because it waits for a process that may die."""

        def run() -> None:
            with suppress(TransportError, TimeoutError):
                do()

        threading.Thread(target=run, name=f"of {server}", daemon=True).start()

    # --- end -----------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until the job no longer needs this process."""
        poll_s = self._place.job.cluster.poll_time / 1000
        released: set[Address] = set()
        with self._change:
            while True:
                primaries = list(self._primaries.values())
                for primary in primaries:
                    if primary.done and primary.lead.me not in released:
                        released.add(primary.lead.me)
                        primary.release_standby()
                standbys = list(self._standbys.values())
                if all(s.done for s in primaries) and all(x.done for x in standbys) and (primaries or standbys):
                    return
                self._change.wait(poll_s)
