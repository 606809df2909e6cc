"""A whole job on the simulated road: the real servers, the real doors of the workers, a pretended network.

`Town` builds every server and every worker's Exchange of a layout. Two kinds of workers live there: a `Seat` has no
model and pushes the whole numbers that a test gives it (sums of them are exact), `Town.worker` is the real thing with
a model, an optimizer and a loader.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from topotrain import message as m
from topotrain.buffers import describe_model
from topotrain.data import DataPlan, ShardedLoader
from topotrain.exchange import Exchange, Outcome, StepEnd
from topotrain.host import _peers
from topotrain.job import Cluster, Job, Reduce
from topotrain.message import Message
from topotrain.optimizer import adopt
from topotrain.server import Server
from topotrain.shard import FlatBuffers, Schema
from topotrain.slices import Parameter, SliceMap, cut
from topotrain.topology import Address, Role, layout
from topotrain.update import describe
from topotrain.wire.simulated import SimulatedWire, Simulation, Weather
from topotrain.worker import Worker

STORM = Weather(delay=(0.0005, 0.004), late=0.02, duplicate=0.15, reorder=0.25)
"""Delay, duplicates and reordering, all at once."""

VIEWS = Weather(delay=(0.0005, 0.01), snapshots=False)
"""As on real roads that show memory: in order and once, bodies read on arrival."""


def parameters(*counts: int, dtype: str = "float32") -> tuple[Parameter, ...]:
    return tuple(Parameter(f"p{i}", (count,), (1,), dtype, True) for i, count in enumerate(counts))


SMALL = (*parameters(70, 200), Parameter("wide", (128,), (1,), "float64", True))
"""Two dtypes, hence two buckets on most shards, and padding inside one of them."""


def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype)


def job(groups: int = 1, workers: int = 1, shards: int = 1, **more: Any) -> Job:
    """A job of so many worker groups, workers per group and servers per group; `more` are fields of Job or Cluster."""
    known = Cluster.__dataclass_fields__
    cluster = {name: more.pop(name) for name in list(more) if name in known}
    cluster.setdefault("server_worker_separate", True)
    inside = Cluster(nworker_groups=groups, nworkers_per_group=workers, nservers_per_group=shards, **cluster)
    return Job(**{"reduce": Reduce.kSum, "cluster": inside, **more})


@lru_cache(maxsize=64)
def _plan(schema: tuple[Parameter, ...], shards: int, groups: int, rate: float) -> tuple[Schema, SliceMap]:
    tensors = [nn.Parameter(torch.zeros(p.shape, dtype=getattr(torch, p.dtype))) for p in schema]
    spec = describe(torch.optim.SGD(tensors, lr=rate), tensors)
    slice_map = cut(schema, shards, groups)
    return Schema(schema, (), spec.to_text(), slice_map.digest), slice_map


class House:
    """A server at its address, as a host process has it. What it answers to whom is the road's business."""

    def __init__(self, server: Server, wire: SimulatedWire) -> None:
        self.server, self._wire = server, wire
        self.lost_peers: list[Address] = []

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        return self.server.place(sender, message, viewable)

    def handle(self, sender: Address, message: Message) -> None:
        self.send(self.server.handle(sender, message))

    def send(self, out: Sequence[tuple[Address, Message]]) -> None:
        for to, message in out:
            self._wire.send(self.server.me, to, message)

    def lost(self, peer: Address, reason: str) -> None:
        self.lost_peers.append(peer)


class Town:
    """Every server and every worker's door of a job, tied by a simulated road, connected as host processes are."""

    def __init__(
        self,
        job: Job,
        seed: int = 0,
        weather: Weather | None = None,
        schema: tuple[Parameter, ...] = SMALL,
        rate: float = 1.0,
    ) -> None:
        self.job, self.topology = job, layout(job.cluster)
        self.sim = Simulation(seed)
        self.wire = self._wire(weather)
        self.random = random.Random(seed)  # the test's own dice
        groups = self.topology.server_groups if self.topology.synced else 1
        self.schema, self.map = _plan(schema, self.topology.shards, groups, rate)
        self.houses: dict[Address, House] = {}
        for group in range(self.topology.server_groups):
            for me in self.topology.servers(group):
                self.houses[me] = House(Server(me, job, self.topology, zeros), self.wire)
                self.wire.attach(me, self.houses[me])
        for me in self.houses:
            for peer in _peers(me, self.topology):
                self.wire.connect(me, peer, "")
        self.workers = [me for group in range(self.topology.worker_groups) for me in self.topology.workers(group)]
        self.doors = {me: self._door(me) for me in self.workers}

    def _wire(self, weather: Weather | None) -> SimulatedWire:
        return SimulatedWire(self.sim, weather)

    def _door(self, me: Address) -> Exchange:
        door = Exchange(me, self.topology, lambda to, message: self.wire.send(me, to, message), self.sim.waiter())
        self.wire.attach(me, door)
        for server in {*door.servers, door.desk}:
            self.wire.connect(me, server, "")
        return door

    def server(self, group: int, shard: int) -> Server:
        return self.houses[Address(Role.SERVER, group, shard)].server

    def seat(self, group: int, index: int = 0) -> "Seat":
        return Seat(self, Address(Role.WORKER, group, index))

    def play(self, script: Callable[["Seat"], None], workers: Sequence[Address] | None = None) -> "Town":
        """Run the script on every worker, each in a seat of its own, until all ended and nothing is under way."""
        for me in self.workers if workers is None else workers:
            self.sim.actor(str(me), lambda me=me: script(Seat(self, me)))
        self.sim.run()
        return self

    def values(self, group: int = 0) -> list[torch.Tensor]:
        """The values that the servers of a group hold, one tensor per parameter."""
        found = [torch.full((p.count,), torch.nan, dtype=getattr(torch, p.dtype)) for p in self.schema.parameters]
        for segment in self.map.segments:
            flats = self.server(group, segment.shard)._known.flats
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

        def make(slice_map: SliceMap) -> FlatBuffers:
            made = FlatBuffers(slice_map, None, zeros)
            for space, flat in (flats or {}).items():
                made.put("params", space, flat)
            return made

        worker = Worker(me, self.job, self.topology, describe_model(model), optimizer, self.doors[me], make)
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
            per_worker_batch=False,
            seed=self.job.seed,
            min_share=1,
            is_main=me.group == me.index == 0,
        )
        return ShardedLoader(loader, plan, worker.exchange, worker)


@dataclass
class Seat:
    """One worker without a model. Gradients are lists of one 1-D tensor per parameter."""

    town: Town
    me: Address
    steps: int = 0
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.door = self.town.doors[self.me]
        self.flats = FlatBuffers(self.town.map, None, zeros)
        self.visible = self.door.group_size > 1

    def open(self, start: float = 0.0) -> "Seat":
        """Join the job; worker (0,0) says the values from which everybody starts."""
        self.door.open(self.town.schema, self.town.map, self.flats)
        if self.me.group == self.me.index == 0:
            for space in self.town.map.spaces:
                self.flats.flat("local", space.index).fill_(start)
            self.door.give_initial("local")
        self.door.fetch()
        return self

    def view(self, name: str, index: int) -> torch.Tensor:
        space, offset = self.town.map.offsets[index]
        return self.flats.flat(name, space)[offset : offset + self.town.map.parameters[index].count]

    def values(self) -> list[torch.Tensor]:
        """This worker's parameters now."""
        return [self.view("params", index).clone() for index in range(len(self.town.map.parameters))]

    def numbers(self, low: int = -100, high: int = 100, scale: float = 1.0) -> list[torch.Tensor]:
        """Whole numbers times a scale, others at every step of every worker."""
        dice = torch.Generator().manual_seed(hash((self.town.sim.seed, *self.me, self.steps)) & 0x7FFF_FFFF)
        return [
            torch.randint(low, high, p.shape, generator=dice).to(getattr(torch, p.dtype)) * scale
            for p in self.town.map.parameters
        ]

    def push(self, gradient: Sequence[torch.Tensor], ordinal: int = 0) -> int:
        """Send a gradient home, bucket by bucket in any order; returns the bitmap of the buckets."""
        for index, part in enumerate(gradient):
            self.view("local", index).copy_(part)
        buckets = list(self.town.map.buckets)
        self.town.random.shuffle(buckets)
        for bucket in buckets:
            body = self.flats.view("local", bucket)
            self.door.push(self.steps, ordinal, bucket, 1.0, (1 << len(bucket.pieces)) - 1, body)
        return (1 << len(buckets)) - 1

    def backward(self, gradient: Sequence[torch.Tensor], ordinal: int = 0) -> list[torch.Tensor]:
        """One backward of a group of several: push, wait; returns the group's mean (or sum), per parameter."""
        self.door.end_backward(self.steps, ordinal, 1.0, self.push(gradient, ordinal))
        for number, (_, body) in self.door.wait_means()[0].items():
            self.flats.view("seen", self.town.map.buckets[number]).copy_(body)
        return [self.view("seen", index).clone() for index in range(len(gradient))]

    def commit(self, backwards: int = 1, revision: int = 0, **more: Any) -> Outcome:
        """`optimizer.step()`; `more` are fields of StepEnd."""
        revisions = () if self.visible else (revision,) * len(self.town.map.buckets)
        said = {"backwards": backwards, "weight": 1.0, "fetch": True, "hyper": b"", "marks": ()}
        outcome = self.door.commit(self.steps, StepEnd(**{**said, "revisions": revisions, **more}))
        self.steps += 1
        self.outcomes.append(outcome)
        return outcome

    def step(self, gradient: Sequence[torch.Tensor], **more: Any) -> Outcome:
        """One step with one backward."""
        if self.visible:
            self.backward(gradient)
        else:
            self.push(gradient)
        return self.commit(**more)

    def finish(self) -> "Seat":
        if self.me.index == 0:
            self.door.put_buffers([])
        self.door.finish(self.steps)
        return self

    def sleep(self, low: float, high: float) -> None:
        """Compute for a while."""
        self.town.sim.sleep(self.town.random.uniform(low, high))


def total(gradients: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The sum of many gradients, exact, in double."""
    return [torch.stack([g[i].double() for g in gradients]).sum(0) for i in range(len(gradients[0]))]


def same(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a.double(), b.double()) for a, b in zip(found, wanted, strict=True))


def trace(town: Town, *kinds: type[Message]) -> list[tuple[float, Address, Address, Message]]:
    """What arrives from here on, of these kinds: (time, sender, receiver, message)."""
    seen: list[tuple[float, Address, Address, Message]] = []

    def observe(sender: Address, to: Address, message: Message) -> None:
        if not kinds or isinstance(message, kinds):
            seen.append((town.sim.now, sender, to, message))

    town.wire.observers.append(observe)
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

    def update(self, decision: m.Apply) -> None:
        self.staleness.append(len(self.applied) - self.read[decision.group])
        self.applied.append((decision.group, decision.step))

    def send(self, message: Message, to: Address) -> None:
        if isinstance(message, m.Values) and to.role is Role.WORKER and (to.group, message.round) not in self.said:
            self.said.add((to.group, message.round))
            self.read[to.group] = len(self.applied)
            ended = [g for g, f in self.server._finished.items() if len(f) == self.server._topology.workers_per_group]
            running = [self.count(g) for g in self.server.groups if g not in ended or g == to.group]
            self.leads.append(self.count(to.group) - min(running))


def books(town: Town, group: int = 0) -> list[Book]:
    """Have every shard of a server group watched from here on."""

    def watch(server: Server) -> Book:
        book, carry_out, send = Book(server), server._carry_out, server._send

        def noted(decision: m.Apply) -> None:
            if not decision.change:
                book.update(decision)
            carry_out(decision)

        def sent(to: Address, message: Message) -> None:
            book.send(message, to)
            send(to, message)

        server._carry_out, server._send = noted, sent  # type: ignore[method-assign]
        return book

    return [watch(town.houses[me].server) for me in town.topology.servers(group)]
