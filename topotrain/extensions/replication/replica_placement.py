"""Which process holds which copy of which server, when every server has two (`cluster.replicas`).

Rule: pure. A seat is a place for one server process; the process in it may be another after a death. Server i begins in
seat i, its second copy in the next seat, or the next one on another host where a host's loss must not take both. Copies
move only where a process has died: the second copy speaks from then on, and the fresh process in the dead one's seat
follows whoever has no second copy. So of the two copies of a server the one that listens is never in an older process
than the one that speaks, and they stay as far apart as they were. Where a host is lost its seats are all lost before
the first is filled: nothing may be handed from one dead process to another. A seat may be filled on another host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from topotrain.config.job import Compression, ConfigError, FailureDomain, Job, OnFailure, Road
from topotrain.config.topology import Topology


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """One server: the seats of its copies (shadow -1: there is none), how often the speaking one has moved, and how
    many listening ones there have been."""

    lead: int
    shadow: int
    moves: int = 0
    shadows: int = 0


class ReplicaPlacement:
    """All servers of a job.

    Args:
        domains: the failure domain of each seat; the copies of a server never share one.

    Raises:
        ValueError: there is one domain only.
    """

    def __init__(self, domains: Sequence[int]) -> None:
        if len(set(domains)) < 2:
            raise ValueError("two copies need two failure domains")
        self._domains = list(domains)
        self.standing = {index: ReplicaSet(index, self._next(index)) for index in range(len(domains))}
        self._covered: set[int] = set()

    def _next(self, seat: int) -> int:
        count = len(self._domains)
        others = ((seat + further) % count for further in range(1, count))
        return next(other for other in others if self._apart(seat, other))

    def _apart(self, one: int, other: int) -> bool:
        return self._domains[one] != self._domains[other]

    def covered(self, server: int, shadows: int) -> None:
        """A server's so-manieth second copy has everything from now on."""
        if self.standing[server].shadows == shadows:
            self._covered.add(server)

    def uncovered(self, server: int, shadows: int) -> None:
        """That one is of no use."""
        if self.standing[server].shadows == shadows:
            self._covered.discard(server)

    def heirs(self, seat: int) -> set[int]:
        """The seats of the second copies of what speaks in this one."""
        return {where.shadow for where in self.standing.values() if where.lead == seat and where.shadow >= 0}

    def lost(self, seat: int) -> bool:
        """The process of a seat has died. False: with it the last copy of some server."""
        for server, where in self.standing.items():
            if where.lead == seat and not (where.shadow >= 0 and where.shadow != seat and server in self._covered):
                return False
        for server, where in self.standing.items():
            if where.lead == seat:
                self.standing[server] = ReplicaSet(where.shadow, -1, where.moves + 1, where.shadows)
                self._covered.discard(server)
            elif where.shadow == seat:
                self.standing[server] = replace(where, shadow=-1)
                self._covered.discard(server)
        return True

    def wanting(self, domain: int) -> int:
        """How many servers have no second copy and could have one in a process that stands there."""
        return sum(w.shadow < 0 and self._domains[w.lead] != domain for w in self.standing.values())

    def filled(self, seat: int, domain: int | None = None) -> None:
        """A fresh process takes a seat: it follows whoever has no second copy. domain: where it stands."""
        if domain is not None:
            self._domains[seat] = domain
        for server, where in self.standing.items():
            if where.shadow < 0 and self._apart(where.lead, seat):
                self.standing[server] = replace(where, shadow=seat, shadows=where.shadows + 1)

    def leads(self) -> set[int]:
        """The seats in which some server speaks."""
        return {where.lead for where in self.standing.values()}

    def to_data(self) -> list[list[int]]:
        """As JSON has it."""
        return [[w.lead, w.shadow, w.moves, w.shadows] for _, w in sorted(self.standing.items())]


def standings(data: Any) -> Mapping[int, ReplicaSet]:
    """The inverse of `ReplicaPlacement.to_data`."""
    return {index: ReplicaSet(*map(int, row)) for index, row in enumerate(data)}


def domains(topology: Topology) -> tuple[int, ...]:
    """The failure domain of each seat: its host, or itself (`failure_domain`)."""
    servers = topology.servers(0)
    return tuple(map(topology.host_of, servers)) if _by_host(topology) else tuple(range(len(servers)))


def domain_in(topology: Topology, seat: int, rank: int) -> int:
    """The failure domain of a seat whose process stands in that unit."""
    return topology.hosts[rank] if _by_host(topology) and topology.hosts else seat


def _by_host(topology: Topology) -> bool:
    wanted = topology.cluster.failure_domain
    several = len(set(map(topology.host_of, topology.servers(0)))) > 1
    return wanted is FailureDomain.kHost or (wanted is FailureDomain.kAuto and several)


def check(job: Job, topology: Topology) -> None:
    """Raise ConfigError where second copies of the servers are asked for and cannot be kept."""
    cluster = job.cluster
    if cluster.replicas < 2:
        return
    for fits, accepted in (
        (job.on_failure is OnFailure.kContinue, "needs on_failure: kContinue, or a death ends the job"),
        (cluster.road is Road.kTcp, "needs road: kTcp: what lies in shared memory has no second copy"),
        (cluster.nserver_groups == 1, "needs nserver_groups: 1"),
        (topology.shards > 1, "needs nservers_per_group of at least 2: a server's second copy is in another's process"),
        (cluster.nservers_per_procs == 1, "needs nservers_per_procs: 1, so that each server has its own process"),
        (not topology.collective, "needs a job whose servers add up the gradients: algorithm kAuto, no engine"),
        (cluster.compression is Compression.kNone, "needs compression: kNone"),
        (cluster.link is None, "takes no link"),
        (cluster.backup == 0, "needs backup: 0"),
    ):
        if not fits:
            raise ConfigError("cluster.replicas", cluster.replicas, accepted)
    if len(set(domains(topology))) < 2:
        accepted = "needs servers on two hosts or more, here all stand on one; kProcess would do with two processes"
        raise ConfigError("cluster.failure_domain", cluster.failure_domain.value, accepted)
