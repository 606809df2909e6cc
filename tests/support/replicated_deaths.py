"""A replicated town whose workers die, too, and come again: a ledger of batches, as in the simulator.

A worker that is started again looks for the servers where they speak by then, as a real one does. The launcher, who is
played here, can also give a group up: it tells the coordinator, and tells it again when that has moved.
"""

import random
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from replicated_cluster import ReplicatedTown, SimClientHost
from reports import FunctionSender
from torch import nn

from topotrain.config.job import Job
from topotrain.config.sharding import SliceMap, cut
from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.client.client import Client
from topotrain.core.model.schema import Schema
from topotrain.core.optim.adapter import describe
from topotrain.extensions.elastic.membership_messages import GroupLeft
from topotrain.extensions.replication.replica_connections import ReplicaConnections
from topotrain.launch.runtime.worker_composition import client_extensions
from topotrain.tools.simulator.sim_cluster import SimWorker, parameters
from topotrain.tools.simulator.trial import CrashableWaiter, Killed, WorkerProcess
from topotrain.training.data.data_client import DataClient
from topotrain.training.data.map_dataset import LeaseIterator

DESK = Address(Role.SERVER, 0, 0)


@lru_cache
def ledger(cells: int, shards: int) -> tuple[Schema, SliceMap]:
    schema = parameters(cells, max(cells, 150), 256)
    tensors = [nn.Parameter(torch.zeros(p.shape)) for p in schema]
    slice_map = cut(schema, shards, 1)
    spec = describe(torch.optim.SGD(tensors, lr=1.0), tensors)
    return Schema(schema, (), spec.to_text(), slice_map.digest), slice_map


class MortalClientHost(SimClientHost):
    """A worker of one life, after which nothing of it is heard."""

    def __init__(self, town: "MortalTown", life: WorkerProcess) -> None:
        super().__init__(town, life.me)
        self.town, self.life = town, life

    def send(self, to: Address, message: m.Message, wait: bool = False) -> None:
        if not self.life.dead:
            super().send(to, message)

    def reconnect(self, connections: ReplicaConnections, server: Address, moves: int) -> None:
        done = partial(connections.connected, moves=moves)
        self.town._soon(0.001, lambda: self.town._dial(self.life, connections, server, done))


class MortalTown(ReplicatedTown):
    """Arguments as for ReplicatedTown. batches: in all. deaths of workers: (moment, group, seconds away)."""

    def __init__(
        self,
        job: Job,
        seed: int,
        batches: int = 12,
        kill: tuple[int, int] | None = None,
        again: int = 0,
        falls: tuple[tuple[float, int, float], ...] = (),
    ) -> None:
        self.worker_processes: dict[Address, WorkerProcess] = {}
        self.batches, self.falls = batches, falls
        self.worker_deaths = 0
        self.gone: dict[int, int] = {}  # groups that are given up, and the first incarnation that is not
        self.final: list[torch.Tensor] = []
        self.failures: list[str] = []
        super().__init__(job, seed, kill, again)
        self.random = random.Random(seed)
        self.transport.observers.append(self._look)

    def _plan(self) -> tuple[Schema, SliceMap]:
        return ledger(self.batches * self.job.cluster.nworkers_per_group, self.topology.shards)

    def _look(self, sender: Address, to: Address, message: m.Message) -> None:
        if isinstance(message, m.Fail):  # nobody does anything wrong here, but dies
            self.failures.append(f"{sender} to {to}: {message.text}")

    # --- workers -------------------------------------------------------------------------------------------------

    def _make_client(self, me: Address) -> Client:
        known = self.worker_processes.get(me)
        life = self.worker_processes[me] = WorkerProcess(me, 0 if known is None else known.incarnation + 1)

        def say(to: Address, message: m.Message) -> None:
            if life.over:
                raise Killed
            life.on_send()
            lines.send(to, message)

        waiter, extensions = CrashableWaiter(life, self.sim), client_extensions(self.topology)
        door = Client(
            me, self.topology, FunctionSender(say), waiter, incarnation=life.incarnation, extensions=extensions
        )
        servers = dict.fromkeys((*door.channel.servers, door.channel.first_server))

        lines = ReplicaConnections(servers, door, MortalClientHost(self, life), life.incarnation)
        self.lifelines[me] = lines
        self.transport._residents[me] = lines
        self.unfound: dict[WorkerProcess, set[Address]] = getattr(self, "unfound", {})
        self.unfound[life] = set(servers)

        for server in servers:
            lines.begin(server)
            self._dial(life, lines, server, self.unfound[life].discard)
        return door

    def _soon(self, seconds: float, do: Callable[[], None]) -> None:
        self.sim.at(self.sim.now + seconds, do)

    def _dial(
        self, life: WorkerProcess, lines: ReplicaConnections, server: Address, done: Callable[[Address], None]
    ) -> None:
        if life.dead:
            return
        if not self.home[server].alive:
            self._soon(0.001, lambda: self._dial(life, lines, server, done))
            return
        self.transport.connect(life.me, server, "")
        done(server)

    def fall(self, group: int, away: float) -> None:
        """All processes of a group die; they come again after a while, or (away < 0) never."""
        if group in self.gone or all(self.worker_processes[me].over for me in self.topology.workers(group)):
            return
        self.worker_deaths += 1
        for me in self.topology.workers(group):
            life = self.worker_processes[me]
            if not life.dead:
                life.over = life.dead = True
                self.transport.end({me})
        if away < 0:
            self.gone[group] = self.worker_processes[self.topology.workers(group)[0]].incarnation + 1
            self._soon(0.02, lambda: self.miss(group))
        else:
            self._soon(0.004 + away, lambda: self._restart(group))

    def miss(self, group: int) -> None:
        """The launcher tells the coordinator that a group has gone."""
        if self.home[DESK].alive:  # else its successor is told
            house = self.home[DESK].primaries[DESK]
            house.say(house.primary.handle(DESK, GroupLeft(group, self.gone[group])))

    def replace(self, dead: Any) -> None:
        super().replace(dead)
        if DESK in dead.primaries:
            for group in self.gone:
                self.miss(group)

    def _restart(self, group: int) -> None:
        for me in self.topology.workers(group):
            self.clients[me] = self._make_client(me)
            self._start(me)

    def _start(self, me: Address) -> None:
        life, door = self.worker_processes[me], self.clients[me]

        def live() -> None:
            try:
                self.sim.wait(lambda: life.over or not self.unfound[life])
                if life.over:
                    return
                if life.incarnation:
                    door.rejoin.announce()
                self.script(SimWorker(self, me))
                lines = self.lifelines[me]
                lines.leave()
                self.sim.wait(lambda: life.over or lines.left)
                life.over = True
            except Killed:
                pass

        self.sim.actor(f"{me} of incarnation {life.incarnation}", live)

    def run(self) -> "MortalTown":
        for me in self.workers:
            self._start(me)
        for moment, group, away in self.falls:
            self.sim.at(moment, partial(self.fall, group, away))
        self.sim.run(60)
        return self

    def script(self, seat: SimWorker) -> None:
        """Read all that there is, one step for each batch."""
        life, workers = self.worker_processes[seat.me], self.topology.workers_per_group
        seat.open(0.0)
        leases = LeaseIterator(seat.client.extension(DataClient), 0, self.batches, 0)
        while leases.at < leases.last or leases.ask(wait=False) or leases.ask(wait=True):
            place = leases.take()
            seat.sleep(0.0, 0.004)
            if life.over:
                raise Killed
            gradient = [torch.zeros(p.shape) for p in self.map.parameters]
            for part in gradient:
                part[place.number * workers + seat.me.index] = -1.0
            seat.step(gradient, marks=(place.stream, place.seq, place.seq))
            leases.passed = place.ordinal + place.last
        seat.finish()
        if seat.me == self.workers[0]:
            seat.client.values.fetch_final()
            seat.client.buffers.final()
            self.final = seat.values()

    # --- what came out -------------------------------------------------------------------------------------------

    def wrong(self) -> list[str]:
        """What should not be."""
        cells = self.batches * self.topology.workers_per_group
        found = list(self.failures)
        if not self.final:
            return [*found, "worker 0/0 has not come to its end"]
        for number, part in enumerate(self.final):
            found += [f"cell {c} of {number} is {part[c]}" for c in range(cells) if float(part[c]) != 1.0]
        for index in range(self.topology.shards):
            first, *others = self.copies(index)
            for second in others:
                if (
                    second.state.version != first.state.version
                    or second.steps.batches.counts() != first.steps.batches.counts()
                ):
                    found.append(f"the copies of server {index} have counted other things")
                if not all(map(torch.equal, flats(first), flats(second))):
                    found.append(f"the copies of server {index} have other values")
            if first.decisions.undecided:
                found.append(f"server {index} waits for votes about {first.decisions.undecided} steps")
            house = self.home[Address(Role.SERVER, 0, index)].primaries[Address(Role.SERVER, 0, index)]
            stays = [
                str(who)
                for who, line in house.primary.copy.channels.items()
                if who.role is Role.WORKER and line.unconfirmed
            ]
            if stays:
                found.append(f"server {index} keeps words for {stays}")
            if house.primary._held:
                found.append(f"server {index} waits for its second copy")
        return found


def flats(server: Any) -> list[torch.Tensor]:
    model = server.state.known
    return [model.flats.flat("values", space.index) for space in model.map.spaces]
