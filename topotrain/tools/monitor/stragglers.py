"""Stragglers: workers that are slow compared to their group."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from topotrain.config.topology import Topology

FACTOR = 1.5
LEAST_S = 0.02
"""A straggler takes at least this many seconds more than its group's median. Less may be the system's scheduling."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A straggler, with its own median seconds for a step, and its group's median."""

    who: str
    own_s: float
    group_s: float

    @property
    def factor(self) -> float:
        """The ratio of its time to its group's."""
        return self.own_s / self.group_s

    def words(self) -> str:
        """Describe the straggler in one line."""
        times = f"{self.own_s:.3g} s of its own for a step, {self.factor:.1f} times the median of its group"
        return f"{self.who} is slow: it takes {times} ({self.group_s:.3g} s)"

    def as_data(self) -> dict[str, Any]:
        """Return the data for the report."""
        return {"who": self.who, "own_s": self.own_s, "group_s": self.group_s, "factor": self.factor}


def stragglers(topology: Topology, own: Mapping[str, float]) -> list[Straggler]:
    """Return the slow workers; own: seconds for a step, by worker.

    They take more than FACTOR times the median, and LEAST_S more.
    """
    found = []
    for group in range(topology.worker_groups):
        members = {who: own[who] for who in map(str, topology.workers(group)) if who in own}
        # Of their own time without waits: in a group that steps together, all whole steps are as long as the slowest.
        middle = median(members.values()) if members else 0.0
        bound = max(FACTOR * middle, middle + LEAST_S)
        found += [Straggler(who, s, middle) for who, s in members.items() if middle > 0 and s > bound]
    return found
