"""Servers of one process in a job where every server has two copies.

The launcher, which sees all processes of the job, decides which copy is the primary and sends the placement.
This module carries it out. A standby becomes the primary and is published where its peers look for it. A
primary without its standby stops waiting for it and connects to the new one.

A lost connection alone does not prove that a process is dead. A primary that has lost its standby sends nothing more
until the launcher reports the end of the standby. A server that has lost the coordinator calls it again. If no end is
reported within GRACE_S seconds, and APART_S more for each further slot, the process ends itself and is replaced.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch

from topotrain.comm.backoff import spread
from topotrain.comm.process_timer import ProcessTimer, ServerClock
from topotrain.comm.router import Router, RouterConfig, published_kind
from topotrain.comm.security.handshake import Peer
from topotrain.comm.transport import Refused, TransportError
from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Message, ProtocolError
from topotrain.core.server.server import Server, ServerFactory
from topotrain.core.server.server_context import Out
from topotrain.core.transport_contract import MessageSender
from topotrain.extensions.checkpointing.checkpoint_extension import snapshots_of
from topotrain.extensions.checkpointing.checkpoint_writer import SnapshotPort, SnapshotWriter
from topotrain.extensions.checkpointing.snapshot_coordinator import NoFiles
from topotrain.extensions.elastic.group_departure import GroupDeparture
from topotrain.extensions.elastic.resize_requests import ServerProcess
from topotrain.extensions.replication.replica_placement import ReplicaSet
from topotrain.extensions.replication.replicated_server import ReplicatedServer
from topotrain.extensions.replication.replication_messages import ReplicaReleased
from topotrain.extensions.replication.state_machine import Primary, Standby

GRACE_S, APART_S = 15.0, 4.0
"""Seconds to wait for a report of an end, and additional seconds per slot.

Of two processes that have lost each other only one should end."""
_AGAIN_S = 0.5
_END_S = 5.0
"""Seconds until the end of a dead server's connection must have been noticed."""


class ReplicaSlot(ABC):
    """The launcher, as a process of one slot needs it."""

    def __init__(self, placement: Mapping[int, ReplicaSet]) -> None:
        self.placement = placement

    @abstractmethod
    def next_placement(self) -> Mapping[int, ReplicaSet]:
        """Wait for the next placement of the launcher, and return it."""

    @abstractmethod
    def on_standby_complete(self, server: Address, standby: int) -> None:
        """Report that a server's standby with this number has its whole state."""

    @abstractmethod
    def on_standby_differs(self, server: Address, standby: int) -> None:
        """Report that a server's standby with this number differs from its primary."""

    @abstractmethod
    def on_disconnect(self, server: Address) -> None:
        """Report that a server has lost another one, and no end of that was reported."""

    @abstractmethod
    def end_process(self, reason: str) -> None:
        """End this process, which the launcher then replaces."""


class HostedServer(Protocol):
    """A server of this process, and the seconds for which it has handled messages."""

    server: Server
    busy_s: float


class ReplicaObserver:
    """Receives the reports of the servers of one process. This class ignores them."""

    def on_serving(self, server: Address, urls: tuple[str, ...]) -> None:
        """A server can be reached at these URLs, or could be if it were a primary."""

    def on_open(self, servers: ServerProcess) -> None:
        """Workers can connect to all primaries. Called for each further primary, too."""

    def on_failure(self) -> None:
        """A server cannot continue. Called inside `except`, on the thread of a message."""

    def on_turn(self, servers: Mapping[Address, HostedServer], router: Router, last: bool = False) -> None:
        """Called several times a second, with the active servers; last: at their end."""


@dataclass(frozen=True, slots=True)
class ReplicaProcess:
    """The process of one slot, as its endpoints need it.

    Attributes:
        router: the transports.
        observer: receives the reports.
        slot: the interface to the launcher.
        grace_s: seconds for which another process may be missed before this one ends.
        change: set when a server may be done.
    """

    router: Router
    observer: ReplicaObserver
    slot: ReplicaSlot
    grace_s: float
    change: threading.Event = field(default_factory=threading.Event)


class PrimaryEndpoint(MessageSender):
    """The primary at its server's address. It handles one event at a time.

    Args:
        primary: the primary.
        process: its process.
        servers: the servers of the process.
        standby_number: counts its standbys.
    """

    def __init__(
        self, primary: Primary, process: ReplicaProcess, servers: "ReplicatedServers", standby_number: int = 0
    ) -> None:
        self.me, self.server = primary.me, primary.copy.server
        self.primary, self.standby_number = primary, standby_number
        self.busy_s = 0.0
        """Seconds in the handling of messages."""
        self._process, self._servers, self._router = process, servers, process.router
        self._snapshots: SnapshotPort | None = None
        self._differed = 0
        self._lock = threading.Lock()
        self._reported_complete = self._released = False
        self._alarm: threading.Timer | None = None
        self._early = primary.attach(self)
        self.server.timer.attach(ProcessTimer(self))

    def write_snapshots(self, writer: SnapshotWriter, from_another: bool = False) -> None:
        """Let this process write the server's snapshots.

        `from_another`: another process has done so before.
        """
        self._snapshots = writer.attach(snapshots_of(self.server), self, from_another)

    # --- calls by the transport ----------------------------------------------------------------------------------

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        with self._lock:
            return self.primary.landing.place(self.server, sender, message, viewable)

    def handle(self, sender: Address, message: Message) -> None:
        if sender == self.primary.standby:
            # Before the lock, which the thread holds that may go on with this ack.
            self._early.arrived(message)
        with self._event() as out:
            out += self.primary.handle(sender, message)
            fault = self.primary.fault
        # Raised after the event, so that its messages are sent and the lock is free.
        if fault is not None:
            raise fault

    def lost(self, peer: Address, reason: str) -> None:
        if peer == self.primary.standby:
            if not self._router.has_route(self.me, peer):  # else a new standby is connected already
                self._on_standby_lost()
        elif peer.role is Role.SERVER:
            if not self._router.has_route(self.me, peer):  # else there is a new connection already
                with self._lock:
                    self.primary.disconnected(peer)
                self._servers.on_disconnect(self.me, peer)
        else:
            with self._event() as out:
                if peer in self.primary.up:
                    out += self.primary.lost(peer)

    def poke(self) -> None:
        """Handle messages from this process, such as those of the snapshot writer."""
        with self._event():
            pass  # the messages are read with every event

    def handle_own(self, message: Message) -> None:
        """Handle a message of the launcher, sent in the server's own name."""
        # An event like any other, so the standby gets it, too.
        with self._event() as out:
            out += self.primary.handle(self.me, message)

    def may_change(self, group: int, request: str) -> str:
        """Return why a group may not change now, or "". See `process_host`."""
        with self._lock:
            return self.server.extension(GroupDeparture).may_change(group, request)

    # --- orders of the launcher ----------------------------------------------------------------------------------

    def take_over(self) -> None:
        """Begin to reply, after the end of the former primary's process."""
        with self._event() as out:
            out += self.primary.take_over()

    def connected(self, server: Address) -> None:
        """Begin on the first connection to another server."""
        with self._event() as out:
            out += self.primary.connected(server)

    def reconnected(self, server: Address) -> None:
        """Resume on a new connection to another server."""
        with self._event() as out:
            out += self.primary.reconnected(server)

    def probe(self) -> int:
        """Ask the standby for a confirmation, and return the event's number."""
        with self._event() as out:
            out += self.primary.probe()
        return self.primary.copy.events

    def drop_standby(self, number: int) -> None:
        """Continue without the standby, which is gone. `number`: of the next standby."""
        self._cancel_alarm()
        with self._event() as out:
            # With the number: the reader of another peer could report the new standby as complete for the old one.
            out += self.primary.drop_standby()
            self._reported_complete, self.standby_number = False, number

    def add_standby(self, number: int) -> None:
        """Send the state to the standby with this number, unless it was replaced."""
        with self._event() as out:
            if number == self.standby_number:
                out += self.primary.add_standby()

    def _on_standby_lost(self) -> None:
        """Handle the end of the connection to the standby."""
        with self._lock:
            # Without a joined standby no reply is held back, and after the release the standby's end is expected.
            waits = self.primary.joined and not self._released and self._alarm is None
            if waits:
                why = f"{self.me} has lost the connection to its second copy, and no end of it was reported"
                self._alarm = threading.Timer(self._process.grace_s, self._process.slot.end_process, (why,))
                self._alarm.daemon = True  # the process may end while it waits
                self._alarm.start()
        if waits:
            self._process.slot.on_disconnect(self.me)
        self._notify_if_done()

    def _cancel_alarm(self) -> None:
        with self._lock:
            if self._alarm is not None:
                self._alarm.cancel()
                self._alarm = None

    # --- inside --------------------------------------------------------------------------------------------------

    @contextmanager
    def _event(self) -> Iterator[Out]:
        """Lock the primary for one event, and send the messages of the block."""
        out: Out = []
        try:
            with self._lock:
                began = time.monotonic()
                yield out
                self.busy_s += time.monotonic() - began
                self._compare()  # the launcher must know of a difference before any message is sent
                self._send(out)
                self._read_snapshots()
                complete = self._newly_complete()
        # The peer's fault: the server itself can continue.
        except ProtocolError:
            raise
        except Exception:
            self._process.observer.on_failure()
            raise
        if complete >= 0:
            self._process.slot.on_standby_complete(self.me, complete)
        self._notify_if_done()

    def _compare(self) -> None:
        if self.primary.differs > self._differed:
            self._differed, self._reported_complete = self.primary.differs, False
            self._process.slot.on_standby_differs(self.me, self.standby_number)

    def _read_snapshots(self) -> None:
        if self._snapshots is not None:
            # The writer's messages become events, too, so that the standby knows which snapshots exist.
            for message in self._snapshots.messages():
                self._send(self.primary.handle(self.me, message))
                if self.primary.fault is not None:  # this process's own fault, not that of a peer
                    raise RuntimeError(f"a message of the snapshot writer was refused: {self.primary.fault}")

    def send(self, to: Address, message: Message) -> None:
        """Send a message of the primary, which is locked."""
        with suppress(TransportError):  # the transport will call `lost`
            self._router.send(self.me, to, message)

    def _send(self, out: Out) -> None:
        for to, message in out:
            self.send(to, message)

    def _newly_complete(self) -> int:
        """Return the standby's number if it has just got the whole state, else -1."""
        if not self.primary.covered or self._reported_complete:
            return -1
        self._reported_complete = True
        return self.standby_number

    def _notify_if_done(self) -> None:
        if self.server.done:
            self._process.change.set()

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        if not self.server.done:
            return False
        with self._lock:  # a server is done before its last messages are sent, and other threads add channels
            return self.primary.clear

    def release_standby(self) -> None:
        """Release the standby, which has nothing left to do either."""
        with self._lock:
            self._released = True
            if self._alarm is not None:
                self._alarm.cancel()
            # Under the lock, like every message of this endpoint, so that no event follows the release.
            self._send([(self.primary.standby, ReplicaReleased())])


class StandbyEndpoint:
    """A standby at its own address.

    Args:
        standby: the standby.
        process: its process.
    """

    def __init__(self, standby: Standby, process: ReplicaProcess) -> None:
        self._standby, self._process = standby, process
        self._server, self._me = standby.server, standby.me
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        """See `wire.Endpoint.place`."""
        with self._lock:
            return self._standby.place(message, viewable)

    def handle(self, sender: Address, message: Message) -> None:
        """See `wire.Endpoint.handle`."""
        if sender != self._server:
            raise ProtocolError(f"{self._me} accepts messages from {self._server} only")
        try:
            with self._lock:
                # The event is safe: it is in this process, and is handled before a promotion, which needs the lock.
                self._answer(self._standby.early_ack(message))
                for reply in self._standby.handle(message):
                    self._answer(reply)
        except ProtocolError:
            raise
        except Exception:
            self._process.observer.on_failure()
            raise
        if self._standby.over:
            self._process.change.set()

    def _answer(self, message: Message | None) -> None:
        if message is not None:
            with suppress(TransportError):
                self._process.router.send(self._me, self._server, message)

    def lost(self, peer: Address, reason: str) -> None:
        """See `wire.Endpoint.lost`."""
        self._ended.set()

    def promote(self) -> ReplicatedServer:
        """Return the replicated server, which becomes the primary.

        Raises RuntimeError if this standby does not have the whole state.
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


class StandbyFactory(ServerFactory):
    """Makes the servers of standbys."""

    def __init__(self, factory: ServerFactory) -> None:
        self._factory = factory

    def make(self, me: Address, sender: MessageSender) -> Server:
        """Return a new server; see `ServerFactory`."""
        server = self._factory.make(me, sender)
        # Only the process of the primary writes snapshots, but both servers must act as if they did.
        snapshots_of(server).attach_host(NoFiles())
        server.timer.attach(ServerClock())
        return server


class _ConnectionThread(threading.Thread):
    """Makes a connection in the background."""

    def run(self) -> None:
        # The process may be dead. The next placement then starts another thread.
        with suppress(TransportError, TimeoutError):
            super().run()


class ReplicatedServers:
    """The replicated servers of one process. It replaces `process_host.HostedServers`.

    Args:
        place, router, writer: as there.
        factory: makes a server of this job.
        me: the server with the slot of this process.
        slot: the interface to the launcher.
        observer: receives the reports of the servers.
    """

    def __init__(
        self,
        place: RouterConfig,
        router: Router,
        factory: ServerFactory,
        me: Address,
        slot: ReplicaSlot,
        observer: ReplicaObserver,
        writer: SnapshotWriter | None = None,
    ) -> None:
        self._place, self._router, self._factory, self._me = place, router, factory, me
        # Of two processes that have lost each other, the one with the shorter wait ends first.
        self._process = ReplicaProcess(router, observer, slot, GRACE_S + APART_S * (me.index % 4))
        self._slot, self._observer, self._writer = slot, observer, writer
        self._placement = dict(slot.placement)
        self._servers = place.topology.servers(me.group)
        self._primaries: dict[Address, PrimaryEndpoint] = {}
        self._standbys: dict[Address, StandbyEndpoint] = {}
        router.set_admission(self)

    # --- start ---------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Start the copies of this slot."""
        urls: tuple[str, ...] = ()
        # Standbys first: `_begin` waits for a standby in another process, which may wait for one here.
        for server in self._servers:
            where = self._placement[server.index]
            if where.standby == self._me.index:
                urls = self._add_standby(server, where)
        if self._placement[self._me.index].primary == self._me.index:
            urls = self._begin(self._me)
        # A promotion handles events. The thread inherits the flushing of denormals, which decides about their bits.
        threading.Thread(target=self._run_placements, name="placements", daemon=True).start()
        self._observer.on_serving(self._me, urls)

    def _begin(self, me: Address) -> tuple[str, ...]:
        """Start a primary in the first process of a server."""
        primary = self._add_primary(ReplicatedServer(self._factory, me))
        if self._writer is not None:
            primary.write_snapshots(self._writer)
        urls = self._router.attach(me, primary)
        # Under a kind of its own: workers look for "server", which is published when the server has its standby.
        self._router.publish("listening", me, urls)
        if me.index:
            coordinator = self._servers[0]
            self._router.connect(me, coordinator, "listening")
            primary.connected(coordinator)
        self._connect_standby(primary, self._placement[me.index])
        self._router.publish("server", me, urls)
        self._observer.on_open(self)
        return urls

    def _add_standby(self, server: Address, where: ReplicaSet) -> tuple[str, ...]:
        standby = Standby(StandbyFactory(self._factory), server)
        self._standbys[server] = endpoint = StandbyEndpoint(standby, self._process)
        urls = self._router.attach(standby.me, endpoint)
        self._router.publish(f"standby-{where.standbys}", server, urls)
        return urls

    def _add_primary(self, copy: ReplicatedServer, standby: int = 0) -> PrimaryEndpoint:
        primary = PrimaryEndpoint(Primary(copy), self._process, self, standby)
        self._primaries[copy.server.me] = primary
        return primary

    def coordinator(self, group: int) -> PrimaryEndpoint | None:
        """Return the primary of the coordinator, or None if it is in another process."""
        return self._primaries.get(self._servers[0])

    # --- changes of the placement --------------------------------------------------------------------------------

    def _run_placements(self) -> None:
        """Carry out new placements on a thread of its own."""
        while True:
            placement = self._slot.next_placement()
            try:
                self._rearrange(placement)
            except Exception:
                self._observer.on_failure()
                raise

    def _rearrange(self, new: Mapping[int, ReplicaSet]) -> None:
        old, self._placement = self._placement, dict(new)
        promoted = [s for s in self._servers if new[s.index].primary == self._me.index and s not in self._primaries]
        for server in self._servers:
            primary = self._primaries.get(server)
            where, before = new[server.index], old[server.index]
            # First of all, because the primary holds its replies until this call.
            if primary is not None and (before.standbys != where.standbys or where.standby < 0):
                primary.drop_standby(where.standbys)
        # Only now: a promoted standby waits for the last events of its primary, and the others must not wait for that.
        for server in promoted:
            self._promote(server, new[server.index])
        for server, primary in self._primaries.items():
            where, before = new[server.index], old[server.index]
            if where.standby >= 0 and (server in promoted or before.standbys != where.standbys):
                # In the background, since the new process may never be reachable. Then there is another placement.
                _ConnectionThread(
                    target=self._connect_standby, args=(primary, where), name=f"of {server}", daemon=True
                ).start()
        self._connect_moved(old, new, promoted)

    def _promote(self, server: Address, where: ReplicaSet) -> None:
        """Turn a standby into the primary."""
        copy = self._standbys.pop(server).promote()
        primary = self._add_primary(copy, where.standbys)
        if self._writer is not None:
            primary.write_snapshots(self._writer, from_another=True)
        urls = self._router.attach(server, primary)
        # Before it is published: the snapshots of the former process have failed when the first worker returns.
        primary.take_over()
        self._router.publish("server", server, urls)
        self._router.publish(published_kind(where.moves), server, urls)
        self._observer.on_open(self)

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
                    primary.reconnected(coordinator)
                else:
                    _ConnectionThread(
                        target=self._reconnect, args=(primary, new[0].moves), name=f"of {server}", daemon=True
                    ).start()

    def on_disconnect(self, me: Address, peer: Address) -> None:
        """Reconnect to the coordinator after the connection to it has ended."""
        if me in self._primaries and peer == self._servers[0]:
            moves = self._placement[0].moves
            _ConnectionThread(
                target=self._search, args=(self._primaries[me], moves), name=f"of {me}", daemon=True
            ).start()

    def _search(self, primary: PrimaryEndpoint, moves: int) -> None:
        """Call the coordinator at its old address until the launcher reports a move."""
        # This host may be the one that is cut off, and another process may be the primary by now. Then the standby
        # confirms nothing. A call would take the connection away from the new primary, so the standby is asked first.
        self._slot.on_disconnect(primary.me)
        until = time.monotonic() + self._process.grace_s
        while not primary.done:
            index = primary.probe()
            time.sleep(spread(_AGAIN_S))
            # A move was reported, or another thread has connected: a further connection would end that one.
            if self._placement[0].moves != moves or self._router.has_route(primary.me, self._servers[0]):
                return
            with suppress(TransportError, TimeoutError):
                if primary.primary.confirmed(index):
                    self._reconnect(primary, moves)
                    return
            if time.monotonic() > until:
                self._slot.end_process(f"{primary.me} has lost {self._servers[0]}, and no end of it was reported")

    def admit(self, peer: Peer, connected: bool) -> None:
        """Refuse a former primary that does not know yet that it was replaced."""
        if peer.address in self._primaries:
            raise Refused("FENCED", f"{peer.address} has moved to another process")

    def _reconnect(self, primary: PrimaryEndpoint, moves: int) -> None:
        coordinator = self._servers[0]
        self._router.connect(primary.me, coordinator, published_kind(moves), anew=True)
        primary.reconnected(coordinator)

    def _connect_standby(self, primary: PrimaryEndpoint, where: ReplicaSet) -> None:
        """Connect to the standby and send it the state."""
        if where.standby < 0:
            return
        self._router.connect(primary.me, primary.primary.standby, f"standby-{where.standbys}", anew=True)
        primary.add_standby(where.standbys)

    # --- end -----------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until the job no longer needs this process."""
        poll_s = self._place.job.cluster.poll_time / 1000
        released: set[Address] = set()
        while True:
            self._process.change.clear()
            primaries = dict(self._primaries)
            for each in primaries.values():
                if each.done and each.me not in released:
                    released.add(each.me)
                    each.release_standby()
            standbys = list(self._standbys.values())
            over = all(s.done for s in primaries.values()) and all(x.done for x in standbys)
            over = over and bool(primaries or standbys)
            if not over:
                self._process.change.wait(poll_s)
            self._observer.on_turn(primaries, self._router, last=over)
            if over:
                return
