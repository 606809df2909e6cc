"""Who holds up its group: judged by the time that a worker itself takes for a step, and not by how long all wait."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from topotrain.config.topology import Topology

FACTOR = 1.5
LEAST_S = 0.02
"""A slow worker takes at least so many seconds more than its group's median: less is the system's scheduling."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A worker, the median of its own seconds for a step, and that of its group's workers."""

    who: str
    own_s: float
    group_s: float

    @property
    def factor(self) -> float:
        """How many times as long it takes."""
        return self.own_s / self.group_s

    def words(self) -> str:
        """One line."""
        times = f"{self.own_s:.3g} s of its own for a step, {self.factor:.1f} times the median of its group"
        return f"{self.who} is slow: it takes {times} ({self.group_s:.3g} s)"

    def as_data(self) -> dict[str, Any]:
        """For the report."""
        return {"who": self.who, "own_s": self.own_s, "group_s": self.group_s, "factor": self.factor}


def stragglers(topology: Topology, own: Mapping[str, float]) -> list[Straggler]:
    """The workers that take more than FACTOR times the median of their group, and LEAST_S more; `own`: seconds."""
    found = []
    for group in range(topology.worker_groups):
        members = {who: own[who] for who in map(str, topology.workers(group)) if who in own}
        middle = median(members.values()) if members else 0.0
        bound = max(FACTOR * middle, middle + LEAST_S)
        found += [Straggler(who, s, middle) for who, s in members.items() if middle > 0 and s > bound]
    return found
