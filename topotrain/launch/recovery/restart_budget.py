"""How often something may start again: so many times within ten minutes, and then it is named what came before.

Rule: pure; a fault that comes back at once is one of the job, and starting again does not mend it.
"""

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 600.0
"""Restarts are counted over so long a time."""


@dataclass(slots=True)
class RestartBudget:
    """Counts restarts by whatever starts again. limit: so many of each within WINDOW_S; began: the job's start."""

    limit: int
    began: float
    _times: dict[int, deque[tuple[float, str]]] = field(default_factory=dict)

    def allows(self, key: int, now: float) -> bool:
        """One more is within the limit."""
        times = self._times.setdefault(key, deque())
        while times and now - times[0][0] >= WINDOW_S:
            times.popleft()
        return len(times) < self.limit

    def count(self, key: int, what: str, now: float) -> None:
        """It starts again because of this."""
        self._times[key].append((now, f"at {now - self.began:.1f} s {what}"))

    def before(self, key: int) -> str:
        """How often it has started again, and why each time; "" where it never has."""
        times = self._times[key]
        often = "once" if len(times) == 1 else f"{len(times)} times"
        reasons = "; ".join(text for _, text in times)
        return f"{often} within {WINDOW_S / 60:g} minutes, as `restarts` allows: {reasons}" if times else ""
