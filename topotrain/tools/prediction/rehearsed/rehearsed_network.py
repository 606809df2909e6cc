"""The network of a rehearsal: routes between processes, with the costs of a probe."""

import random
from dataclasses import dataclass

import torch

from topotrain.comm.transport import Endpoint
from topotrain.comm.transport.frame import HEADER_BYTES
from topotrain.config.job import Link, TransportChoice
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.protocol import Message, encode
from topotrain.tools.prediction.host_resources import HostCores, LinkQueue, LinkTime, sharing_on
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.rehearsed.message_records import MessageRecords
from topotrain.tools.prediction.rehearsed.process_work import ProcessWork, SentMessage, SerialWork
from topotrain.tools.probe.probe_file import Probe, ProbedTransport
from topotrain.tools.simulator.sim_network import NetworkFaults, SimulatedTransport, Simulation

_NO_COST = ProbedTransport(0.0, 0.0, 0.0, 0.0, 0.0)
PERFECT = NetworkFaults(delay=(0.0, 0.0), late=0.0, snapshots=False)


@dataclass(frozen=True, slots=True)
class Route:
    """The way from one endpoint to another one.

    Attributes:
        costs: of the transport.
        inside: both are in one process, so no bytes travel.
        viewable: the receiver reads the sender's memory.
        link: between two hosts. None: the route has no bandwidth.
        writer: a thread of its own sends. None: the thread that has the message does.
    """

    costs: ProbedTransport
    inside: bool = False
    viewable: bool = True
    link: LinkQueue | None = None
    writer: SerialWork | None = None

    def send_s(self, nbytes: int) -> float:
        """Return the sender's seconds for a message."""
        return self.costs.send_message_s + nbytes * self.costs.send_byte_s


class HostLinks:
    """The links of all hosts.

    Args:
        sim: the virtual time.
        topology: places addresses on hosts.
        link: of each host.
    """

    def __init__(self, sim: Simulation, topology: Topology, link: Link | None) -> None:
        self._sim, self._topology, self._link = sim, topology, link
        self.meters: dict[tuple[int, str], LinkTime] = {}
        """By host and direction, "out" or "in"."""

    def queue(self, me: Address, to: Address) -> LinkQueue | None:
        """Make the queue of a connection between two hosts; None: nothing bounds it."""
        if self._link is None:
            return None
        here, there = self._topology.host_of(me), self._topology.host_of(to)
        dice = random.Random(f"{self._sim.seed} {me} {to}")
        return LinkQueue(self._sim, self._link, self._meter(here, "out"), self._meter(there, "in"), dice)

    def _meter(self, host: int, direction: str) -> LinkTime | None:
        if self._link is None or self._link.bandwidth is None:
            return None
        return self.meters.setdefault((host, direction), LinkTime(self._link.bandwidth * 1e6 / 8))


class MachineCores:
    """The cores of all machines. Emulated hosts are on one machine.

    Args:
        sim: the virtual time.
        topology: places addresses on hosts.
        machines: the hosts.
        probe: has the cores of the probed machine, and how processes share them.
    """

    def __init__(self, sim: Simulation, topology: Topology, machines: Machines, probe: Probe) -> None:
        self._sim, self._topology, self._machines, self._probe = sim, topology, machines, probe
        self.by_host: dict[int, HostCores] = {}

    def of(self, me: Address) -> HostCores:
        """Return the cores of an endpoint's machine."""
        host = self._machines.host_of(self._topology, me)
        if host not in self.by_host:
            self.by_host[host] = HostCores(self._sim, *sharing_on(self._machines, self._probe))
        return self.by_host[host]


class Routes:
    """The routes between the endpoints of a job.

    Args:
        topology: the layout.
        probe: has the costs of the transports.
        links: of the hosts.
        cores: of the hosts.
    """

    def __init__(self, topology: Topology, probe: Probe, links: HostLinks, cores: MachineCores) -> None:
        self._topology, self._probe, self._links, self._cores = topology, probe, links, cores
        self._known: dict[tuple[Address, Address], Route] = {}

    def between(self, me: Address, to: Address) -> Route:
        """Return the route of messages from `me` to `to`."""
        found = self._known.get((me, to))
        if found is None:
            found = self._known[me, to] = self._make(me, to)
        return found

    def process_of(self, address: Address) -> tuple[str, int, int]:
        """Return what is the same for the endpoints of one process."""
        if address.role is Role.WORKER or self._topology.inline:
            return ("worker", address.group, address.index)
        # A server process holds all servers of its unit.
        return ("servers", self._topology.unit_of(address), 0)

    def far(self, me: Address, to: Address) -> bool:
        """Whether two endpoints are on different hosts."""
        return not self._topology.together(me, to)

    def _make(self, me: Address, to: Address) -> Route:
        if self.process_of(me) == self.process_of(to):
            return Route(_NO_COST, inside=True)
        transports = self._probe.transports
        if self.far(me, to):
            link = self._links.queue(me, to)
            # A slow link never takes all at once, so that a writer thread sends.
            writer = None if link is None else SerialWork(self._cores.of(me))
            return Route(transports["tcp"], viewable=False, link=link, writer=writer)
        if self._topology.cluster.transport is TransportChoice.kTcp:
            return Route(transports["tcp"], viewable=False)
        return Route(transports["shm"])


class CountedEndpoint(Endpoint):
    """An endpoint of which the operations count. work: of its process."""

    def __init__(self, endpoint: Endpoint, work: ProcessWork) -> None:
        self._endpoint, self._work = endpoint, work

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        return self._endpoint.place(sender, message, viewable)

    def handle(self, sender: Address, message: Message) -> None:
        with self._work.meter.counting():
            self._endpoint.handle(sender, message)

    def lost(self, peer: Address, reason: str) -> None:
        self._endpoint.lost(peer, reason)


@dataclass(frozen=True, slots=True)
class Delivery(SentMessage):
    """A message on its way between two endpoints.

    Attributes:
        transport: carries it.
        route: from `me` to `to`.
        nbytes: of the message, with its header.
    """

    transport: "RehearsedTransport"
    route: Route
    me: Address
    to: Address
    message: Message
    nbytes: int

    def leave(self) -> None:
        self.transport.carry(self)

    def arrive(self) -> None:
        """Reach the receiver now."""
        self.transport.receive(self)

    def handle(self) -> None:
        self.transport.hand_over(self)


class RehearsedTransport(SimulatedTransport):
    """Carries messages with the times that they take.

    Args:
        sim: the virtual time.
        probe: has the costs.
        routes: between the endpoints.
        records: of what is sent.
    """

    def __init__(self, sim: Simulation, probe: Probe, routes: Routes, records: MessageRecords) -> None:
        super().__init__(sim, PERFECT)
        self._sim, self._probe, self._routes, self._records = sim, probe, routes, records
        self._work: dict[Address, ProcessWork] = {}

    def employ(self, me: Address, work: ProcessWork) -> None:
        """Let the process of an endpoint do this work."""
        self._work[me] = work

    def attach(self, me: Address, resident: Endpoint) -> str:
        return super().attach(me, CountedEndpoint(resident, self._work[me]))

    def _viewable(self, me: Address, to: Address) -> bool:
        return self._routes.between(me, to).viewable

    def _schedule(self, me: Address, to: Address, message: Message, late: bool) -> None:
        route, nbytes = self._routes.between(me, to), _size(message)
        if not route.inside:
            self._records.sent(me, to, message, nbytes, self._sim.now)
        seconds = 0.0 if route.writer is not None else route.send_s(nbytes)
        self._work[me].send(seconds, Delivery(self, route, me, to, message, nbytes))

    def carry(self, delivery: Delivery) -> None:
        """Let a message that leaves its process now travel along its route."""
        self._records.left(delivery.me, delivery.to, delivery.message, self._sim.now)
        route, nbytes, link = delivery.route, delivery.nbytes, delivery.route.link
        if route.writer is None or link is None:
            self._sim.at(self._sim.now + route.costs.latency_s, delivery.arrive)
            return
        route.writer.put(route.send_s(nbytes), lambda: link.send(nbytes, delivery.arrive))

    def receive(self, delivery: Delivery) -> None:
        """Let the receiver's process receive a message that arrives now."""
        to = delivery.to
        self._records.arrived(delivery.me, to, delivery.message, self._sim.now)
        serves = self._probe.server_message_s if to.role is Role.SERVER else 0.0
        costs = delivery.route.costs
        receives = costs.receive_message_s + delivery.nbytes * costs.receive_byte_s
        self._work[to].receive(receives + serves, delivery)

    def hand_over(self, delivery: Delivery) -> None:
        """Let the receiver's endpoint handle a message."""
        self._deliver(delivery.me, delivery.to, delivery.message)


def _size(message: Message) -> int:
    _, meta = encode(message)
    return HEADER_BYTES + len(meta) + (0 if message.body is None else message.body.nbytes)
