"""A whole job on the simulated network: the real servers and the real clients of the workers.

`FaultyCluster` builds every server and every worker's client of a layout. There are two kinds of workers: a
`ScriptedWorker` has no model and pushes the whole numbers that a test gives it (sums of them are exact);
`ScriptedCluster.worker` is a real one with a model, an optimizer and a loader.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import faulty_cluster
import torch
from fault_schedule import STORM, VIEWS
from faulty_cluster import parameters
from faulty_network import NetworkFaults
from torch import nn
from torch.utils.data import DataLoader

from topotrain.config.job import Cluster, Job, Reduce
from topotrain.config.sharding import Parameter, SliceMap
from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.client.client import StepOutcome
from topotrain.core.model.schema import FlatBuffers, PrivateMemory
from topotrain.core.protocol import Message
from topotrain.core.server.server import Server
from topotrain.training.adopted_optimizer import adopt
from topotrain.training.data.data_client import DataClient
from topotrain.training.data.distributed_loader import DataPlan, ShardedLoader
from topotrain.training.parameters.flat_parameters import describe_model
from topotrain.training.worker import Worker, WorkerMemory

__all__ = ["STORM", "VIEWS", "parameters"]


class GivenValues(WorkerMemory):
    """A worker's buffers, with values in this memory, by space."""

    def __init__(self, values: dict[int, torch.Tensor]) -> None:
        super().__init__(PrivateMemory())
        self._values = values

    def flat_buffers(self, slice_map: SliceMap) -> FlatBuffers:
        made = super().flat_buffers(slice_map)
        for space, flat in self._values.items():
            made.put("params", space, flat)
        return made


SMALL = (*parameters(70, 200), Parameter("wide", (128,), (1,), "float64", True))
"""Two dtypes, hence two buckets on most shards, and padding inside one of them."""


def job(groups: int = 1, workers: int = 1, shards: int = 1, **more: Any) -> Job:
    """A job of so many worker groups, workers per group and servers per group; `more` are fields of Job or Cluster."""
    known = Cluster.__dataclass_fields__
    cluster = {name: more.pop(name) for name in list(more) if name in known}
    cluster.setdefault("server_worker_separate", True)
    inside = Cluster(nworker_groups=groups, nworkers_per_group=workers, nservers_per_group=shards, **cluster)
    return Job(**{"reduce": Reduce.kSum, "cluster": inside, **more})


class ScriptedCluster(faulty_cluster.FaultyCluster):
    """A simulated cluster with the scripts of a test, and with real workers."""

    def __init__(
        self, job: Job, seed: int = 0, weather: NetworkFaults | None = None, schema: Any = SMALL, **more: Any
    ) -> None:
        super().__init__(job, seed, weather, schema, **more)

    def scripted_worker(self, group: int, index: int = 0) -> "ScriptedWorker":
        return ScriptedWorker(self, Address(Role.WORKER, group, index))

    def play(
        self, script: Callable[["ScriptedWorker"], None], workers: Sequence[Address] | None = None
    ) -> "ScriptedCluster":
        """Run the script on every worker, each as a `ScriptedWorker`, until all ended and nothing is under way."""
        for me in self.workers if workers is None else workers:
            self.sim.actor(str(me), lambda me=me: script(ScriptedWorker(self, me)))
        self.sim.run()
        return self

    def train(
        self,
        steps: int = 3,
        start: float = 5.0,
        scale: float = 1.0,
        pauses: Sequence[float] = (0.01,),
        outcomes: dict[tuple[int, int], StepOutcome] | None = None,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """A job of whole numbers times a scale; returns (start less all gradients, what worker (0,0) got at the end).

        pauses: a worker computes for up to one of these seconds. outcomes: filled with those of each group's step.
        """
        pushed: dict[tuple[int, int], list[list[torch.Tensor]]] = {}
        final: list[torch.Tensor] = []
        read: dict[tuple[int, int], list[torch.Tensor]] = {}
        seed = f"seed {self.sim.seed}"

        def script(worker: ScriptedWorker) -> None:
            worker.open(start)
            for step in range(steps):
                key = worker.me.group, step
                moment = read.setdefault(key, worker.values())
                assert same(moment, worker.values()), f"{seed}: replicas of one group differ"
                gradient = worker.numbers(scale=scale)
                pushed.setdefault(key, []).append(gradient)
                worker.sleep(0.0, self.random.choice(pauses))
                assert same(moment, worker.values()), f"{seed}: parameters changed outside of a step"
                if worker.visible:
                    mean = worker.backward(gradient)
                    assert len(pushed[key]) == worker.client.channel.group_size, "a mean without a worker's gradient"
                    assert same(mean, total(pushed[key])), f"{seed}: a sum that is not the group's own"
                else:
                    worker.push(gradient)
                outcome = worker.commit()
                if outcomes is not None:
                    outcomes[key] = outcome
            worker.finish()
            if worker.me == self.workers[0]:
                worker.client.values.fetch_final()
                final.extend(worker.values())

        self.play(script)
        everything = total([gradient for group in pushed.values() for gradient in group])
        return [start - part for part in everything], final

    def values(self, group: int = 0) -> list[torch.Tensor]:
        """The values that the servers of a group hold, one tensor per parameter."""
        found = [torch.full((p.count,), torch.nan, dtype=getattr(torch, p.dtype)) for p in self.schema.parameters]
        for segment in self.map.segments:
            flats = self.server(group, segment.shard).state.known.flats
            part = flats.segment("values", segment)
            found[segment.parameter][segment.start : segment.start + segment.hi - segment.lo] = part
        return found

    # --- the real thing ------------------------------------------------------------------------------------------

    def worker(
        self,
        me: Address,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        flats: dict[int, torch.Tensor] | None = None,
    ) -> Worker:
        """What `tt.prepare` makes of a model and an optimizer. `flats`: memory for the parameters, by space."""

        memory = GivenValues(flats or {})
        worker = Worker(me, self.job, self.topology, describe_model(model), (optimizer,), self.clients[me], memory)
        worker.start()
        adopt(optimizer, worker)
        return worker

    def loader(self, worker: Worker, loader: DataLoader[Any], mode: str) -> ShardedLoader:
        """What `tt.prepare` makes of a loader."""
        me = worker.me
        plan = DataPlan(
            group=me.group,
            groups=self.topology.worker_groups,
            index=me.index,
            workers=self.topology.workers_per_group,
            shares=(),
            mode=mode,  # type: ignore[arg-type]
            per_worker_batch=self.job.per_worker_batch,
            seed=self.job.seed,
            min_share=1,
            is_main=me.group == me.index == 0,
            own_streams=self.job.cluster.backup > 0,
        )
        replay = None
        if self.job.cluster.backup:
            from topotrain.extensions.backup_workers.backup_client import BackupWorkersClient
            from topotrain.extensions.backup_workers.replay_batches import LateBatchReplay, LateSteps

            steps = LateSteps(worker, worker.client.extension(BackupWorkersClient))
            worker.attach(steps)
            replay = LateBatchReplay(steps)
        return ShardedLoader(loader, plan, worker.client.extension(DataClient), worker, replay)


class ScriptedWorker(faulty_cluster.SimWorker):
    """A simulated worker with random gradients."""

    def numbers(self, low: int = -100, high: int = 100, scale: float = 1.0) -> list[torch.Tensor]:
        """Whole numbers times a scale, others at every step of every worker."""
        rng = torch.Generator().manual_seed(hash((self.cluster.sim.seed, *self.me, self.steps)) & 0x7FFF_FFFF)
        return [
            torch.randint(low, high, p.shape, generator=rng).to(getattr(torch, p.dtype)) * scale
            for p in self.cluster.map.parameters
        ]


def total(gradients: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The sum of many gradients, exact, in double."""
    return [torch.stack([g[i].double() for g in gradients]).sum(0) for i in range(len(gradients[0]))]


def same(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a.double(), b.double()) for a, b in zip(found, wanted, strict=True))


def trace(cluster: ScriptedCluster, *kinds: type[Message]) -> list[tuple[float, Address, Address, Message]]:
    """What arrives from here on, of these kinds: (time, sender, receiver, message)."""
    seen: list[tuple[float, Address, Address, Message]] = []

    def observe(sender: Address, to: Address, message: Message) -> None:
        if not kinds or isinstance(message, kinds):
            seen.append((cluster.sim.now, sender, to, message))

    cluster.transport.observers.append(observe)
    return seen


@dataclass
class Book:
    """What one server did, written down by the test: the updates in their order, and when each group read."""

    server: Server
    applied: list[tuple[int, int]] = field(default_factory=list)  # (worker group, step)
    read: dict[int, int] = field(default_factory=dict)  # group -> updates that its present values have in them
    said: set[tuple[int, int]] = field(default_factory=set)  # (group, number of the read)
    staleness: list[int] = field(default_factory=list)
    leads: list[int] = field(default_factory=list)  # at each read, over the slowest group that has not ended

    def count(self, group: int) -> int:
        return sum(g == group for g, _ in self.applied)

    def update(self, decision: m.StepDecision) -> None:
        self.staleness.append(len(self.applied) - self.read[decision.group])
        self.applied.append((decision.group, decision.step))

    def send(self, message: Message, to: Address) -> None:
        if isinstance(message, m.Values) and to.role is Role.WORKER and (to.group, message.round) not in self.said:
            self.said.add((to.group, message.round))
            self.read[to.group] = len(self.applied)
            ended = self.server.worker_groups.ended
            running = [self.count(g) for g in self.server.groups if not ended(g) or g == to.group]
            self.leads.append(self.count(to.group) - min(running))


def books(cluster: ScriptedCluster, group: int = 0) -> list[Book]:
    """Have every shard of a server group watched from here on."""

    def watch(server: Server) -> Book:
        book, carry_out, send = Book(server), server.steps.carry_out, server.queue.send

        def noted(decisions: Sequence[m.StepDecision]) -> None:
            for decision in decisions:
                book.update(decision)
            carry_out(decisions)

        def sent(to: Address, message: Message) -> None:
            book.send(message, to)
            send(to, message)

        server.steps.carry_out, server.queue.send = noted, sent  # type: ignore[method-assign]
        return book

    return [watch(cluster.sim_servers[me].server) for me in cluster.topology.servers(group)]
