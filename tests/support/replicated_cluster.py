"""A cluster whose servers have second copies: each process has one server, and the standby of the one before it.

A process can be killed at any message that it takes or sends: what it had said before is heard, in order, and then the
end of its ways; the launcher, who is played here, then has the standby speak, and a fresh process follow it.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import faulty_cluster
import torch
from faulty_network import FaultyTransport, NetworkFaults
from reports import FunctionSender
from sim_processes import CrashableWaiter, WorkerProcess
from sim_processes import Killed as WorkerKilled
from simulation import SMALL, ScriptedWorker
from torch import nn

from topotrain.comm.transport import TransportError
from topotrain.config.job import Job, TransportChoice
from topotrain.config.sharding import SliceMap, cut
from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
from topotrain.core.client.client import Client
from topotrain.core.model.schema import PrivateMemory, Schema
from topotrain.core.optim.adapter import describe
from topotrain.core.server.server import Server, ServerFactory
from topotrain.core.transport_contract import MessageSender
from topotrain.extensions.checkpointing.checkpoint_extension import snapshots_of
from topotrain.extensions.checkpointing.snapshot_coordinator import NoFiles
from topotrain.extensions.replication.replica_connections import ReplicaClientHost, ReplicaConnections
from topotrain.extensions.replication.replicated_server import ReplicatedServer, standby_of
from topotrain.extensions.replication.replication_messages import ReplicatedEvent
from topotrain.extensions.replication.state_machine import Primary, Standby
from topotrain.launch.runtime.process_host import peers
from topotrain.launch.runtime.server_composition import make_server
from topotrain.launch.runtime.worker_composition import client_extensions
from topotrain.tools.simulator.sim_network import Simulation


@lru_cache
def plan(shards: int) -> tuple[Schema, SliceMap]:
    """Adam's state is tensors and numbers."""
    tensors = [nn.Parameter(torch.zeros(p.shape, dtype=getattr(torch, p.dtype))) for p in SMALL]
    slice_map = cut(SMALL, shards, 1)
    return Schema(
        SMALL, (), describe(torch.optim.Adam(tensors, lr=0.1), tensors).to_text(), slice_map.digest
    ), slice_map


class Killed(Exception):
    """The process dies here."""


@dataclass
class Process:
    """What one process holds."""

    number: int
    primaries: dict[Address, "SimPrimary"] = field(default_factory=dict)
    standbys: dict[Address, "SimStandby"] = field(default_factory=dict)
    alive: bool = True


class SimPrimary(MessageSender):
    def __init__(self, cluster: "ReplicatedCluster", process: Process, primary: Primary) -> None:
        self.cluster, self.process, self.primary = cluster, process, primary
        self.server, self.handles = primary.copy.server, False
        self.early_replies = primary.attach(self)

    def send(self, to: Address, message: m.Message) -> None:
        """Send a message of an event that is being handled. The process can die here, too."""
        self.cluster.tick(self.process)
        if isinstance(message, ReplicatedEvent) and self._at_once(to, message):
            return
        if to.role is Role.WORKER and self.handles:
            self.cluster.early[self.primary.me] += 1
        with suppress(TransportError):
            self.cluster.transport.send(self.primary.me, to, message)

    def _at_once(self, to: Address, message: ReplicatedEvent) -> bool:
        """Let an event arrive, and its ack come back, before the event is handled here."""
        cluster, me = self.cluster, self.primary.me
        standby = cluster.transport._residents[to]
        assert isinstance(standby, SimStandby)
        under_way = standby.queue or cluster.transport._last.get((me, to), 0.0) > cluster.sim.now
        if not cluster.prompt or under_way or not standby.process.alive or cluster.sim.random.random() < 0.5:
            return False
        acknowledged = standby.standby.early_ack(message)
        cluster.transport._deliver(me, to, m.decode(*m.encode(message), message.body))
        if acknowledged is not None and standby.process.alive:
            self.early_replies.arrived(acknowledged)
        return True

    def place(self, sender: Address, message: m.Message, viewable: bool) -> Any:
        return self.primary.landing.place(
            self.server, sender, message, False
        )  # the transports of workers do not share memory

    def handle(self, sender: Address, message: m.Message) -> None:
        with self.cluster.dying(self.process):
            self.cluster.tick(self.process)
            self.handles = True
            out = self.primary.handle(sender, message)
            self.handles = False
            self.say(out)
            if self.primary.fault is not None:
                raise self.primary.fault

    def say(self, out: list[tuple[Address, m.Message]]) -> None:
        """Send messages; those to a peer that is gone are dropped."""
        with self.cluster.dying(self.process):
            for to, message in out:
                self.send(to, message)

    def lost(self, peer: Address, reason: str) -> None:
        if peer.role is Role.SERVER:
            self.primary.disconnected(peer)
        elif peer in self.primary.up and self.process.alive:
            self.order("lost", peer)

    def order(self, name: str, *arguments: Any) -> None:
        """Carry out what the launcher orders, or a connection's end. The process can die at each message of it."""
        with self.cluster.dying(self.process):
            self.say(getattr(self.primary, name)(*arguments))


class SimStandby:
    def __init__(self, cluster: "ReplicatedCluster", process: Process, me: Address, standby: Standby) -> None:
        self.cluster, self.process, self.me, self.standby = cluster, process, me, standby
        self.queue: deque[tuple[Address, m.Message]] = deque()

    def place(self, sender: Address, message: m.Message, viewable: bool) -> Any:
        # A reader places a body when all messages before it are handled (`_placed`).
        return None if self.cluster.shares else self.standby.place(message, False)

    def _placed(self, message: m.Message) -> m.Message:
        target = None if message.body is None else self.standby.place(message, True)
        if target is None or message.body is None:
            return message
        target.view(torch.uint8).copy_(message.body)
        return replace(message, body=target)

    def handle(self, sender: Address, message: m.Message) -> None:
        self.queue.append((sender, message))
        if len(self.queue) == 1:
            self._next()

    def _next(self) -> None:
        """Acknowledge the first message that waits, and handle it, at once or a little later."""
        if self.cluster.shares:
            self.queue[0] = self.queue[0][0], self._placed(self.queue[0][1])
        sender, message = self.queue[0]
        with self.cluster.dying(self.process):
            self.cluster.tick(self.process)
            self._say(sender, [self.standby.early_ack(message)])
            if not self.cluster.shares:
                self._finish()
                return
            sim = self.cluster.sim
            sim.at(sim.now + sim.random.uniform(0.0, self.cluster.lag), partial(self._later, message))

    def _later(self, message: m.Message) -> None:
        if self.queue and self.queue[0][1] is message:  # else the copy was promoted, and all is handled
            with self.cluster.dying(self.process):
                self._finish()

    def _finish(self) -> None:
        self.cluster.tick(self.process)
        sender, message = self.queue[0]
        self._say(sender, self.standby.handle(message))
        self.queue.popleft()
        if self.queue:
            self._next()

    def drain(self) -> None:
        """Handle all that has come, as before a promotion."""
        for number, (_, message) in enumerate(self.queue):
            self.standby.handle(self._placed(message) if number and self.cluster.shares else message)
        self.queue.clear()

    def _say(self, to: Address, replies: Sequence[m.Message | None]) -> None:
        for reply in replies:
            if reply is not None:
                with suppress(TransportError):
                    self.cluster.transport.send(self.me, to, reply)

    def lost(self, peer: Address, reason: str) -> None:
        pass


class SimClientHost(ReplicaClientHost):
    """A worker process that looks for a server until one speaks. Once it is dead it sends nothing."""

    def __init__(self, cluster: "ReplicatedCluster", process: WorkerProcess) -> None:
        self.cluster, self.process = cluster, process

    def send(self, to: Address, message: m.Message, wait: bool = False) -> None:
        if not self.process.dead:
            self.cluster.transport.send(self.process.me, to, message)

    def reconnect(self, connections: ReplicaConnections, server: Address, moves: int) -> None:
        done = partial(connections.connected, moves=moves)
        self.cluster.soon(0.001, lambda: self.cluster.dial(self.process, server, done))

    def on_change(self) -> None:
        pass


class ReplicatedCluster(faulty_cluster.FaultyCluster, ServerFactory):
    """Arguments as for `FaultyCluster`; `kill`: of which process (by its first server) what moment is the last."""

    lag = 0.0
    """Above 0: the second copies share memory with the first ones, and take up to this long for each message."""

    prompt = False
    """Acks of the second copies may come while the first copies handle the event."""

    @property
    def shares(self) -> bool:
        return self.lag > 0

    def __init__(self, job: Job, seed: int = 0, kill: tuple[int, int] | None = None, again: int = 0) -> None:
        self.ticks: dict[int, int] = {}
        self.early: Counter[Address] = Counter()  # replies that have left while their event was handled
        self.kill, self.again = kill, again
        self.processes: dict[int, Process] = {}
        self.home: dict[Address, Process] = {}  # of each server's speaking copy
        self.deaths = 0
        self.ends: dict[Address, list[Any]] = {}  # what each worker has seen
        self.job = job = replace(job, cluster=replace(job.cluster, replicas=2, transport=TransportChoice.kTcp))
        self.topology = layout(job.cluster)
        self.sim = Simulation(seed)
        self.transport = TcpLike(self.sim, NetworkFaults(snapshots=False))  # a body is what it is when it arrives
        self.random = __import__("random").Random(seed)
        self.schema, self.map = self._plan()
        self.sim_servers = {}
        self.lifelines: dict[Address, ReplicaConnections] = {}
        self.worker_processes: dict[Address, WorkerProcess] = {}
        self.unfound: dict[WorkerProcess, set[Address]] = {}  # the servers to which a process has no connection yet
        servers = self.topology.servers(0)
        for me in servers:
            self.processes[me.index] = self.home[me] = Process(me.index)
            self.add_primary(self.home[me], Primary(ReplicatedServer(self, me)))
        for me in servers:
            for peer in peers(me, self.topology):
                self.transport.connect(me, peer, "")
                self.home[me].primaries[me].primary.connected(peer)
        for me in servers:
            self.add_standby(me, self.processes[(me.index + 1) % len(servers)])
        self.workers = [me for group in range(self.topology.worker_groups) for me in self.topology.workers(group)]
        self.clients = {me: self._make_client(me) for me in self.workers}

    def _plan(self) -> tuple[Schema, SliceMap]:
        return plan(self.topology.shards)

    def make(self, me: Address, sender: MessageSender) -> Server:
        server = make_server(me, self.job, self.topology, PrivateMemory(), sender=sender)
        snapshots_of(server).attach_host(NoFiles())
        return server

    def add_primary(self, process: Process, primary: Primary) -> SimPrimary:
        process.primaries[primary.me] = sim_primary = SimPrimary(self, process, primary)
        self.home[primary.me] = process
        self.transport._residents[primary.me] = sim_primary
        return sim_primary

    def add_standby(self, me: Address, process: Process) -> None:
        """A fresh second copy of a server in a process."""
        address = standby_of(me)
        sim_primary = SimStandby(self, process, address, Standby(self, me))
        process.standbys[me] = sim_primary
        self.transport._residents[address] = sim_primary
        self.transport.connect(me, address, "")
        primary = self.home[me].primaries[me]
        primary.order("add_standby")

    def _make_client(self, me: Address) -> Client:
        known = self.worker_processes.get(me)
        process = self.worker_processes[me] = WorkerProcess(me, 0 if known is None else known.incarnation + 1)

        def say(to: Address, message: m.Message) -> None:
            if process.over:
                raise WorkerKilled
            lines.send(to, message)

        waiter, extensions = CrashableWaiter(process, self.sim), client_extensions(self.topology)
        client = Client(
            me, self.topology, FunctionSender(say), waiter, incarnation=process.incarnation, extensions=extensions
        )
        servers = dict.fromkeys((*client.channel.servers, client.channel.first_server))
        lines = ReplicaConnections(servers, client, SimClientHost(self, process), process.incarnation)
        self.lifelines[me] = lines
        self.transport._residents[me] = lines
        self.unfound[process] = set(servers)
        for server in servers:
            lines.begin(server)
            self.dial(process, server, self.unfound[process].discard)
        return client

    def soon(self, seconds: float, do: Callable[[], None]) -> None:
        self.sim.at(self.sim.now + seconds, do)

    def dial(self, process: WorkerProcess, server: Address, done: Callable[[Address], None]) -> None:
        """Connect a worker process to a server, once it speaks somewhere."""
        if process.dead:
            return
        if not self.home[server].alive:
            self.soon(0.001, lambda: self.dial(process, server, done))
            return
        self.transport.connect(process.me, server, "")
        done(server)

    # --- bad luck ------------------------------------------------------------------------------------------------

    @contextmanager
    def dying(self, process: Process) -> Iterator[None]:
        """What is done here ends with the process."""
        try:
            yield
        except Killed:
            self.bury(process)

    def tick(self, process: Process) -> None:
        """One more moment in which a process can die."""
        if not process.alive:
            raise Killed
        if not all(p.alive for p in self.processes.values()) or not all(
            sim_primary.primary.covered for p in self.processes.values() for sim_primary in p.primaries.values()
        ):
            return  # else the whole job starts again
        count = self.ticks[process.number] = self.ticks.get(process.number, 0) + 1
        if self.kill is not None and self.kill[0] == process.number and count >= self.kill[1]:
            self.kill = None
            if self.again:
                other = (process.number + 1) % len(self.processes)
                self.kill, self.again = (other, self.ticks.get(other, 0) + self.again), 0
            raise Killed

    def bury(self, process: Process) -> None:
        """Nothing leaves a process any more; its peers are told so; the launcher does what it has to."""
        if not process.alive:
            return
        self.deaths += 1
        process.alive = False
        who = {*process.primaries, *map(standby_of, process.standbys)}
        self.transport.end(who)
        self.sim.at(self.sim.now + 0.02, lambda: self.replace(process))

    def replace(self, dead: Process) -> None:
        for me in dead.standbys:
            primary = self.home[me].primaries.get(me)
            if primary is not None and self.home[me].alive:
                primary.order("drop_standby")
        for me in dead.primaries:
            heir = next(p for p in self.processes.values() if me in p.standbys and p.alive)
            standby = heir.standbys.pop(me)
            standby.drain()
            copy = standby.standby.copy
            assert copy is not None
            sim_primary = self.add_primary(heir, Primary(copy))
            sim_primary.order("take_over")
        coordinator, *others = self.topology.servers(0)
        for me in others:
            if me in dead.primaries or coordinator in dead.primaries:
                self.transport.connect(me, coordinator, "")
                self.home[coordinator].primaries[coordinator].primary.disconnected(me)
                sim_primary = self.home[me].primaries[me]
                sim_primary.order("reconnected", coordinator)
        self.processes[dead.number] = fresh = Process(dead.number)
        for me in (*dead.primaries, *dead.standbys):
            self.add_standby(me, fresh)

    # --- what came out -------------------------------------------------------------------------------------------

    def play(self, script: Callable[[ScriptedWorker], None]) -> "ReplicatedCluster":
        for me in self.workers:
            self.sim.actor(str(me), lambda me=me: script(ScriptedWorker(self, me)))  # type: ignore[arg-type,misc]
        self.sim.run(limit=60)
        return self

    def speaking(self, index: int) -> Server:
        me = Address(Role.SERVER, 0, index)
        return self.home[me].primaries[me].server

    def copies(self, index: int) -> list[Server]:
        """The present server, and what its second copy is."""
        me = Address(Role.SERVER, 0, index)
        found = [p.standbys[me].standby.copy for p in self.processes.values() if me in p.standbys]
        return [self.speaking(index), *(copy.server for copy in found if copy is not None)]

    def values(self) -> list[torch.Tensor]:
        return [flat for i in range(self.topology.shards) for flat in flats_of(self.speaking(i))]


def flats_of(server: Server) -> list[torch.Tensor]:
    assert server.model is not None
    return [server.model.flats.flat("values", s.index).clone() for s in server.model.map.spaces]


class TcpLike(FaultyTransport):
    """Messages of one way keep their order; what was under way when a process died is heard before the way's end, or,
    with `loses`, is not."""

    def __init__(self, sim: Simulation, weather: NetworkFaults) -> None:
        super().__init__(sim, weather)
        self.ages: dict[Address, int] = {}
        self.loses = False

    def end(self, who: set[Address]) -> None:
        for me in who:
            self.ages[me] = self.ages.get(me, 0) + 1
        for way in sorted(way for way in map(sorted, self._connections) if not who.isdisjoint(way)):
            peers = [peer for peer in way if peer not in who]
            self._connections.discard(frozenset(way))
            for peer in peers:
                (dead,) = set(way) - {peer}
                resident = self._residents[peer]
                self._simulation.at(self._simulation.now + 0.003, partial(resident.lost, dead, "died"))

    def _travel(self, me: Address, to: Address, message: m.Message, late: bool) -> None:
        ages = self.ages.get(me, 0), self.ages.get(to, 0)
        uniform, now = self._simulation.random.uniform, self._simulation.now
        time = self._last[(me, to)] = max(now + uniform(*self.network_faults.delay), self._last.get((me, to), 0.0))
        self._simulation.at(time, lambda: self._come(me, to, message, ages))

    def _come(self, me: Address, to: Address, message: m.Message, ages: tuple[int, int]) -> None:
        now = self.ages.get(me, 0), self.ages.get(to, 0)
        if ages[1] != now[1]:
            return  # its receiver is gone
        if ages[0] != now[0] and self.loses:
            return
        self._deliver(me, to, message)
