"""One process of a job: it opens transports, admits residents, passes messages.

It handles addresses, transports and locks, and no algorithm. A server process holds all servers of its unit, and a
worker process holds one worker. Server processes connect to each other before they admit workers, so no server has to
send a message without a connection.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from typing import Protocol

import torch

from topotrain.comm.router import Router, RouterConfig
from topotrain.comm.store import within
from topotrain.comm.store.discovery.static_addresses import StaticStore
from topotrain.comm.torch_store.c10d_store import TorchStore
from topotrain.comm.transport import ConnectionLost, TransportError
from topotrain.comm.transport.inline_reader import InlineReader
from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.config.job import ConfigError, OnFailure
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.client.client import Client
from topotrain.core.client.step_exchange import GradientExchange
from topotrain.core.model.schema import Allocate
from topotrain.core.profiling.message_spans import sending
from topotrain.core.profiling.spans import SILENT, Recorder
from topotrain.core.protocol import Fail, Message, ProtocolError
from topotrain.core.server.server import Server
from topotrain.extensions.checkpointing.checkpoint_extension import snapshots_of
from topotrain.extensions.checkpointing.checkpoint_reader import as_manifest
from topotrain.extensions.checkpointing.checkpoint_writer import SnapshotPort, SnapshotWriter
from topotrain.extensions.elastic.membership import ElasticGroups
from topotrain.extensions.elastic.resize_requests import LocalServer, ServerProcess
from topotrain.extensions.replication.replica_connections import ReplicaConnections
from topotrain.extensions.replication.replica_host import ReplicaSlot, ReplicatedServers
from topotrain.launch.runtime.client_composition import client_extensions
from topotrain.launch.runtime.server_composition import make_server
from topotrain.parallel.runtime.network_channel import NetworkChannel
from topotrain.training.context import Connections

# --- servers -----------------------------------------------------------------------------------------------------


@contextmanager
def flushing() -> Iterator[None]:
    """Flush denormal numbers to zero on this thread, and on threads started inside.

    Denormal momentum values would make an update several times slower.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


class ConnectionObserver(Protocol):
    """Observes connections of a server.

    It is called on the readers' threads.
    """

    def came(self, server: Server, worker: Address) -> None:
        """A worker has sent its first message."""
        ...

    def gives_up(self, server: Server, worker: Address, why: Fail) -> None:
        """A worker reports that it cannot go on, and why."""
        ...

    def lost(self, server: Server, peer: Address, reason: str) -> None:
        """A connection has ended, to a server or to a worker that had sent a message."""
        ...


class _ServerResident:
    """A server at its address.

    It handles one message at a time, and sends replies in the order of decisions.
    """

    def __init__(
        self,
        make: Callable[[Callable[[Address, Message], None]], Server],
        roads: Router,
        change: threading.Condition,
        trouble: Callable[[], None],
        goes_on: bool = False,
    ) -> None:
        self._goes_on = goes_on  # without workers that are lost, until they are started again
        self.server = make(self._answer)
        self.flushes = False  # the thread is a script's, which keeps its denormals
        self.workers: set[Address] = set()
        self.attendant: ConnectionObserver | None = None
        self.aside: SnapshotPort | None = None
        self._roads = roads
        self._lock = threading.Lock()
        self._change = change
        self._trouble = trouble

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        with self._lock:
            return self.server.place(sender, message, viewable)

    def handle(self, sender: Address, message: Message) -> None:
        if sender.role is Role.WORKER and sender not in self.workers:
            self.server.validator.check(sender, message)  # or it is nobody who could come
            self.workers.add(sender)
            if self.attendant is not None:
                self.attendant.came(self.server, sender)
        if isinstance(message, Fail) and sender.role is Role.WORKER and self.attendant is not None:
            self.attendant.gives_up(self.server, sender, message)
            return
        try:
            with self._lock:
                self._handle(sender, message)
                self._hear()
        except ProtocolError:  # the peer's fault: it ends this connection, and nothing else
            raise
        except Exception:
            self._trouble()
            raise
        self._look_whether_done()

    def poke(self) -> None:
        """Handle messages of the snapshot writer of this host.

        Call it on any thread but a script's.
        """
        try:
            with self._lock:
                self._hear()
        except Exception:
            self._trouble()
            raise
        self._look_whether_done()

    def told(self, message: Message) -> None:
        """Handle a message of the launcher, with the server itself as its sender."""
        try:
            with self._lock:
                self._handle(self.server.me, message)
                self._hear()
        except Exception:
            self._trouble()
            raise
        self._look_whether_done()

    def may_change(self, group: int, wish: str) -> str:
        """Return why a group cannot leave or join; see `Server.may_change`."""
        with self._lock:
            return self.server.extension(ElasticGroups).may_change(group, wish)

    def catch_up(self) -> None:
        """Ask the coordinator for its decisions before there was a connection.

        Workers may have died in that time.
        """
        if self._goes_on and self.server.me.index:
            with self._lock:
                for to, message in self.server.reconnected():
                    self._answer(to, message)

    def _hear(self) -> None:
        if self.aside is not None:
            for message in self.aside.heard():
                self._handle(self.server.me, message)

    def _look_whether_done(self) -> None:
        if self.server.done:
            with self._change:
                self._change.notify_all()

    def _handle(self, sender: Address, message: Message) -> None:
        if not self.flushes:
            self.server.handle(sender, message)
            return
        torch.set_flush_denormal(True)  # not `flushing`: this runs for every message
        try:
            self.server.handle(sender, message)
        finally:
            torch.set_flush_denormal(False)

    def _answer(self, to: Address, answer: Message) -> None:
        if to.role is Role.WORKER and to not in self.workers and not isinstance(answer, Fail):
            return  # it was meant for one that is gone, and whose place another has taken who has said nothing yet
        # A peer that is gone is the supervisor's business: the answer has nobody to go to.
        with suppress(TransportError), sending(self.server.spans, to, answer):
            self._roads.send(self.server.me, to, answer)

    def lost(self, peer: Address, reason: str) -> None:
        if self.attendant is not None and (peer in self.workers or peer.role is Role.SERVER):
            self.attendant.lost(self.server, peer, reason)
        try:
            with self._lock:  # nobody is in the middle of an answer: what comes after is not for this one
                self.workers.discard(peer)
                if self._goes_on and peer.role is Role.WORKER:
                    self.server.lost(peer)
        except Exception:
            self._trouble()
            raise
        with self._change:
            self._change.notify_all()

    @property
    def done(self) -> bool:
        return self.server.done and not self.workers


Recorders = Callable[[Address, Sequence[int]], Recorder]


class HostedServers:
    """The servers of one process, reachable and connected to their peers.

    Args:
        place: the settings of the process.
        roads: the router of the process.
        allocate: memory for the servers, as for `server.Server`.
        addresses: the servers.
        trouble: called inside `except`, on the thread that handled a message, when a server cannot go on.
        recorder: makes a server's recorder of spans, from its address and the worker groups that it serves.
        writer: writes the servers' snapshots, if the job takes any.
    """

    def __init__(
        self,
        place: RouterConfig,
        roads: Router,
        allocate: Allocate,
        addresses: Sequence[Address],
        trouble: Callable[[], None],
        recorder: Recorders = lambda *_: SILENT,
        writer: SnapshotWriter | None = None,
    ) -> None:
        self._place, self._roads = place, roads
        self._change = threading.Condition()
        self.residents: dict[Address, _ServerResident] = {}
        for me in addresses:
            make = partial(hosted_server, place, allocate, me, recorder=recorder)
            goes_on = place.job.on_failure is OnFailure.kContinue
            self.residents[me] = resident = _ServerResident(make, roads, self._change, trouble, goes_on)
            if writer is not None:
                # Where a script's thread does the server's work, it hears what is new with the next message.
                poke = (lambda: None) if place.topology.inline else resident.poke
                resident.aside = writer.follow(me, snapshots_of(resident.server), poke)

    def open(self, serving: Callable[[Address, tuple[str, ...]], None]) -> None:
        """Connect the servers, then admit workers.

        serving: is called with each server's URLs when it is reachable.
        """
        urls = {me: self._roads.attach(me, resident) for me, resident in self.residents.items()}
        for me in urls:
            self._roads.publish("door", me, urls[me])
        for me in urls:
            for peer in peers(me, self._place.topology):
                if peer in urls:
                    self._roads.connect_inside(me, peer)
                else:
                    self._roads.connect(me, peer, "door")
        for resident in self.residents.values():
            resident.catch_up()
        for me in urls:
            self._roads.publish("server", me, urls[me])
            serving(me, urls[me])

    def coordinator(self, group: int) -> LocalServer | None:
        """Return the coordinator of a worker group; see `ServerProcess`."""
        found = (r for me, r in self.residents.items() if me.index == 0 and group in r.server.groups)
        return next(found, None)

    def wait(self) -> None:
        """Return when the job needs these servers no more."""
        with self._change:
            while not all(resident.done for resident in self.residents.values()):
                self._change.wait(self._place.job.cluster.poll_time / 1000)


def serve(
    place: RouterConfig,
    addresses: Sequence[Address],
    serving: Callable[[Address, tuple[str, ...]], None],
    trouble: Callable[[], None],
    recorder: Recorders = lambda *_: SILENT,
    attendant: ConnectionObserver | None = None,
    writer: SnapshotWriter | None = None,
    opened: Callable[[ServerProcess], None] = lambda servers: None,
    seat: ReplicaSlot | None = None,
    ended: Callable[[Server], None] = lambda server: None,
) -> tuple[int, int]:
    """Run the servers of one process, see `HostedServers`.

    Returns the bytes of messages sent and received.

    opened: is called when all workers can connect, and again for each additional server here.
    seat: the replica settings, where every server has two replicas.
    ended: is called with each server that has no work left, without replication.
    """
    memory = ProcessMemory()
    roads = Router(place, memory)
    allocate = memory.allocate if place.shared else _zeros
    if place.job.cluster.replicas > 1:
        if seat is None:
            raise ConfigError(
                "cluster.replicas",
                2,
                "needs a launcher, as `topotrain run` or `topotrain unit`, that replaces processes",
            )
        with flushing():
            make = partial(hosted_server, place, allocate, recorder=recorder)
            copied = ReplicatedServers(place, roads, make, addresses[0], trouble, writer, seat, opened)
            seat.taken(copied.arrange)
            copied.open(serving)
            copied.wait()
            roads.close()
        return roads.traffic()
    with flushing():
        servers = HostedServers(place, roads, allocate, addresses, trouble, recorder, writer)
        for resident in servers.residents.values():
            resident.attendant = attendant
        servers.open(serving)
        opened(servers)
        servers.wait()
        for resident in servers.residents.values():
            ended(resident.server)
        roads.close()
    return roads.traffic()


def hosted_server(
    place: RouterConfig,
    allocate: Allocate,
    me: Address,
    deliver: Callable[[Address, Message], None],
    recorder: Recorders = lambda *_: SILENT,
) -> Server:
    """Make the server at an address of the job of this process."""
    server = make_server(me, place.job, place.topology, allocate, place.shared, deliver, as_manifest(place.resumed))
    server.record_spans(recorder(me, server.groups))
    return server


def _zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype)


def peers(me: Address, topology: Topology) -> list[Address]:
    """Return the servers that a server connects to.

    These are its coordinator, and its own shard in the groups before it. In a collective these are all servers before
    it.
    """
    shards = range(me.index) if topology.relayed else range(min(me.index, 1))
    peers = [Address(Role.SERVER, me.group, shard) for shard in shards]
    groups = range(me.group) if topology.synced else range(min(me.group, 1))
    return peers + [Address(Role.SERVER, group, me.index) for group in groups]


_LEAVE_S = 60.0
"""Seconds for which a finished worker waits until both replicas of each server have all its messages."""
LONG_S = 10.0
"""Seconds of a wait before it is reported. """

# --- workers -----------------------------------------------------------------------------------------------------


class LongWait(Protocol):
    """Called on the waiting thread after so many seconds of a wait, which continues."""

    def __call__(self, seconds: float) -> None: ...


def untold(seconds: float) -> None:
    """Ignore a long wait."""


class _Patience:
    """Reports a wait after LONG_S, and again each time that it has doubled."""

    def __init__(self, tell: LongWait) -> None:
        self._tell, self._began, self._next_s = tell, time.monotonic(), LONG_S

    def look(self) -> None:
        seconds = time.monotonic() - self._began
        if seconds >= self._next_s:
            self._next_s = 2 * seconds
            self._tell(seconds)


class ConditionWaiter:
    """The wait of a live worker, on a condition variable.

    The transports' readers notify it.
    """

    def __init__(self, poll_s: float, long_wait: LongWait = untold) -> None:
        self._condition = threading.Condition()
        self._poll_s = poll_s
        self._long_wait = long_wait
        self._ready: Callable[[], bool] | None = None

    @contextmanager
    def update(self) -> Iterator[None]:
        """Make a change; a waiting worker wakes if its condition is met."""
        with self._condition:
            yield
            if self._ready is not None and self._ready():
                self._condition.notify_all()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return when `ready()` is true."""
        with self._condition:
            self._ready = ready
            patience = _Patience(self._long_wait)
            try:
                while not ready():
                    self._condition.wait(self._poll_s)
                    patience.look()
            finally:
                self._ready = None

    def look(self) -> None:
        """Do nothing: the transports' readers handle arrived messages by themselves."""


class InlineWaiter(ConditionWaiter):
    """The wait of a worker with a server in its process.

    The waiting thread does the server's work, and reads for both.
    """

    def __init__(self, poll_s: float, roads: Router, pump: InlineReader, long_wait: LongWait = untold) -> None:
        super().__init__(poll_s, long_wait)
        self._roads, self._pump = roads, pump

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return when `ready()` is true."""
        patience = _Patience(self._long_wait)
        while not self._pump.released:
            self._roads.deliver()
            if ready():
                return
            self._roads.turn(self._poll_s)
            patience.look()
        super().wait(ready)

    def look(self) -> None:
        """Handle arrived messages, and do the resulting work of the server."""
        if not self._pump.released:
            self._roads.deliver()
            self._roads.turn(0.0)


class WorkerConnections(Connections):
    """A worker's connections to the servers of its group and to server (0,0).

    With an inline layout (`Topology.inline`) the worker's process also runs a server.

    Args:
        place: the settings of the process.
        me: the worker.
        serving, trouble, recorder, writer: for the server in this process, as for `HostedServers`.
        long_wait: is called when the worker waits for long.
    """

    def __init__(
        self,
        place: RouterConfig,
        me: Address,
        serving: Callable[[Address, tuple[str, ...]], None] = lambda *_: None,
        trouble: Callable[[], None] = lambda: None,
        recorder: Recorders = lambda *_: SILENT,
        writer: SnapshotWriter | None = None,
        long_wait: LongWait = untold,
    ) -> None:
        self.me = me
        self.memory = ProcessMemory()
        self._shared = place.shared
        self._place = place
        pump = InlineReader() if place.topology.inline else None
        self._roads = Router(place, self.memory, pump)
        poll_s = place.job.cluster.poll_time / 1000
        monitor = (
            ConditionWaiter(poll_s, long_wait) if pump is None else InlineWaiter(poll_s, self._roads, pump, long_wait)
        )
        self._monitor = monitor
        # The script's thread is one that may wait for room; with a pump it reads, too, and so may not.
        twice = place.job.cluster.replicas > 1
        send = self._say if twice else partial(self._roads.send, me, wait=pump is None)
        self._lines: ReplicaConnections | None = None
        self.exchange = self._client(place, send, monitor)
        if twice:
            servers = dict.fromkeys((*self.exchange.channel.servers, self.exchange.channel.first_server))
            life = place.identity.incarnation
            way = (partial(self._roads.send, me), self._redial, self._noted, life)
            self._lines = ReplicaConnections(servers, self.exchange, *way)
        self._beside: HostedServers | None = None
        if pump is not None:
            beside = Address(Role.SERVER, 0, me.index)
            self._beside = HostedServers(place, self._roads, self.allocate, [beside], trouble, recorder, writer)
            self._beside.residents[beside].flushes = True
        try:
            self._connect(serving)
        except BaseException:  # nobody could leave what was never made
            self.close(finished=False)
            raise

    def _connect(self, serving: Callable[[Address, tuple[str, ...]], None]) -> None:
        if self._beside is not None:
            self._beside.open(serving)
        resident = self._lines or self.exchange
        self._urls = self._roads.attach(self.me, resident, dial_only=True, inside=self._beside is not None)
        for server in dict.fromkeys((*self.exchange.channel.servers, self.exchange.channel.first_server)):
            if self._beside is not None and server in self._beside.residents:
                self._roads.connect_inside(self.me, server)
            elif self._lines is not None:
                self._lines.begin(server)
                self._roads.follow(self.me, server, 0)
            else:
                self._roads.connect(self.me, server, "server")
        self.exchange.rejoin.announce()

    # --- servers with two copies

    def _say(self, to: Address, message: Message) -> None:
        assert self._lines is not None
        self._lines.send(to, message, wait=True)

    def _noted(self) -> None:
        with self._monitor.update():
            pass

    def _redial(self, server: Address, moves: int) -> None:
        """Connect to a server's replica after the loss of its process or connection."""
        lines = self._lines
        assert lines is not None

        def look() -> None:
            try:
                lines.connected(server, self._roads.follow(self.me, server, moves))
            except ConnectionLost as error:
                lines.failed(server, str(error))
            except (TransportError, TimeoutError) as error:
                lines.failed(server, f"its process has died, and no other one took its place: {error}")

        threading.Thread(target=look, name=f"to {server}", daemon=True).start()

    def _client(
        self, place: RouterConfig, send: Callable[[Address, Message], None], monitor: ConditionWaiter
    ) -> Client:
        topology, incarnation = place.topology, place.identity.incarnation
        gradients = self._torch_reduction(place) if topology.foreign else None
        extensions = client_extensions(topology)
        return Client(self.me, topology, send, monitor, place.shared, incarnation, extensions, gradients)

    def _torch_reduction(self, place: RouterConfig) -> GradientExchange:
        from topotrain.extensions.collectives.torch_reduction import TorchCollectiveConfig, TorchReduction

        if not place.sockets.parts or len(set(place.topology.hosts)) > 1:  # no folder that all workers share
            store = TorchStore(within(place.store, f"engine/{self.me.group}"))
            return TorchReduction(TorchCollectiveConfig(place.job, store, place.host))
        # Several jobs may use the folder, and every run has a token of its own.
        folder = f"engine-{sha256(b'engine' + place.identity.token).hexdigest()[:16]}"
        return TorchReduction(TorchCollectiveConfig(place.job, str(place.sockets / folder)))

    @property
    def beside(self) -> ServerProcess | None:
        """The server in the worker's process."""
        return self._beside

    def meet_group(self) -> NetworkChannel:
        """Connect to the other workers of the group, over which one model is split.

        All of them call this. A worker connects to those before it, and waits for those after it. Call it once, after
        the client has sent the model's description: a worker with another model fails here.

        Raises:
            ConfigError: the job's processes have no store in which workers could find each other.
            TransportError, JobError, PeerLost: a worker was not there in time, or is gone.
        """
        if isinstance(self._place.store, StaticStore):
            raise ConfigError(
                "split model",
                None,
                "needs a store in which the workers find each other, such as a folder (file://) or tcp://: "
                "a list of addresses names servers only",
            )
        send = partial(self._roads.send, self.me)
        crossing = NetworkChannel(self.exchange, send, self._monitor.look, self.allocate)
        incarnation = self._place.identity.incarnation
        kind = f"worker-{incarnation}" if incarnation else "worker"  # where others of the group were is of no use
        self._roads.publish(kind, self.me, self._urls)
        workers = self._place.topology.workers(self.me.group)
        for peer in workers[: self.me.index]:
            self._roads.connect(self.me, peer, kind)
            crossing.greet(peer.index)
        crossing.await_greetings(range(self.me.index + 1, len(workers)))
        return crossing

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros, in memory that the transport can share."""
        return self.memory.allocate(numel, dtype) if self._shared else _zeros(numel, dtype)

    def traffic(self) -> tuple[int, int]:
        """Return the bytes of messages sent and received."""
        return self._roads.traffic()

    def close(self, finished: bool = True) -> None:
        """Leave after all queued messages are sent.

        A server in this process stays until the job needs it no more. finished: the script has finished. Otherwise no
        process waits for another.
        """
        self.exchange.leave()
        if self._lines is not None and finished:
            self._lines.leave()
            until = time.monotonic() + _LEAVE_S
            self._monitor.wait(lambda: self._lines is None or self._lines.left or time.monotonic() > until)
        if self._beside is not None:
            if finished:
                self._roads.deliver()
            self._roads.release(self.me)  # also without an end to wait for: only who is read can be closed
            for resident in self._beside.residents.values():
                resident.lost(self.me, "its script has ended")
            if finished:
                self._beside.wait()
        self._roads.close()
