"""The messages that processes and hosts send and get in a mean step.

They are added up for each process and each host, without a list of all pairs.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from topotrain.config.topology import Address, Role, Topology
from topotrain.tools.prediction.flow.flow_frames import NOTHING, Parcel
from topotrain.tools.prediction.flow.flow_routes import Flow, ProcessSet, Route, TreeFlow

Numbers = npt.NDArray[np.int64]
Amounts = npt.NDArray[np.float64]


class Places:
    """The number of each process, and of the host that it is on.

    Workers come first, group after group.
    """

    def __init__(self, topology: Topology) -> None:
        self._per_group, self._shards = topology.workers_per_group, topology.shards
        self.workers = topology.worker_groups * topology.workers_per_group
        self.servers = topology.server_groups * topology.shards
        addresses = [w for g in range(topology.worker_groups) for w in topology.workers(g)]
        addresses += [s for g in range(topology.server_groups) for s in topology.servers(g)]
        self.addresses: Sequence[Address] = addresses
        self.process: Sequence[tuple[int, int]] = list(_processes(topology, addresses))
        """By number: what is the same for the workers and servers of one process."""
        hosts = [topology.host_of(address) for address in addresses]
        numbers = {host: number for number, host in enumerate(sorted(set(hosts)))}
        self.host: Numbers = np.array([numbers[host] for host in hosts], dtype=np.int64)
        """By number of the process. Hosts are numbered without gaps."""
        self.hosts = len(numbers)
        self._known: dict[int, tuple[ProcessSet, Members]] = {}

    @property
    def count(self) -> int:
        """The number of workers and servers."""
        return self.workers + self.servers

    def together(self, sender: Address, receiver: Address) -> bool:
        """Whether two of them are in one process, so that nothing travels."""
        return self.process[self.number(sender)] == self.process[self.number(receiver)]

    def far(self, sender: Address, receiver: Address) -> bool:
        """Whether two of them are on different hosts."""
        return bool(self.host[self.number(sender)] != self.host[self.number(receiver)])

    def number(self, address: Address) -> int:
        """The number of a process."""
        if address.role is Role.WORKER:
            return address.group * self._per_group + address.index
        return self.workers + address.group * self._shards + address.index

    def members(self, these: ProcessSet) -> "Members":
        """The members of a set."""
        if len(these) == 1:
            return self._members(these)
        # By identity: a set of thousands takes part in thousands of flows, and is not compared with others.
        known = self._known.get(id(these))
        if known is None or known[0] is not these:
            # The set is kept with its number, so that no other one gets that.
            known = self._known[id(these)] = these, self._members(these)
        return known[1]

    def _members(self, these: ProcessSet) -> "Members":
        numbers = np.fromiter(map(self.number, these.members()), dtype=np.int64, count=len(these))
        by_host: dict[int, list[int]] = {}
        for number, host in zip(numbers.tolist(), self.host[numbers].tolist(), strict=True):
            by_host.setdefault(host, []).append(number)
        return Members(numbers, by_host)


def _processes(topology: Topology, addresses: Sequence[Address]) -> Iterator[tuple[int, int]]:
    inline = topology.inline  # which looks at all of them
    for address in addresses:
        if address.role is Role.WORKER or inline:
            yield -1 - address.group, address.index
        else:
            # A server process has all servers of its unit. Where workers run their servers themselves, it has none.
            yield topology.unit_of(address), 0


@dataclass(frozen=True)
class Members:
    """The numbers of the members of a set, and the same by host."""

    numbers: Numbers
    by_host: Mapping[int, Sequence[int]]

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass
class Load:
    """Amounts of all processes, by their number.

    Attributes:
        messages, nbytes, payload: as in `Parcel`.
    """

    messages: Amounts
    nbytes: Amounts
    payload: Amounts

    @classmethod
    def of(cls, count: int) -> "Load":
        """Nothing, for so many processes."""
        return cls(np.zeros(count), np.zeros(count), np.zeros(count))

    def __post_init__(self) -> None:
        self._of_sets: dict[int, tuple[Members, Parcel]] = {}

    def add(self, which: Numbers | int, parcel: Parcel, times: float | Amounts = 1.0) -> None:
        """Add a parcel to these processes, each of which is named once."""
        self.messages[which] += parcel.messages * times
        self.nbytes[which] += parcel.nbytes * times
        self.payload[which] += parcel.payload * times

    def add_to_all(self, members: "Members", parcel: Parcel) -> None:
        """Add a parcel to each member of a set; `settle` must follow."""
        if len(members) == 1:
            self.add(int(members.numbers[0]), parcel)
            return
        # Summed up for the set first: one set of thousands gets thousands of parcels.
        _, before = self._of_sets.get(id(members), (members, NOTHING))
        self._of_sets[id(members)] = members, before + parcel

    def settle(self) -> None:
        """Add what the members of sets have got."""
        for members, parcel in self._of_sets.values():
            self.add(members.numbers, parcel)
        self._of_sets.clear()

    def less(self, other: "Load") -> "Load":
        """Return what is left without another load."""
        return Load(self.messages - other.messages, self.nbytes - other.nbytes, self.payload - other.payload)


@dataclass
class Loads:
    """The messages that the processes of a job send and get in a mean step.

    Attributes:
        places: the processes.
        sent, received: all messages.
        sent_near, received_near: those of them that stay on the host.
    """

    places: Places
    sent: Load = field(init=False)
    received: Load = field(init=False)
    sent_near: Load = field(init=False)
    received_near: Load = field(init=False)

    def __post_init__(self) -> None:
        count = self.places.count
        self.sent, self.received = Load.of(count), Load.of(count)
        self.sent_near, self.received_near = Load.of(count), Load.of(count)

    def take(self, routes: Sequence[Route]) -> "Loads":
        """Add all that is sent on these routes."""
        for route in routes:
            if isinstance(route, Flow):
                self._take_flow(route)
            else:
                self._take_tree(route)
        self.sent.settle()
        self.received.settle()
        return self

    def _take_flow(self, flow: Flow) -> None:
        if not flow.parcel.nbytes:
            return
        senders, receivers = self.places.members(flow.senders), self.places.members(flow.receivers)
        self.sent.add_to_all(senders, flow.parcel.times(len(receivers)))
        self.received.add_to_all(receivers, flow.parcel.times(len(senders)))
        # Few hosts have both, as a rule, so the smaller side is gone through.
        for host in min(senders.by_host, receivers.by_host, key=len):
            if host not in senders.by_host or host not in receivers.by_host:
                continue
            here, there = senders.by_host[host], receivers.by_host[host]
            self.sent_near.add(np.array(here), flow.parcel, len(there))
            self.received_near.add(np.array(there), flow.parcel, len(here))
            # Inside a process nothing travels.
            processes = Counter(self.places.process[number] for number in there)
            back = Counter(self.places.process[number] for number in here)
            for load, near, numbers, others in (
                (self.sent, self.sent_near, here, processes),
                (self.received, self.received_near, there, back),
            ):
                for number in numbers:
                    inside = others[self.places.process[number]]
                    if inside:
                        load.add(number, flow.parcel, -inside)
                        near.add(number, flow.parcel, -inside)

    def _take_tree(self, tree: TreeFlow) -> None:
        first = self.places.workers
        host, size = self.places.host[first : first + tree.size], tree.size
        for senders, receivers, parcel in tree.edges():
            # Several servers of a unit, in one process, are no layout of a collective.
            near = host[senders] == host[receivers]
            for ranks, whole, close in (
                (senders, self.sent, self.sent_near),
                (receivers, self.received, self.received_near),
            ):
                counts = np.bincount(ranks, minlength=size).astype(np.float64)
                whole.add(np.arange(first, first + size), parcel, counts)
                if near.any():
                    counts = np.bincount(ranks[near], minlength=size).astype(np.float64)
                    close.add(np.arange(first, first + size), parcel, counts)

    def of_hosts(self, far: Load) -> Amounts:
        """Bytes over the link of each host. far: messages that leave it, or come to it."""
        return np.bincount(self.places.host, weights=far.nbytes, minlength=self.places.hosts).astype(np.float64)

    @property
    def sent_far(self) -> Load:
        """The messages that the processes send to other hosts."""
        return self.sent.less(self.sent_near)

    @property
    def received_far(self) -> Load:
        """The messages that the processes get from other hosts."""
        return self.received.less(self.received_near)
