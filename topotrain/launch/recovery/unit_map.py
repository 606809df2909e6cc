"""The unit of each process of a job.

It is the unit of the layout, until a server is replaced in another unit. A server of a lost unit is replaced in a
running unit, in which a backup replica would be in another failure domain than the primary. Without such a unit it is
not replaced, and its servers continue with one replica. This module is pure.
"""

from collections.abc import Collection

from topotrain.config.topology import Topology
from topotrain.extensions.replication.replica_placement import ReplicaPlacement, domain_in


class UnitMap:
    """Maps processes to units.

    Args:
        topology: the layout of the whole job.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._unit_of = {str(who): unit.rank for unit in topology.units for who in (*unit.workers, *unit.servers)}

    def of(self, who: str) -> int:
        """Return the unit of a resident."""
        return self._unit_of[who]

    def who(self, rank: int) -> set[str]:
        """Return the residents of a unit."""
        return {who for who, unit in self._unit_of.items() if unit == rank}

    def domain(self, seat: int, rank: int) -> int:
        """Return the failure domain of a replica slot with its process in that unit."""
        return domain_in(self._topology, seat, rank)

    def refuge(self, who: str, seat: int, seats: ReplicaPlacement, gone: Collection[int]) -> int:
        """Return the unit for a replacement of a server process; -1: there is none.

        It is the process's own unit if that still runs. Otherwise it is the one in which the process would be a useful
        replica for most servers, and of those the one with the fewest servers.

        Args:
            who: the name of the process.
            seat: the process's replica slot.
            seats: the present placement.
            gone: the lost units.
        """
        if self._unit_of[who] not in gone:
            return self._unit_of[who]

        def worth(rank: int) -> tuple[int, int, int]:
            servers = sum(name.startswith("server") for name in self.who(rank))
            return seats.wanting(self.domain(seat, rank)), -servers, -rank

        living = [unit.rank for unit in self._topology.units if unit.rank not in gone]
        best = max(living, key=worth, default=-1)
        return best if best >= 0 and worth(best)[0] else -1

    def move(self, who: str, rank: int) -> None:
        """Record that the process of this name runs in that unit."""
        self._unit_of[who] = rank
