"""In which unit each process of a job lives: where the layout puts it, until a server's seat is filled elsewhere.

Rule: pure. A seat whose unit is gone is filled in a unit that lives, where a second copy would be far enough from the
first; if there is none, it stays empty, and those servers go on with one copy.
"""

from collections.abc import Collection

from topotrain.config.topology import Topology
from topotrain.extensions.replication.replica_placement import ReplicaPlacement, domain_in


class UnitMap:
    """See above.

    Args:
        topology: of the whole job.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._unit_of = {str(who): unit.rank for unit in topology.units for who in (*unit.workers, *unit.servers)}

    def of(self, who: str) -> int:
        """The unit of a resident."""
        return self._unit_of[who]

    def who(self, rank: int) -> set[str]:
        """The residents of a unit."""
        return {who for who, unit in self._unit_of.items() if unit == rank}

    def domain(self, seat: int, rank: int) -> int:
        """The failure domain of a seat whose process lives in that unit."""
        return domain_in(self._topology, seat, rank)

    def refuge(self, who: str, seat: int, seats: ReplicaPlacement, gone: Collection[int]) -> int:
        """The unit for a fresh process in an empty seat, with these units gone; -1: there is none. who: its name.

        Its own, if that lives. Else the one in which it is of use to most servers, then the one with the fewest.
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
        """A process with this name lives there from now on."""
        self._unit_of[who] = rank
