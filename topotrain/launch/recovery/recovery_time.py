"""Recovery times: seconds until a job trains again, and delays of other workers.

A loss is over with the next step of the affected workers. Other workers should not be delayed by it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from topotrain.core.events import Recovered


@dataclass(slots=True)
class _Wait:
    """An incident that ends with the next step of `group`; None: of any group."""

    number: int
    group: int | None
    since: float
    gap: float = 0.0


class RecoveryTimes:
    """The recovery times of a job, over all its attempts.

    Args:
        group_of: the group of each worker.
        near: the workers that report every step. None: all do. Others report steps only while a recovery is open.
    """

    def __init__(self, group_of: Mapping[str, int], near: frozenset[str] | None) -> None:
        self._group_of, self._near = group_of, near
        self._waits: list[_Wait] = []
        self._stepped: dict[str, float] = {}

    def __bool__(self) -> bool:
        """Return whether a recovery is open."""
        return bool(self._waits)

    def for_group(self, group: int) -> bool:
        """Return whether an open incident ends only with a step of this group."""
        return any(wait.group == group for wait in self._waits)

    def begin(self, number: int, group: int | None, now: float) -> None:
        """Open an incident that ends with a step of this group.

        None: it ends with the first step of any group.
        """
        self._waits.append(_Wait(number, group, now))
        for who in self._stepped.keys() - (self._near or self._group_of.keys()):
            del self._stepped[who]  # outdated, since not all steps of these workers are reported

    def drop(self, group: int) -> None:
        """Close the incidents that wait for this group."""
        self._waits = [wait for wait in self._waits if wait.group != group]

    def widen(self) -> None:
        """Let all open incidents end with the first step of the restarted job."""
        for wait in self._waits:
            wait.group = None

    def take_over(self, former: "RecoveryTimes") -> None:
        """Take over the open incidents of a former layout of the job."""
        self._waits = former._waits

    def renewed(self) -> None:
        """Forget the times of all steps, because all processes are new."""
        self._stepped.clear()

    def forget(self, members: Iterable[str]) -> None:
        """Forget the times of these workers' steps, because they are replaced."""
        for who in members:
            self._stepped.pop(who, None)

    def step(self, who: str, finished: Collection[str], now: float) -> list[Recovered]:
        """Record a step of a worker; return the recoveries that it completes."""
        group, last = self._group_of[who], self._stepped.get(who, now)
        self._stepped[who] = now
        over = [wait for wait in self._waits if wait.group in (None, group)]
        self._waits = [wait for wait in self._waits if wait not in over]
        for wait in self._waits:
            wait.gap = max(wait.gap, now - last)
        return [Recovered(wait.number, now - wait.since, self._gap(wait, finished, now)) for wait in over]

    def _gap(self, wait: _Wait, finished: Collection[str], now: float) -> float:
        """Return the longest pause between steps of other groups during the incident."""
        if wait.group is None:
            return 0.0
        others = [w for w, group in self._group_of.items() if group != wait.group and w not in finished]
        return max([wait.gap, *(now - self._stepped[who] for who in others if who in self._stepped)])
