"""The network of a rehearsal: routes with the costs of a probe, and records."""

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from topotrain.comm.transport.frame import HEADER_BYTES
from topotrain.config.job import TransportChoice
from topotrain.config.topology import Address, Role, Topology
from topotrain.core import protocol as m
from topotrain.core.protocol import Message, encode
from topotrain.tools.prediction.host_resources import HostCores, LinkQueue, LinkTime, sharing_on
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.process_work import ProcessWork, SerialWork
from topotrain.tools.probe.probe_file import Probe, ProbedTransport
from topotrain.tools.simulator.sim_network import SimulatedTransport, Simulation

_CONTRIBUTIONS = (m.Push, m.BackwardEnd, m.GradientOverride)
_MEANS = (m.ReducedGradient, m.BackwardReduced)

Pair = tuple[Address, Address]
"""Sender and receiver."""


class Moment(Enum):
    """Moments of a worker's step."""

    PUSHED = auto()  # the last gradient is at its server
    REDUCED = auto()  # the last mean has left a server
    MEAN = auto()  # the last mean is at the worker
    COMMITTED = auto()  # the commit is at its server
    ANSWERED = auto()  # the last answer to the commit has left a server


class MessageRecords:
    """The messages of a rehearsal.

    one_group: there is one worker group, so that a step's number names one step of the job.
    """

    def __init__(self, one_group: bool) -> None:
        self._one_group = one_group
        self.sizes: dict[Pair, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        """Bytes of each message with a step's number, by that number."""
        self.others: dict[Pair, list[tuple[float, int]]] = defaultdict(list)
        """Time and bytes of messages without one."""
        self._times: dict[tuple[Moment, int, int], dict[Address, float]] = defaultdict(dict)
        """By moment, group and step: when each worker was there."""

    def sent(self, me: Address, to: Address, message: m.Message, nbytes: int, now: float) -> None:
        """A message between two processes is sent."""
        step = _step_of(message)
        between_servers = me.role is to.role is Role.SERVER
        if step is None or (between_servers and not self._one_group):
            self.others[me, to].append((now, nbytes))
        else:
            self.sizes[me, to][step].append(nbytes)

    def left(self, me: Address, to: Address, message: m.Message, now: float) -> None:
        """A message has left its process."""
        step = _step_of(message)
        if step is not None and me.role is Role.SERVER and to.role is Role.WORKER:
            moment = Moment.REDUCED if isinstance(message, _MEANS) else Moment.ANSWERED
            self._times[moment, to.group, step][to] = now

    def arrived(self, me: Address, to: Address, message: m.Message, now: float) -> None:
        """A message is at its receiver."""
        step = _step_of(message)
        if step is None:
            return
        if isinstance(message, _MEANS):
            self._times[Moment.MEAN, to.group, step][to] = now
        elif me.role is Role.WORKER and isinstance(message, (*_CONTRIBUTIONS, m.Commit)):
            moment = Moment.COMMITTED if isinstance(message, m.Commit) else Moment.PUSHED
            self._times[moment, me.group, step][me] = now

    def exchange(self, me: Address, step: int) -> Iterator[tuple[str, float, Address]]:
        """Yield name, end and process of each part of a worker's exchange.

        The process of a wait is the one that the worker waits for.
        """
        rounds = (Moment.PUSHED, Moment.REDUCED, Moment.MEAN), (Moment.COMMITTED, Moment.ANSWERED, None)
        for sent, left, here in rounds:
            there = self._times[sent, me.group, step]
            yield "push", there.get(me, 0.0), me
            if there:
                who, when = max(there.items(), key=lambda each: each[1])
                yield "wait", when, who
            yield "apply", self._times[left, me.group, step].get(me, 0.0), me
            if here is not None:
                yield "pull", self._times[here, me.group, step].get(me, 0.0), me


def _step_of(message: m.Message) -> int | None:
    """Return the number of the step to which a message belongs, or None."""
    if isinstance(message, m.StepDecision) and message.change:
        return None
    step = getattr(message, "step", None)
    if step is None:
        # The values of a step have its number as their round.
        step = getattr(message, "round", None) if isinstance(message, m.Values) else None
    return step if isinstance(step, int) and step >= 0 else None


_NO_COST = ProbedTransport(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Route:
    costs: ProbedTransport
    inside: bool = False  # both are in one process, so no bytes travel
    viewable: bool = True  # the receiver reads the sender's memory
    link: tuple[SerialWork, LinkQueue] | None = None  # with the thread that sends on it; None: that of the message

    def send_s(self, nbytes: int) -> float:
        return self.costs.send_message_s + nbytes * self.costs.send_byte_s


class Hosts:
    """The hosts of a job: their cores, their links, and the routes between processes."""

    def __init__(self, sim: Simulation, topology: Topology, machines: Machines, probe: Probe) -> None:
        self._sim, self._topology, self._machines, self._probe = sim, topology, machines, probe
        self.cores: dict[int, HostCores] = {}
        """By machine. Emulated hosts are on one machine."""
        self.meters: dict[tuple[int, str], LinkTime] = {}
        """By host and direction, "out" or "in"."""
        self._routes: dict[tuple[Address, Address], Route] = {}

    def cores_of(self, me: Address) -> HostCores:
        host = self._machines.host_of(self._topology, me)
        if host not in self.cores:
            self.cores[host] = HostCores(self._sim, *sharing_on(self._machines, self._probe))
        return self.cores[host]

    def route(self, me: Address, to: Address) -> Route:
        if (me, to) not in self._routes:
            self._routes[me, to] = self._make(me, to)
        return self._routes[me, to]

    def process_of(self, address: Address) -> tuple[str, int, int]:
        """Return what is the same for the endpoints of one process."""
        if address.role is Role.WORKER or self._topology.inline:
            return ("worker", address.group, address.index)
        # A server process holds all servers of its unit.
        return ("servers", self._topology.unit_of(address), 0)

    def far(self, me: Address, to: Address) -> bool:
        return not self._topology.together(me, to)

    def _make(self, me: Address, to: Address) -> Route:
        if self.process_of(me) == self.process_of(to):
            return Route(_NO_COST, inside=True)
        transports = self._probe.transports
        if self.far(me, to):
            queue = self._queue(me, to)
            # A slow link never takes all at once, so that a writer thread sends.
            link = None if queue is None else (SerialWork(self.cores_of(me)), queue)
            return Route(transports["tcp"], viewable=False, link=link)
        if self._topology.cluster.transport is TransportChoice.kTcp:
            return Route(transports["tcp"], viewable=False)
        return Route(transports["shm"])

    def _queue(self, me: Address, to: Address) -> LinkQueue | None:
        link = self._machines.link
        if link is None:
            return None
        up, down = self._meter(me, "out"), self._meter(to, "in")
        return LinkQueue(self._sim, link, up, down, random.Random(f"{self._sim.seed} {me} {to}"))

    def _meter(self, me: Address, direction: str) -> LinkTime | None:
        link = self._machines.link
        if link is None or link.bandwidth is None:
            return None
        return self.meters.setdefault((self._topology.host_of(me), direction), LinkTime(link.bandwidth * 1e6 / 8))


class RehearsedTransport(SimulatedTransport):
    """Carries messages with the times that they take."""

    def __init__(
        self,
        sim: Simulation,
        probe: Probe,
        hosts: Hosts,
        work: Mapping[Address, ProcessWork],
        records: MessageRecords,
    ) -> None:
        super().__init__(sim)
        self._sim, self._probe, self._hosts, self._work, self._records = sim, probe, hosts, work, records

    def _viewable(self, me: Address, to: Address) -> bool:
        return self._hosts.route(me, to).viewable

    def _schedule(self, me: Address, to: Address, message: Message) -> None:
        route, nbytes = self._hosts.route(me, to), _size(message)
        if not route.inside:
            self._records.sent(me, to, message, nbytes, self._sim.now)
        seconds = route.send_s(nbytes) if route.link is None else 0.0
        self._work[me].send(seconds, lambda: self._leave(me, to, message, nbytes))

    def _leave(self, me: Address, to: Address, message: Message, nbytes: int) -> None:
        """Let a message leave its process now, and travel along its route."""
        self._records.left(me, to, message, self._sim.now)
        route, arrive = self._hosts.route(me, to), partial(self._arrive, me, to, message, nbytes)
        if route.link is None:
            self._sim.at(self._sim.now + route.costs.latency_s, arrive)
            return
        writer, link = route.link
        writer.put(route.send_s(nbytes), lambda: link.send(nbytes, arrive))

    def _arrive(self, me: Address, to: Address, message: Message, nbytes: int) -> None:
        """Let the receiver's process receive a message now, and then handle it."""
        self._records.arrived(me, to, message, self._sim.now)
        costs = self._hosts.route(me, to).costs
        serves = self._probe.server_message_s if to.role is Role.SERVER else 0.0
        receives = costs.receive_message_s + nbytes * costs.receive_byte_s
        self._work[to].receive(receives + serves, lambda: self._deliver(me, to, message))

    def _hand_over(self, me: Address, to: Address, message: Message) -> None:
        # What is done with tensors meanwhile is work of the receiver.
        with self._work[to].meter.counting():
            super()._hand_over(me, to, message)


def _size(message: Message) -> int:
    _, meta = encode(message)
    return HEADER_BYTES + len(meta) + (0 if message.body is None else message.body.nbytes)
