"""A whole job on a simulated network with faults, and its workers.

A `SimWorker` is a worker without a model. It pushes given numbers. Integers add up exactly in any order.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from faulty_network import FaultyTransport, NetworkFaults
from torch import nn

from topotrain.config.job import Grads, Job
from topotrain.config.sharding import Parameter, SliceMap, cut
from topotrain.config.topology import Address, Role, layout
from topotrain.core.client.client import PeerLost, StepEnd, StepOutcome
from topotrain.core.model.schema import FlatBuffers, PrivateMemory, Schema
from topotrain.core.optim.adapter import describe
from topotrain.core.protocol import Message
from topotrain.core.server.server import Server
from topotrain.extensions.assignment.assignment_client import (
    AssignmentPlace,
    changed_bucket,
    decided_by,
    send_assignment,
)
from topotrain.extensions.checkpointing.shard_snapshot import SnapshotSource
from topotrain.launch.runtime.server_composition import make_server
from topotrain.tools.simulator.sim_cluster import SimCluster, SimServer


def parameters(*counts: int, dtype: str = "float32") -> tuple[Parameter, ...]:
    """Return 1-D parameters p0, p1, … of these lengths."""
    return tuple(Parameter(f"p{i}", (count,), (1,), dtype, True) for i, count in enumerate(counts))


# Thousands of seeds share a few layouts and lengths.
@lru_cache(maxsize=64)
def sgd_plan(schema: tuple[Parameter, ...], shards: int, groups: int, rate: float) -> tuple[Schema, SliceMap]:
    tensors = [nn.Parameter(torch.zeros(p.shape, dtype=getattr(torch, p.dtype))) for p in schema]
    spec = describe(torch.optim.SGD(tensors, lr=rate), tensors)
    slice_map = cut(schema, shards, groups)
    return Schema(schema, (), spec.to_text(), slice_map.digest), slice_map


class FaultyCluster(SimCluster):
    """A simulated cluster on a network with faults.

    rate: the learning rate of the servers' SGD. resumed: the snapshot to resume from.
    """

    transport: FaultyTransport

    def __init__(
        self,
        job: Job,
        seed: int,
        network_faults: NetworkFaults | None,
        schema: tuple[Parameter, ...],
        rate: float = 1.0,
        resumed: SnapshotSource | None = None,
    ) -> None:
        self._faults_of_network, self._rate, self._resumed = network_faults, rate, resumed
        self.random = random.Random(seed)  # the scripts' own random generator
        super().__init__(job, layout(job.cluster), seed, schema)

    def _make_transport(self) -> FaultyTransport:
        return FaultyTransport(self.sim, self._faults_of_network)

    def _describe(self, schema: tuple[Parameter, ...]) -> tuple[Schema, SliceMap]:
        groups = self.topology.server_groups if self.topology.synced else 1
        return sgd_plan(schema, self.topology.shards, groups, self._rate)

    def _make_server(self, me: Address) -> SimServer:
        server = make_server(me, self.job, self.topology, PrivateMemory(), resumed=self._resumed)
        return SimServer(server, self.transport)

    def wake(self, me: Address, message: Message) -> None:
        self.transport.when_resumed(lambda: self.sim_servers[me].handle(me, message), me)

    def may_be_lost(self, cell: int) -> bool:
        """Whether the batch of a cell may be in no values, although its epoch is over."""
        return False

    def server(self, group: int, shard: int) -> Server:
        """Return one shard of a server group."""
        return self.sim_servers[Address(Role.SERVER, group, shard)].server


@dataclass
class SimWorker:
    """One worker without a model; a gradient is one 1-D tensor per parameter."""

    cluster: FaultyCluster
    me: Address
    singly: bool = False  # it makes its steps without the others of its group
    steps: int = 0
    outcomes: list[StepOutcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = self.cluster.clients[self.me]
        self.flats = FlatBuffers(self.cluster.map, None, PrivateMemory())
        visible = self.cluster.job.grads is Grads.kVisible
        self.visible = visible and self.client.channel.group_size > 1 and not self.singly

    def open(self, start: float = 0.0) -> "SimWorker":
        """Join the job. Worker (0,0) sends the initial values."""
        self.client.open(self.cluster.schema, self.cluster.map, self.flats)
        # Only the first worker has the initial values, as in a job.
        if self.me.group == self.me.index == 0:
            for space in self.cluster.map.spaces:
                self.flats.flat("local", space.index).fill_(start)
            self.client.send_initial("local")
        self.client.values.fetch()
        self.client.gradients.start(torch.device("cpu"))
        return self

    def view(self, name: str, index: int) -> torch.Tensor:
        """Return a parameter's part of this worker's flat buffer of that name."""
        space, offset = self.cluster.map.offsets[index]
        return self.flats.flat(name, space)[offset : offset + self.cluster.map.parameters[index].count]

    def values(self) -> list[torch.Tensor]:
        """Return this worker's present parameters."""
        return [self.view("params", index).clone() for index in range(len(self.cluster.map.parameters))]

    def push(self, gradient: Sequence[torch.Tensor], ordinal: int = 0) -> int:
        """Push a gradient, bucket by bucket; return the bitmap of the buckets."""
        for index, part in enumerate(gradient):
            self.view("local", index).copy_(part)
        buckets = list(self.cluster.map.buckets)
        # The order in which a backward pass fills buckets is not promised to servers.
        self.cluster.random.shuffle(buckets)
        for bucket in buckets:
            present = (1 << len(bucket.pieces)) - 1
            self.client.gradients.push(self.steps, ordinal, bucket, 1.0, present, self.flats.view("local", bucket))
        return (1 << len(buckets)) - 1

    def backward(self, gradient: Sequence[torch.Tensor], ordinal: int = 0) -> list[torch.Tensor]:
        """Run one backward of a group: push, and return its mean or sum, by parameter."""
        gradients = self.client.gradients
        # Some scripts read the first means of a step only later, and some of the workers do.
        lazy = gradients.keeps and not ordinal and (self.steps + self.me.index) % 2 == 0
        gradients.begin_backward(lazy)
        gradients.end_backward(self.steps, ordinal, 1.0, self.push(gradient, ordinal))
        means, _ = gradients.wait_means()
        for number, (_, body) in (gradients.ask_means() if lazy else means).items():
            self.flats.view("seen", self.cluster.map.buckets[number]).copy_(body)
        return [self.view("seen", index).clone() for index in range(len(gradient))]

    def commit(self, backwards: int = 1, revision: int = 0, **more: Any) -> StepOutcome:
        """Run `optimizer.step()`; `more` are fields of StepEnd."""
        revisions = () if self.visible else (revision,) * len(self.cluster.map.buckets)
        usual = {"backwards": backwards, "weight": 1.0, "fetch": True, "hyper": b"", "marks": ()}
        outcome = self.client.steps.commit(self.steps, StepEnd(**{**usual, "revisions": revisions, **more}))
        self.steps += 1
        self.outcomes.append(outcome)
        return outcome

    def step(self, gradient: Sequence[torch.Tensor], **more: Any) -> StepOutcome:
        """Run one step with one backward."""
        if self.visible:
            self.backward(gradient)
        else:
            self.push(gradient)
        return self.commit(**more)

    def assign(
        self, number: int, values: torch.Tensor, place: AssignmentPlace, follows_step: bool = False
    ) -> StepOutcome:
        """Change a parameter as `tt.assign` does, before the step of a batch.

        follows_step: it is behind one.

        Raises:
            PeerLost: the group has lost a worker meanwhile.
        """
        for index, now in enumerate(self.values()):
            self.view("assigned", index).copy_(values if index == number else now)
        apart = self.cluster.topology.worker_groups > 1
        found = (
            changed_bucket(b, range(len(b.pieces)), self.flats.view("assigned", b), self.flats.view("params", b), apart)
            for b in decided_by(self.client)
        )
        send_assignment(self.client, self.steps, place, [each for each in found if each is not None], follows_step)
        outcome = self.client.steps.change(self.steps)
        if outcome.late:
            raise PeerLost("the group has dropped an assignment")
        self.steps += 1
        return outcome

    def finish(self) -> "SimWorker":
        """Finish the script."""
        if self.me.index == 0:
            # Sends the end of the model's buffers, for which a server waits although there are none.
            self.client.buffers.put([])
        self.client.finish(self.steps)
        return self

    def sleep(self, low: float, high: float) -> None:
        """Compute for a random time between these virtual seconds."""
        self.cluster.sim.sleep(self.cluster.random.uniform(low, high))
