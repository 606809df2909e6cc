"""A whole job in one process: real servers and clients, and a simulated network.

This module makes no decisions. All replies and waits are those of the product's own code. Only the transport, the clock
and the script are simulated.
"""

from collections.abc import Sequence
from contextlib import suppress

import torch

from topotrain.comm.transport import TransportError
from topotrain.config.job import Job
from topotrain.config.sharding import Parameter, SliceMap
from topotrain.config.topology import Address, Topology
from topotrain.core.client.client import Client
from topotrain.core.client.client_context import Waiter
from topotrain.core.client.client_extension import ClientExtension
from topotrain.core.client.step_exchange import GradientExchange
from topotrain.core.model.schema import PrivateMemory, Schema, slice_map_for
from topotrain.core.protocol import Message
from topotrain.core.server.server import Server
from topotrain.core.server.server_context import TimerHost
from topotrain.core.transport_contract import MessageSender
from topotrain.extensions.host_sums.host_reduction import HostReduction, HostSumClient, UnitLinks
from topotrain.extensions.host_sums.host_units import used_unit
from topotrain.extensions.host_sums.sum_writer import HostSumSettings
from topotrain.launch.runtime.process_host import peers
from topotrain.launch.runtime.server_composition import make_server
from topotrain.launch.runtime.worker_composition import client_extensions
from topotrain.tools.simulator.sim_network import SimSender, SimulatedTransport, Simulation

PresentWorkers = dict[tuple[Address, int], HostReduction]
"""The workers that can be reached by others of their unit, by address and incarnation."""


class SimUnitLinks(UnitLinks):
    """The connections of one simulated worker to the others of its unit."""

    def __init__(
        self,
        me: tuple[Address, int],
        unit: Sequence[Address],
        sender: MessageSender,
        transport: SimulatedTransport,
        present: PresentWorkers,
    ) -> None:
        self._me, self._unit, self._sender = me, unit, sender
        self._transport, self._present = transport, present

    def begin(self, workers: Sequence[Address], reduction: HostReduction) -> None:
        (me, incarnation), there = self._me, self._present
        there[self._me] = reduction
        for other in self._unit:
            if other != me and (other, incarnation) in there:
                # As in a job, each pair connects once, from the later worker to the earlier one.
                earlier, later = sorted((me, other))
                self._transport.connect(later, earlier, "")
                there[later, incarnation].connected(earlier)

    def send(self, to: Address, message: Message) -> None:
        self._sender.send(to, message)

    def close(self) -> None:
        """Do nothing: a simulated connection ends with its process."""


def reduction_of(
    job: Job,
    topology: Topology,
    me: tuple[Address, int],
    sender: MessageSender,
    transport: SimulatedTransport,
    present: PresentWorkers,
) -> tuple[GradientExchange | None, tuple[ClientExtension, ...]]:
    """Return a worker's part in the sums of its host, and its extension."""
    unit = used_unit(job, topology, me[0])
    if unit is None:
        return None, ()
    links = SimUnitLinks(me, unit.addresses(), sender, transport, present)
    reduction = HostReduction(unit, HostSumSettings.of(job), links)
    return reduction, (HostSumClient(unit, reduction),)


class SimServer:
    """A server at its address, as a process host runs it."""

    def __init__(self, server: Server, transport: SimulatedTransport) -> None:
        self.server, self._transport = server, transport

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        return self.server.place(sender, message, viewable)

    def handle(self, sender: Address, message: Message) -> None:
        self.send(self.server.handle(sender, message))

    def send(self, out: Sequence[tuple[Address, Message]]) -> None:
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
        cluster.sim.at(cluster.sim.now + seconds, lambda: cluster.wake(me, message))


class SimCluster:
    """All servers and worker clients of a job on a simulated transport."""

    shared = False
    """Whether the processes of a host show each other memory."""

    def __init__(self, job: Job, topology: Topology, seed: int, schema: tuple[Parameter, ...]) -> None:
        self.job, self.topology = job, topology
        self.sim = Simulation(seed)
        self.transport = self._make_transport()
        self.present: PresentWorkers = {}
        self.schema, self.map = self._describe(schema)
        self.sim_servers: dict[Address, SimServer] = {}
        for group in range(self.topology.server_groups):
            for me in self.topology.servers(group):
                self.sim_servers[me] = self._make_server(me)
                self.sim_servers[me].server.timer.attach(SimTimer(self, me))
                self.transport.attach(me, self.sim_servers[me])
        self._connect_servers()
        self.workers = [me for group in range(self.topology.worker_groups) for me in self.topology.workers(group)]
        self.clients = {me: self._make_client(me) for me in self.workers}

    def _make_transport(self) -> SimulatedTransport:
        return SimulatedTransport(self.sim)

    def _describe(self, schema: tuple[Parameter, ...]) -> tuple[Schema, SliceMap]:
        """Return the description of the model, and its slices."""
        slice_map = slice_map_for(schema, self.topology)
        return Schema(schema, (), "", slice_map.digest), slice_map

    def _make_server(self, me: Address) -> SimServer:
        return SimServer(make_server(me, self.job, self.topology, PrivateMemory()), self.transport)

    def _connect_servers(self) -> None:
        for me in self.sim_servers:
            for peer in peers(me, self.topology):
                self.transport.connect(me, peer, "")

    def _make_client(self, me: Address) -> Client:
        sender = SimSender(self.transport, me)
        gradients, sums = reduction_of(self.job, self.topology, (me, 0), sender, self.transport, self.present)
        extensions = (*client_extensions(self.topology), *sums)
        waiter, shared = self._waiter(me), self.shared
        client = Client(me, self.topology, sender, waiter, shared, extensions=extensions, gradients=gradients)
        self.transport.attach(me, client)
        for server in {*client.channel.servers, client.channel.first_server}:
            self.transport.connect(me, server, "")
        return client

    def _waiter(self, me: Address) -> Waiter:
        return self.sim

    def wake(self, me: Address, message: Message) -> None:
        """Let a server handle a message of its own timer."""
        self.sim_servers[me].handle(me, message)
