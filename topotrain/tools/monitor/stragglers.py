"""Stragglers: workers that are slow compared to the others."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from topotrain.config.topology import Topology

FACTOR = 1.5
LEAST_S = 0.02
"""A straggler takes at least this many seconds more than the others. Less may be the system's scheduling."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A straggler, with its median seconds for a step, and that of the others."""

    who: str
    own_s: float
    others_s: float

    @property
    def factor(self) -> float:
        return self.own_s / self.others_s

    def words(self) -> str:
        times = f"{self.own_s:.3g} s of its own for a step, {self.factor:.1f} times the median of the others"
        return f"{self.who} is slow: it takes {times} ({self.others_s:.3g} s)"

    def as_data(self) -> dict[str, Any]:
        return {"who": self.who, "own_s": self.own_s, "group_s": self.others_s, "factor": self.factor}


def stragglers(topology: Topology, own: Mapping[str, float]) -> list[Straggler]:
    """Return the slow workers; own: seconds for a step, by worker.

    They take more than FACTOR times the median of the others, and LEAST_S more. The others are those of the worker's
    group; of a group of one worker, those of the other groups.
    """
    found = []
    for members in _compared(topology):
        # Of their own time without waits: in a group that steps together, all whole steps are as long as the slowest.
        known = {who: own[who] for who in members if who in own}
        for who, own_s in known.items():
            # With its own time among them, the median of two workers would follow the slow one.
            others = [seconds for other, seconds in known.items() if other != who]
            middle = median_low(others) if others else 0.0
            if middle > 0 and own_s > max(FACTOR * middle, middle + LEAST_S):
                found.append(Straggler(who, own_s, middle))
    return found


def _compared(topology: Topology) -> Iterator[list[str]]:
    groups = [list(map(str, topology.workers(group))) for group in range(topology.worker_groups)]
    yield from groups if topology.workers_per_group > 1 else [[who for group in groups for who in group]]
