"""A whole job in one process: real servers and clients, and a simulated network.

This module makes no decisions. All replies and waits are those of the product's own code. Only the transport, the clock
and the script are simulated. A `SimWorker` is a worker without a model. It pushes given numbers. Integers add up
exactly in any order.
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
from topotrain.config.job import Grads, Job
from topotrain.config.sharding import Parameter, SliceMap, cut
from topotrain.config.topology import Address, Role, Topology, layout
from topotrain.core.client.client import Client, PeerLost, StepEnd, StepOutcome
from topotrain.core.client.client_context import Waiter
from topotrain.core.model.schema import FlatBuffers, PrivateMemory, Schema
from topotrain.core.optim.adapter import describe
from topotrain.core.protocol import Message
from topotrain.core.server.server import Server
from topotrain.core.server.server_context import TimerHost
from topotrain.extensions.assignment.assignment_client import (
    AssignmentPlace,
    changed_bucket,
    decided_by,
    send_assignment,
)
from topotrain.extensions.checkpointing.shard_snapshot import SnapshotSource
from topotrain.launch.runtime.process_host import peers
from topotrain.launch.runtime.server_composition import make_server
from topotrain.launch.runtime.worker_composition import client_extensions
from topotrain.tools.simulator.sim_network import NetworkFaults, SimSender, SimulatedTransport, Simulation
from topotrain.tools.simulator.sim_unit_links import PresentWorkers, reduction_of


def parameters(*counts: int, dtype: str = "float32") -> tuple[Parameter, ...]:
    """Return 1-D parameters p0, p1, … of these lengths."""
    return tuple(Parameter(f"p{i}", (count,), (1,), dtype, True) for i, count in enumerate(counts))


# Thousands of seeds share a few layouts and lengths.
@lru_cache(maxsize=64)
def _plan(schema: tuple[Parameter, ...], shards: int, groups: int, rate: float) -> tuple[Schema, SliceMap]:
    tensors = [nn.Parameter(torch.zeros(p.shape, dtype=getattr(torch, p.dtype))) for p in schema]
    spec = describe(torch.optim.SGD(tensors, lr=rate), tensors)
    slice_map = cut(schema, shards, groups)
    return Schema(schema, (), spec.to_text(), slice_map.digest), slice_map


class SimServer:
    """A server at its address, as a process host runs it."""

    def __init__(self, server: Server, transport: SimulatedTransport) -> None:
        self.server, self._transport = server, transport

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        """Return the buffer for a message's body, as `Endpoint.place` does."""
        return self.server.place(sender, message, viewable)

    def handle(self, sender: Address, message: Message) -> None:
        """Handle a message."""
        self.send(self.server.handle(sender, message))

    def send(self, out: Sequence[tuple[Address, Message]]) -> None:
        """Send the server's replies."""
        for to, message in out:
            with suppress(TransportError):  # as a process host does: the peer may not be connected
                self._transport.send(self.server.me, to, message)

    def lost(self, peer: Address, reason: str) -> None:
        """Do nothing: a server is told of it by its host."""


class SimTimer(TimerHost):
    """The virtual time, for one simulated server."""

    def __init__(self, cluster: "SimCluster", me: Address) -> None:
        self._cluster, self._me = cluster, me

    def now(self) -> float:
        return self._cluster.sim.now

    def wake(self, seconds: float, message: Message) -> None:
        cluster, me = self._cluster, self._me

        def handle() -> None:
            cluster.sim_servers[me].handle(me, message)

        cluster.sim.at(cluster.sim.now + seconds, lambda: cluster.transport.when_resumed(handle, me))


class SimCluster:
    """All servers and worker clients of a job on a simulated transport.

    job: its program is not run. rate: the learning rate of the servers' SGD. resumed: the snapshot to resume from.
    """

    shared = False
    """Whether the processes of a host show each other memory."""

    def __init__(
        self,
        job: Job,
        seed: int,
        network_faults: NetworkFaults | None,
        schema: tuple[Parameter, ...],
        rate: float = 1.0,
        resumed: SnapshotSource | None = None,
    ) -> None:
        self.job, self.topology = job, self._place(job)
        self.sim = Simulation(seed)
        self.transport = self._make_transport(network_faults)
        self.present = PresentWorkers(self.transport)
        self.random = random.Random(seed)  # the scripts' own random generator
        groups = self.topology.server_groups if self.topology.synced else 1
        self.schema, self.map = self._describe(schema, groups, rate)
        self.sim_servers: dict[Address, SimServer] = {}
        for group in range(self.topology.server_groups):
            for me in self.topology.servers(group):
                self.sim_servers[me] = self._make_server(me, resumed)
                self.sim_servers[me].server.timer.attach(SimTimer(self, me))
                self.transport.attach(me, self.sim_servers[me])
        self._connect_servers()
        self.workers = [me for group in range(self.topology.worker_groups) for me in self.topology.workers(group)]
        self.clients = {me: self._make_client(me) for me in self.workers}

    def _place(self, job: Job) -> Topology:
        """Return the layout of the job."""
        return layout(job.cluster)

    def _make_server(self, me: Address, resumed: SnapshotSource | None) -> SimServer:
        return SimServer(make_server(me, self.job, self.topology, PrivateMemory(), resumed=resumed), self.transport)

    def _describe(self, schema: tuple[Parameter, ...], groups: int, rate: float) -> tuple[Schema, SliceMap]:
        """Return the description of the model, and its slices for so many server groups."""
        return _plan(schema, self.topology.shards, groups, rate)

    def _make_transport(self, network_faults: NetworkFaults | None) -> SimulatedTransport:
        return SimulatedTransport(self.sim, network_faults)

    def _connect_servers(self) -> None:
        for me in self.sim_servers:
            for peer in peers(me, self.topology):
                self.transport.connect(me, peer, "")

    def _make_client(self, me: Address) -> Client:
        sender = SimSender(self.transport, me)
        gradients, sums = reduction_of(self.job, self.topology, me, 0, sender, self.present)
        extensions = (*client_extensions(self.topology), *sums)
        waiter, shared = self._waiter(me), self.shared
        client = Client(me, self.topology, sender, waiter, shared, extensions=extensions, gradients=gradients)
        self.transport.attach(me, client)
        for server in {*client.channel.servers, client.channel.first_server}:
            self.transport.connect(me, server, "")
        return client

    def _waiter(self, me: Address) -> Waiter:
        """Return the waits of a worker's script."""
        return self.sim

    def may_be_lost(self, cell: int) -> bool:
        """Whether the batch of a cell may be in no values, although its epoch is over."""
        return False

    def server(self, group: int, shard: int) -> Server:
        """Return one shard of a server group."""
        return self.sim_servers[Address(Role.SERVER, group, shard)].server


@dataclass
class SimWorker:
    """One worker without a model; a gradient is one 1-D tensor per parameter."""

    cluster: SimCluster
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

    def go_on_at(self, step: int) -> None:
        """Set the number of the next step."""
        self.steps = step

    def sleep(self, low: float, high: float) -> None:
        """Compute for a random time between these virtual seconds."""
        self.cluster.sim.sleep(self.cluster.random.uniform(low, high))
