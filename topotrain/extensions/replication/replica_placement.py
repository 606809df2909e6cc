"""Placement of the two copies of every server on processes (`cluster.replicas`).

This module is pure. A slot is a position for one server process. After a death another process fills the slot. The
primary of server i starts in slot i, its standby in the next slot, or in the next slot on another host if the copies
must survive the loss of a host.

- Copies move only when a process has died. The standby becomes the primary, and the new process in the slot becomes the
  standby of every server without one.
- So the standby of a server is never in an older process than the primary, and the copies stay as far apart as they
  were.
- When a host is lost, all its slots are lost before the first is filled, so no copy moves from one dead process to
  another.
- A slot may be filled on another host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from topotrain.config.topology import Topology


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """The copies of one server.

    `primary` and `standby` are the slots of its copies (-1: no standby). `moves` counts moves of the primary,
    `standbys` the standbys so far.
    """

    primary: int
    standby: int
    moves: int = 0
    standbys: int = 0


class ReplicaPlacement:
    """The copies of all servers of a job.

    Args:
        domains: the failure domain of each slot. The copies of a server never share one.

    Raises:
        ValueError: there is only one domain.
    """

    def __init__(self, domains: Sequence[int]) -> None:
        if len(set(domains)) < 2:
            raise ValueError("two copies need two failure domains")
        self._domains = list(domains)
        self.servers = {index: ReplicaSet(index, self._next(index)) for index in range(len(domains))}
        self._covered: set[int] = set()

    def _next(self, slot: int) -> int:
        count = len(self._domains)
        others = ((slot + further) % count for further in range(1, count))
        return next(other for other in others if self._apart(slot, other))

    def _apart(self, one: int, other: int) -> bool:
        return self._domains[one] != self._domains[other]

    def covered(self, server: int, standby: int) -> None:
        """Note that the standby of a server with this number has its whole state."""
        # The report may be about a standby that was replaced since.
        if self.servers[server].standbys == standby:
            self._covered.add(server)

    def uncovered(self, server: int, standby: int) -> None:
        """Note that the standby of a server with this number cannot replace the primary."""
        if self.servers[server].standbys == standby:
            self._covered.discard(server)

    def standbys_of(self, slot: int) -> set[int]:
        """Return the slots of the standbys of all primaries in this slot."""
        return {where.standby for where in self.servers.values() if where.primary == slot and where.standby >= 0}

    def lost(self, slot: int) -> bool:
        """Handle the death of a slot's process.

        Returns False if the last copy of a server died with it.
        """
        # All servers are checked before any copy is moved.
        for server, where in self.servers.items():
            if where.primary == slot and not (where.standby >= 0 and where.standby != slot and server in self._covered):
                return False
        for server, where in self.servers.items():
            if where.primary == slot:
                # `moves` numbers the addresses under which peers look for the primary.
                self.servers[server] = ReplicaSet(where.standby, -1, where.moves + 1, where.standbys)
                self._covered.discard(server)
            elif where.standby == slot:
                self.servers[server] = replace(where, standby=-1)
                self._covered.discard(server)
        return True

    def missing(self, domain: int) -> int:
        """Count servers without a standby that could have one in this failure domain."""
        return sum(w.standby < 0 and self._domains[w.primary] != domain for w in self.servers.values())

    def filled(self, slot: int, domain: int | None = None) -> None:
        """Fill a slot with a new process, which gets the missing standbys.

        `domain` is its failure domain, if that has changed.
        """
        if domain is not None:
            self._domains[slot] = domain
        for server, where in self.servers.items():
            if where.standby < 0 and self._apart(where.primary, slot):
                # A new number: reports about an earlier standby do not count for this one.
                self.servers[server] = replace(where, standby=slot, standbys=where.standbys + 1)

    def primaries(self) -> set[int]:
        """Return the slots with a primary."""
        return {where.primary for where in self.servers.values()}

    def to_data(self) -> list[list[int]]:
        """Return the JSON form of the placement."""
        return [[w.primary, w.standby, w.moves, w.standbys] for _, w in sorted(self.servers.items())]


def parse_placement(data: Any) -> Mapping[int, ReplicaSet]:
    """Read the form of `ReplicaPlacement.to_data`."""
    return {index: ReplicaSet(*map(int, row)) for index, row in enumerate(data)}


def domains(topology: Topology) -> tuple[int, ...]:
    """Return each slot's failure domain: its host, or the slot if all share a host."""
    servers = topology.servers(0)
    return tuple(map(topology.host_of, servers)) if _by_host(topology) else tuple(range(len(servers)))


def domain_in(topology: Topology, slot: int, rank: int) -> int:
    """Return the failure domain of a slot with a process in unit `rank`."""
    return topology.hosts[rank] if _by_host(topology) and topology.hosts else slot


def _by_host(topology: Topology) -> bool:
    return len(set(map(topology.host_of, topology.servers(0)))) > 1
