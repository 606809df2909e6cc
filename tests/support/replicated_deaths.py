"""A replicated cluster whose workers die, too, and start again: a ledger of batches, as in the simulator.

A worker that is started again looks for the servers where they speak by then, as a real one does. The launcher, who is
played here, can also give a group up: it tells the coordinator, and tells it again when that has moved.
"""

import random
from functools import partial
from typing import Any

import torch
from fault_trial import Killed
from faulty_cluster import SimWorker, parameters, sgd_plan
from replicated_cluster import ReplicatedCluster, flats_of

from topotrain.config.job import Job
from topotrain.config.sharding import SliceMap
from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.model.schema import Schema
from topotrain.extensions.elastic.membership_messages import GroupLeft
from topotrain.training.data.data_client import DataClient
from topotrain.training.data.map_dataset import LeaseIterator

COORDINATOR_ADDRESS = Address(Role.SERVER, 0, 0)


class CrashableCluster(ReplicatedCluster):
    """Arguments as for ReplicatedCluster. batches: in all. deaths of workers: (moment, group, seconds away)."""

    def __init__(
        self,
        job: Job,
        seed: int,
        batches: int = 12,
        kill: tuple[int, int] | None = None,
        again: int = 0,
        falls: tuple[tuple[float, int, float], ...] = (),
    ) -> None:
        self.batches, self.falls = batches, falls
        self.worker_deaths = 0
        self.gone: dict[int, int] = {}  # groups that are given up, and the first incarnation that is not
        self.final: list[torch.Tensor] = []
        self.failures: list[str] = []
        super().__init__(job, seed, kill, again)
        self.random = random.Random(seed)
        self.transport.observers.append(self._look)

    def _plan(self) -> tuple[Schema, SliceMap]:
        cells = self.batches * self.job.cluster.nworkers_per_group
        return sgd_plan(parameters(cells, max(cells, 150), 256), self.topology.shards, 1, 1.0)

    def _look(self, sender: Address, to: Address, message: m.Message) -> None:
        if isinstance(message, m.Fail):  # here a process dies, and does nothing else that is wrong
            self.failures.append(f"{sender} to {to}: {message.text}")

    # --- workers -------------------------------------------------------------------------------------------------

    def fall(self, group: int, away: float) -> None:
        """All processes of a group die; they come again after a while, or (away < 0) never."""
        if group in self.gone or all(self.worker_processes[me].over for me in self.topology.workers(group)):
            return
        self.worker_deaths += 1
        for me in self.topology.workers(group):
            process = self.worker_processes[me]
            if not process.dead:
                process.over = process.dead = True
                self.transport.end({me})
        if away < 0:
            self.gone[group] = self.worker_processes[self.topology.workers(group)[0]].incarnation + 1
            self.soon(0.02, lambda: self.miss(group))
        else:
            self.soon(0.004 + away, lambda: self._restart(group))

    def miss(self, group: int) -> None:
        """The launcher tells the coordinator that a group has gone."""
        if self.home[COORDINATOR_ADDRESS].alive:  # else its successor is told
            sim_primary = self.home[COORDINATOR_ADDRESS].primaries[COORDINATOR_ADDRESS]
            sim_primary.order("handle", COORDINATOR_ADDRESS, GroupLeft(group, self.gone[group]))

    def replace(self, dead: Any) -> None:
        super().replace(dead)
        if COORDINATOR_ADDRESS in dead.primaries:
            for group in self.gone:
                self.miss(group)

    def _restart(self, group: int) -> None:
        for me in self.topology.workers(group):
            self.clients[me] = self._make_client(me)
            self._start(me)

    def _start(self, me: Address) -> None:
        process, client = self.worker_processes[me], self.clients[me]

        def live() -> None:
            try:
                self.sim.wait(lambda: process.over or not self.unfound[process])
                if process.over:
                    return
                if process.incarnation:
                    client.rejoin.announce()
                self.script(SimWorker(self, me))
                lines = self.lifelines[me]
                lines.leave()
                self.sim.wait(lambda: process.over or lines.left)
                process.over = True
            except Killed:
                pass

        self.sim.actor(f"{me} of incarnation {process.incarnation}", live)

    def run(self) -> "CrashableCluster":
        for me in self.workers:
            self._start(me)
        for moment, group, away in self.falls:
            self.sim.at(moment, partial(self.fall, group, away))
        self.sim.run(60)
        return self

    def script(self, worker: SimWorker) -> None:
        """Read all that there is, one step for each batch."""
        process, workers = self.worker_processes[worker.me], self.topology.workers_per_group
        worker.open(0.0)
        leases = LeaseIterator(worker.client.extension(DataClient), 0, self.batches, 0)
        while leases.at < leases.last or leases.ask(wait=False) or leases.ask(wait=True):
            place = leases.take()
            worker.sleep(0.0, 0.004)
            if process.over:
                raise Killed
            gradient = [torch.zeros(p.shape) for p in self.map.parameters]
            for part in gradient:
                part[place.number * workers + worker.me.index] = -1.0
            worker.step(gradient, marks=(place.stream, place.seq, place.seq))
            leases.passed = place.ordinal + place.last
        worker.finish()
        if worker.me == self.workers[0]:
            worker.client.values.fetch_final()
            worker.client.buffers.final()
            self.final = worker.values()

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
                if not all(map(torch.equal, flats_of(first), flats_of(second))):
                    found.append(f"the copies of server {index} have other values")
            if first.decisions.undecided:
                found.append(f"server {index} waits for votes about {first.decisions.undecided} steps")
            sim_primary = self.home[Address(Role.SERVER, 0, index)].primaries[Address(Role.SERVER, 0, index)]
            stays = [
                str(who)
                for who, line in sim_primary.primary.copy.channels.items()
                if who.role is Role.WORKER and line.unconfirmed
            ]
            if stays:
                found.append(f"server {index} keeps messages for {stays}")
            if sim_primary.primary._held:
                found.append(f"server {index} waits for its second copy")
        return found
