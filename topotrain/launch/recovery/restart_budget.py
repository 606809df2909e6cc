"""The restart budget: a limited number of restarts within ten minutes.

A fault that keeps returning is a fault of the job, and a restart does not fix it. The error names the causes of the
earlier restarts. This module is pure.
"""

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 600.0
"""The number of seconds over which restarts are counted."""


@dataclass(slots=True)
class RestartBudget:
    """Counts restarts by a key for each thing that restarts.

    limit: the number of restarts of each key within WINDOW_S. began: the start time of the job.
    """

    limit: int
    began: float
    _times: dict[int, deque[tuple[float, str]]] = field(default_factory=dict)

    def allows(self, key: int, now: float) -> bool:
        """Return whether one more restart is within the limit."""
        times = self._times.setdefault(key, deque())
        while times and now - times[0][0] >= WINDOW_S:
            times.popleft()
        return len(times) < self.limit

    def count(self, key: int, what: str, now: float) -> None:
        """Count a restart, and record its cause."""
        self._times[key].append((now, f"at {now - self.began:.1f} s {what}"))

    def before(self, key: int) -> str:
        """Describe how often it has restarted, and why each time; "" where it never has."""
        times = self._times[key]
        often = "once" if len(times) == 1 else f"{len(times)} times"
        reasons = "; ".join(text for _, text in times)
        return f"{often} within {WINDOW_S / 60:g} minutes, as `restarts` allows: {reasons}" if times else ""
