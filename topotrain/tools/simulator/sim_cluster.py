"""A whole job in one program: the real servers, the real doors of its workers, and a pretended network between them.

Rule: nothing here decides anything. What a server answers and what a worker waits for is the product's own code; only
the road, the clock and the script are made up. A `SimWorker` is a worker without a model: it pushes the numbers that it
is given, and whole numbers add up exactly in any order.
"""

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from topotrain.comm.transport import TransportError
from topotrain.config.job import Job
from topotrain.config.sharding import Parameter, SliceMap, cut
from topotrain.config.topology import Address, Role, layout
from topotrain.core.client.client import Client, StepEnd, StepOutcome
from topotrain.core.model.schema import FlatBuffers, Schema
from topotrain.core.optim.adapter import describe
from topotrain.core.protocol import Message
from topotrain.core.server.server import Server
from topotrain.extensions.checkpointing.shard_snapshot import SnapshotSource
from topotrain.launch.runtime.process_host import peers
from topotrain.launch.runtime.server_extensions import make_server
from topotrain.tools.simulator.sim_network import NetworkFaults, SimulatedTransport, Simulation


def parameters(*counts: int, dtype: str = "float32") -> tuple[Parameter, ...]:
    """So many 1-D parameters of these lengths: p0, p1, ..."""
    return tuple(Parameter(f"p{i}", (count,), (1,), dtype, True) for i, count in enumerate(counts))


def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of a server or a worker: nobody shares it here."""
    return torch.zeros(numel, dtype=dtype)


@lru_cache(maxsize=64)
def _plan(schema: tuple[Parameter, ...], shards: int, groups: int, rate: float) -> tuple[Schema, SliceMap]:
    tensors = [nn.Parameter(torch.zeros(p.shape, dtype=getattr(torch, p.dtype))) for p in schema]
    spec = describe(torch.optim.SGD(tensors, lr=rate), tensors)
    slice_map = cut(schema, shards, groups)
    return Schema(schema, (), spec.to_text(), slice_map.digest), slice_map


class SimServer:
    """A server at its address, as a host process has it. What it answers to whom is the road's business."""

    def __init__(self, server: Server, wire: SimulatedTransport) -> None:
        self.server, self._wire = server, wire
        self.lost_peers: list[Address] = []

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        """As `wire.Endpoint.place`."""
        return self.server.place(sender, message, viewable)

    def handle(self, sender: Address, message: Message) -> None:
        """A message has come."""
        self.send(self.server.handle(sender, message))

    def send(self, out: Sequence[tuple[Address, Message]]) -> None:
        """Put the server's answers on their way."""
        for to, message in out:
            with suppress(TransportError):  # as a host does: there is nobody yet, or not any more
                self._wire.send(self.server.me, to, message)

    def lost(self, peer: Address, reason: str) -> None:
        """A connection ended."""
        self.lost_peers.append(peer)


class SimCluster:
    """Every server and every worker's door of a job, tied by a simulated road, connected as host processes are.

    Args:
        job: the job; its program is not run.
        seed: of every chance.
        weather: of the road.
        schema: what the model consists of.
        rate: of the SGD that the servers step with.
        resumed: the snapshot that the job goes on from.
    """

    def __init__(
        self,
        job: Job,
        seed: int,
        weather: NetworkFaults | None,
        schema: tuple[Parameter, ...],
        rate: float = 1.0,
        resumed: SnapshotSource | None = None,
    ) -> None:
        self.job, self.topology = job, layout(job.cluster)
        self.sim = Simulation(seed)
        self.wire = self._wire(weather)
        self.random = random.Random(seed)  # the scripts' own dice
        groups = self.topology.server_groups if self.topology.synced else 1
        self.schema, self.map = _plan(schema, self.topology.shards, groups, rate)
        self.houses: dict[Address, SimServer] = {}
        for group in range(self.topology.server_groups):
            for me in self.topology.servers(group):
                self.houses[me] = SimServer(make_server(me, job, self.topology, zeros, resumed=resumed), self.wire)
                self.wire.attach(me, self.houses[me])
        self._meet_servers()
        self.workers = [me for group in range(self.topology.worker_groups) for me in self.topology.workers(group)]
        self.doors = {me: self._door(me) for me in self.workers}

    def _wire(self, weather: NetworkFaults | None) -> SimulatedTransport:
        return SimulatedTransport(self.sim, weather)

    def _meet_servers(self) -> None:
        for me in self.houses:
            for peer in peers(me, self.topology):
                self.wire.connect(me, peer, "")

    def _door(self, me: Address) -> Client:
        door = Client(me, self.topology, lambda to, message: self.wire.send(me, to, message), self.sim.waiter())
        self.wire.attach(me, door)
        for server in {*door.servers, door.desk}:
            self.wire.connect(me, server, "")
        return door

    def server(self, group: int, shard: int) -> Server:
        """One shard of a server group."""
        return self.houses[Address(Role.SERVER, group, shard)].server


@dataclass
class SimWorker:
    """One worker without a model. Gradients are lists of one 1-D tensor per parameter."""

    town: SimCluster
    me: Address
    steps: int = 0
    outcomes: list[StepOutcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.door = self.town.doors[self.me]
        self.flats = FlatBuffers(self.town.map, None, zeros)
        self.visible = self.door.group_size > 1

    def open(self, start: float = 0.0) -> "SimWorker":
        """Join the job; worker (0,0) says the values from which everybody starts."""
        self.door.open(self.town.schema, self.town.map, self.flats)
        if self.me.group == self.me.index == 0:
            for space in self.town.map.spaces:
                self.flats.flat("local", space.index).fill_(start)
            self.door.give_initial("local")
        self.door.fetch()
        return self

    def view(self, name: str, index: int) -> torch.Tensor:
        """A parameter's part of this worker's flat buffer of that name."""
        space, offset = self.town.map.offsets[index]
        return self.flats.flat(name, space)[offset : offset + self.town.map.parameters[index].count]

    def values(self) -> list[torch.Tensor]:
        """This worker's parameters now."""
        return [self.view("params", index).clone() for index in range(len(self.town.map.parameters))]

    def push(self, gradient: Sequence[torch.Tensor], ordinal: int = 0) -> int:
        """Send a gradient home, bucket by bucket in any order; returns the bitmap of the buckets."""
        for index, part in enumerate(gradient):
            self.view("local", index).copy_(part)
        buckets = list(self.town.map.buckets)
        self.town.random.shuffle(buckets)
        for bucket in buckets:
            present = (1 << len(bucket.pieces)) - 1
            self.door.push(self.steps, ordinal, bucket, 1.0, present, self.flats.view("local", bucket))
        return (1 << len(buckets)) - 1

    def backward(self, gradient: Sequence[torch.Tensor], ordinal: int = 0) -> list[torch.Tensor]:
        """One backward of a group of several: push, wait; returns the group's mean (or sum), per parameter."""
        self.door.end_backward(self.steps, ordinal, 1.0, self.push(gradient, ordinal))
        for number, (_, body) in self.door.wait_means()[0].items():
            self.flats.view("seen", self.town.map.buckets[number]).copy_(body)
        return [self.view("seen", index).clone() for index in range(len(gradient))]

    def commit(self, backwards: int = 1, revision: int = 0, **more: Any) -> StepOutcome:
        """`optimizer.step()`; `more` are fields of StepEnd."""
        revisions = () if self.visible else (revision,) * len(self.town.map.buckets)
        said = {"backwards": backwards, "weight": 1.0, "fetch": True, "hyper": b"", "marks": ()}
        outcome = self.door.commit(self.steps, StepEnd(**{**said, "revisions": revisions, **more}))
        self.steps += 1
        self.outcomes.append(outcome)
        return outcome

    def step(self, gradient: Sequence[torch.Tensor], **more: Any) -> StepOutcome:
        """One step with one backward."""
        if self.visible:
            self.backward(gradient)
        else:
            self.push(gradient)
        return self.commit(**more)

    def finish(self) -> "SimWorker":
        """The script has come to its end."""
        if self.me.index == 0:
            self.door.put_buffers([])
        self.door.finish(self.steps)
        return self

    def sleep(self, low: float, high: float) -> None:
        """Compute for a while."""
        self.town.sim.sleep(self.town.random.uniform(low, high))
