"""One process of a job: its servers on their transports, and a worker's waits.

It handles addresses, transports and locks, and no algorithm. A server process holds all servers of its unit.
`worker_connections.py` connects a worker.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from topotrain.comm.process_timer import ProcessTimer
from topotrain.comm.router import Router, RouterConfig
from topotrain.comm.transport import TransportError
from topotrain.comm.transport.frame_writer import ReaderThread
from topotrain.comm.transport.inline_reader import InlineReader
from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.config.job import ConfigError, OnFailure
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.model.schema import BufferMemory, PrivateMemory
from topotrain.core.profiling.message_spans import sending
from topotrain.core.profiling.spans import SILENT, Recorder
from topotrain.core.protocol import Drained, Fail, FinalValue, Message, ProtocolError
from topotrain.core.server.server import Server, ServerFactory
from topotrain.core.transport_contract import MessageSender
from topotrain.extensions.checkpointing.checkpoint_extension import snapshots_of
from topotrain.extensions.checkpointing.checkpoint_reader import as_manifest
from topotrain.extensions.checkpointing.checkpoint_writer import SnapshotPort, SnapshotWriter
from topotrain.extensions.elastic.group_departure import GroupDeparture
from topotrain.extensions.elastic.resize_requests import LocalServer
from topotrain.extensions.replication.replica_host import ReplicaObserver, ReplicaSlot, ReplicatedServers
from topotrain.launch.runtime.server_composition import make_server
from topotrain.training.worker_profile import ProfileRecorders

if TYPE_CHECKING:
    from topotrain.extensions.decision_record.server_order import ServerOrder

LONG_S = 10.0
"""Seconds of a wait before it is reported."""
_ELSEWHERE_S = 0.1
"""Seconds that messages wait for a script that is elsewhere."""


@contextmanager
def flushing() -> Iterator[None]:
    """Flush denormals to zero on this thread, and on threads started inside."""
    # Denormal momentum values would make an update several times slower.
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        # The setting is of the thread, which may be the user's (`manual_server.serve`).
        torch.set_flush_denormal(False)


class ConnectionObserver(Protocol):
    """Observes connections of a server, on the readers' threads."""

    def on_joined(self, server: Server, worker: Address) -> None:
        """A worker has sent its first message."""
        ...

    def on_failed(self, server: Server, worker: Address, why: Fail) -> None:
        """A worker reports that it cannot go on, and why."""
        ...


class HostObserver(ReplicaObserver):
    """Receives the reports of a process. This class ignores them.

    connections: observes the connections of the servers. None: a worker's failure is a message like any other.
    """

    connections: ConnectionObserver | None = None

    def on_done(self, server: Server) -> None:
        """A server without replicas has no work left."""

    def on_lost(self, server: Server, peer: Address, reason: str) -> None:
        """A connection to a server, or to a worker that had sent a message, has ended.

        Called on the reader's thread of the connection.
        """

    def on_long_wait(self, seconds: float) -> None:
        """The worker has waited so long, and still waits. Called on the waiting thread."""


@dataclass(frozen=True, slots=True)
class HostOptions:
    """The receivers of a process's reports, spans and snapshots.

    observer: receives reports. profile: makes the recorders of spans; None: no profile is wanted.
    writer: writes the servers' snapshots, if the job takes any.
    order: records the order of the servers' decisions, or has it. None: neither.
    """

    observer: HostObserver = field(default_factory=HostObserver)
    profile: ProfileRecorders | None = None
    writer: SnapshotWriter | None = None
    order: "ServerOrder | None" = None

    def recorder(self, server: Address, groups: Iterable[int]) -> Recorder:
        """Return the recorder of spans of a server, which serves these worker groups."""
        return SILENT if self.profile is None else self.profile.server(server, groups)


class ServerEndpoint(MessageSender):
    """A server at its address.

    It handles one message at a time, and sends replies in the order of decisions.

    Args:
        me: the address.
        factory: makes the server.
        router: sends the replies.
        change: is set when the server may be done.
        options: of the process.
        goes_on: lost workers are expected to restart.
        inline: the server runs on a script's thread, which keeps its denormals.
    """

    def __init__(
        self,
        me: Address,
        factory: ServerFactory,
        router: Router,
        change: threading.Event,
        options: HostOptions,
        goes_on: bool = False,
        inline: bool = False,
    ) -> None:
        self.server = factory.make(me, self)
        self.busy_s = 0.0
        """Seconds in the handling of messages."""
        self.workers: set[Address] = set()
        self.over = False
        """Whether this process has found the server done, and closes its connections."""
        self._goes_on, self._inline = goes_on, inline
        self._observer = options.observer
        self._router = router
        self._lock = threading.Lock()
        self._change = change
        self._snapshots: SnapshotPort | None = None
        if options.writer is not None:
            # Where a script's thread does the server's work, it reads what is new with the next message.
            self._snapshots = options.writer.attach(snapshots_of(self.server), None if inline else self)
        self.server.timer.attach(ProcessTimer(self))

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        with self._lock:
            # The server's state names the buffer, and another reader may be changing it.
            return self.server.place(sender, message, viewable)

    def handle(self, sender: Address, message: Message) -> None:
        observer = self._observer.connections
        if sender.role is Role.WORKER and sender not in self.workers:
            self.server.validator.check(sender, message)  # an address that no worker can have is refused
            self.workers.add(sender)
            if observer is not None:
                observer.on_joined(self.server, sender)
        if isinstance(message, Fail) and sender.role is Role.WORKER and observer is not None:
            # Not for the server: the observer decides what a failed worker means for the job.
            observer.on_failed(self.server, sender, message)
            return
        try:
            with self._lock:
                self._handle(sender, message)
                self._read_snapshots()
        except ProtocolError:  # the peer's fault: it ends this connection, and nothing else
            raise
        except Exception:
            # The state may be half changed, so this server must not go on.
            self._observer.on_failure()
            raise
        self._notify_if_done()

    def poke(self) -> None:
        """Handle messages of this host's snapshot writer. Not for a script's thread."""
        with self._guarded():
            self._read_snapshots()
        self._notify_if_done()

    def handle_own(self, message: Message) -> None:
        """Handle a message of the launcher, with the server itself as its sender."""
        with self._guarded():
            self._handle(self.server.me, message)
            self._read_snapshots()
        self._notify_if_done()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Lock the server, and report an exception as its failure."""
        try:
            with self._lock:
                yield
        except Exception:
            self._observer.on_failure()
            raise

    def may_change(self, group: int, request: str) -> str:
        """Return why a group cannot leave or join; see `GroupDeparture.may_change`."""
        with self._lock:
            return self.server.extension(GroupDeparture).may_change(group, request)

    def catch_up(self) -> None:
        """Ask the coordinator for its decisions before there was a connection."""
        # Workers may have died before it. Shard 0 is the coordinator itself.
        if self._goes_on and self.server.me.index:
            with self._lock:
                for to, message in self.server.reconnected():
                    self.send(to, message)

    def _read_snapshots(self) -> None:
        if self._snapshots is not None:
            for message in self._snapshots.messages():
                try:
                    self._handle(self.server.me, message)
                except ProtocolError as error:  # the fault is in this process, not in the message
                    raise RuntimeError(f"a message of the snapshot writer was refused: {error}") from error

    def _notify_if_done(self) -> None:
        if self.server.done:
            self._change.set()

    def _handle(self, sender: Address, message: Message) -> None:
        began = time.monotonic()
        if self._inline:
            torch.set_flush_denormal(True)  # not `flushing`: this runs for every message
        try:
            self.server.handle(sender, message)
        finally:
            if self._inline:
                torch.set_flush_denormal(False)
            self.busy_s += time.monotonic() - began

    def send(self, to: Address, message: Message) -> None:
        """Send a message of the server; see `MessageSender`."""
        # A worker that has sent nothing yet has taken the place of one that is gone, to which the answer belongs.
        if to.role is Role.WORKER and to not in self.workers and not isinstance(message, Fail):
            return
        spans = self.server.spans
        try:
            if spans is SILENT:
                self._router.send(self.server.me, to, message)
            else:
                with sending(spans, to, message):
                    self._router.send(self.server.me, to, message)
        except TransportError:
            # The supervisor handles a peer that is gone: nothing can receive the answer. But these are sent before a
            # server is done, and another server would wait for them for ever.
            if self.over and to.role is Role.SERVER and isinstance(message, FinalValue | Drained):
                raise

    def lost(self, peer: Address, reason: str) -> None:
        if peer in self.workers or peer.role is Role.SERVER:
            self._observer.on_lost(self.server, peer, reason)
        # Under the lock no answer is half sent: what comes after is not for this worker.
        with self._guarded():
            self.workers.discard(peer)
            if self._goes_on and peer.role is Role.WORKER:
                self.server.lost(peer)
        self._change.set()  # a server without workers may be done now

    @property
    def done(self) -> bool:
        # Workers may still read the result after their last step. Without the lock first: reports wait for no message.
        if not self.server.done or self.workers:
            return False
        # A server is done before its last messages are sent, and they are sent under the lock.
        with self._lock:
            if not self.server.done or self.workers:
                return False
            # The script's thread, which read them for an inline server, does it no more.
            self._read_snapshots()
            return self._snapshots is None or not self._snapshots.holds_end(snapshots_of(self.server).writing)


class HostedServers:
    """The servers of one process, reachable and connected to their peers.

    Args:
        place: the settings of the process.
        router: of the process.
        memory: for the servers, as for `server.Server`.
        addresses: the servers.
        options: of the process.
    """

    def __init__(
        self,
        place: RouterConfig,
        router: Router,
        memory: BufferMemory,
        addresses: Sequence[Address],
        options: HostOptions,
    ) -> None:
        self._place, self._router, self._observer = place, router, options.observer
        self._change = threading.Event()
        factory = HostedServerFactory(place, memory, options)
        goes_on, inline = place.job.on_failure is OnFailure.kContinue, place.topology.inline
        self.endpoints = {
            me: ServerEndpoint(me, factory, router, self._change, options, goes_on, inline) for me in addresses
        }

    def open(self) -> None:
        """Connect the servers, then admit workers."""
        # All are attached before one is published: a peer may dial as soon as the first URL is there.
        urls = self._router.attach_together(self.endpoints)
        for me in self.endpoints:
            # Under a kind of its own: workers look for "server", which is published when the servers are connected.
            self._router.publish("listening", me, urls)
        for me in self.endpoints:
            for peer in peers(me, self._place.topology):
                if peer in self.endpoints:
                    self._router.connect_inside(me, peer)
                else:
                    self._router.connect(me, peer, "listening")
        # Servers are connected, workers are not: nothing new is decided while the missed decisions arrive.
        for endpoint in self.endpoints.values():
            endpoint.catch_up()
        for me in self.endpoints:
            # Only now: no server must send a message over a connection that is not there yet.
            self._router.publish("server", me, urls)
            self._observer.on_serving(me, urls)

    def coordinator(self, group: int) -> LocalServer | None:
        """Return the coordinator of a worker group; see `ServerProcess`."""
        found = (each for me, each in self.endpoints.items() if me.index == 0 and group in each.server.groups)
        return next(found, None)

    def wait(self) -> None:
        """Return when the job needs these servers no more."""
        poll_s = self._place.job.cluster.poll_time / 1000
        while True:
            self._change.clear()
            if all(endpoint.done for endpoint in self.endpoints.values()):
                return
            self._change.wait(poll_s)
            self._observer.on_turn(self.endpoints, self._router)


def serve(
    place: RouterConfig,
    addresses: Sequence[Address],
    options: HostOptions,
    slot: ReplicaSlot | None = None,
) -> tuple[int, int, int]:
    """Run the servers of one process, see `HostedServers`.

    Returns the bytes of messages sent, received, and sent over TCP.

    slot: the replica settings, where every server has two replicas.
    """
    shared = ProcessMemory()
    router = Router(place, shared)
    copied = place.job.cluster.replicas > 1
    # A second copy on this host reads the workers' gradients in the memory of the first one.
    memory: BufferMemory = shared if place.shared or copied else PrivateMemory()
    observer = options.observer
    with flushing():
        if copied:
            if slot is None:
                accepted = "needs a launcher, as `topotrain run` or `topotrain unit`, that replaces processes"
                raise ConfigError("cluster.replicas", 2, accepted)
            factory = HostedServerFactory(place, memory, options)
            replicated = ReplicatedServers(place, router, factory, addresses[0], slot, observer, options.writer)
            replicated.open()
            replicated.wait()
        else:
            servers = HostedServers(place, router, memory, addresses, options)
            servers.open()
            observer.on_open(servers)
            servers.wait()
            observer.on_turn(servers.endpoints, router, last=True)
            for endpoint in servers.endpoints.values():
                endpoint.over = True
                observer.on_done(endpoint.server)
        router.close()
    return (*router.traffic(), router.link_traffic()[0])


@dataclass(frozen=True, slots=True)
class HostedServerFactory(ServerFactory):
    """Makes the servers of the job of this process.

    Attributes:
        place: the settings of the process.
        memory: for the servers, as for `server.Server`.
        options: of the process.
    """

    place: RouterConfig
    memory: BufferMemory
    options: HostOptions

    def make(self, me: Address, sender: MessageSender) -> Server:
        """Return a new server; see `ServerFactory`."""
        place = self.place
        resumed = as_manifest(place.resumed)
        order = self.options.order
        server = make_server(me, place.job, place.topology, self.memory, place.shared, sender, resumed, order)
        server.record_spans(self.options.recorder(me, server.groups))
        return server


def peers(me: Address, topology: Topology) -> list[Address]:
    """Return the servers that a server connects to.

    These are its coordinator, and its own shard in the groups before it. In a collective these are all servers before
    it.
    """
    # Only towards those before it, so that two servers make one connection.
    shards = range(me.index) if topology.server_collective else range(min(me.index, 1))
    peers = [Address(Role.SERVER, me.group, shard) for shard in shards]
    groups = range(me.group) if topology.synced else range(min(me.group, 1))
    return peers + [Address(Role.SERVER, group, me.index) for group in groups]


class _LongWaits:
    """Reports a wait after LONG_S, and again each time that it has doubled."""

    def __init__(self, observer: HostObserver) -> None:
        self._observer, self._began, self._next_s = observer, time.monotonic(), LONG_S

    def check(self) -> None:
        seconds = time.monotonic() - self._began
        if seconds >= self._next_s:
            # A long evaluation of one worker must not fill the terminal of all others.
            self._next_s = 2 * seconds
            self._observer.on_long_wait(seconds)


class _ExclusiveChange:
    """Exclusive access for a change.

    After it a waiting thread wakes if its condition is met.

    Every message of a worker passes through it, so that it has no state of one use and is made once.
    """

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self._ready: Callable[[], bool] | None = None

    def await_condition(self, ready: Callable[[], bool] | None) -> None:
        """Test this condition after each change; None: no thread waits."""
        self._ready = ready

    def __enter__(self) -> None:
        self.condition.acquire()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            # The reader tests the condition, so the script's thread wakes once, and not for every message.
            if error is None and self._ready is not None and self._ready():
                self.condition.notify_all()
        finally:
            self.condition.release()


class ConditionWaiter:
    """The wait of a live worker; the transports' readers notify it."""

    def __init__(self, poll_s: float, observer: HostObserver | None = None) -> None:
        self._change = _ExclusiveChange()
        self._poll_s = poll_s
        self._observer = observer or HostObserver()

    def update(self) -> AbstractContextManager[None]:
        """Make a change; a waiting worker wakes if its condition is met."""
        return self._change

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return when `ready()` is true."""
        condition = self._change.condition
        with condition:
            self._change.await_condition(ready)
            waits = _LongWaits(self._observer)
            try:
                while not ready():
                    # With a limit: `ready` may depend on time, and a long wait is reported.
                    condition.wait(self._poll_s)
                    waits.check()
            finally:
                self._change.await_condition(None)

    def look(self) -> None:
        """Do nothing: the transports' readers handle arrived messages by themselves."""


class InlineWaiter(ConditionWaiter):
    """The wait of a worker with a server in its process; it reads for both.

    The other workers need the server also while the script is elsewhere, and the script may wait for them there in a
    way of its own. So messages that have waited for a while are handled on a thread of this waiter.
    """

    def __init__(self, poll_s: float, router: Router, reader: InlineReader, observer: HostObserver) -> None:
        super().__init__(poll_s, observer)
        self._router, self._reader = router, reader
        self._turning = threading.RLock()
        self._turns = 0  # of the script's thread
        self._released = threading.Event()

    def begin(self) -> None:
        """Serve also while the script is elsewhere, until `release`. All connections of the worker are there."""
        ReaderThread(target=self._turn_elsewhere, name="inline server", daemon=True).start()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return when `ready()` is true."""
        waits = _LongWaits(self._observer)
        # The script's thread handles the server's messages while it waits for the server's reply.
        while not self._reader.released:
            with self._turning:
                self._turns += 1
                self._router.deliver()
                if ready():
                    return
                self._router.turn(self._poll_s)
            waits.check()
        # The reader was released: each connection is read on a thread of its own from now on.
        super().wait(ready)

    def look(self) -> None:
        """Handle arrived messages, and do the resulting work of the server."""
        with self._turning:
            self._turns += 1
            self._turn()

    def release(self, me: Address, deliver: bool) -> None:
        """Read on threads from now on, and end the connections of the worker `me`.

        deliver: its own messages to its server are handled before.
        """
        self._released.set()
        with self._turning:
            if deliver:
                self._router.deliver()
            self._router.release(me)

    def _turn(self) -> None:
        if not self._reader.released:
            self._router.deliver()
            self._router.turn(0.0)

    def _turn_elsewhere(self) -> None:
        seen = 0
        while not self._released.wait(_ELSEWHERE_S):
            # A script's thread that holds the lock is not elsewhere.
            if not self._turning.acquire(blocking=False):
                continue
            try:
                if self._turns == seen:
                    self._turn()
                seen = self._turns
            finally:
                self._turning.release()
