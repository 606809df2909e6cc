"""Series of points, states and stories in bounded memory.

Each entry has a number, by which later ones are found.
"""

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MOST_POINTS, FEWEST_POINTS = 2048, 32
ALL_POINTS = 200_000
"""Points of all series of a history together."""
MOST_SERIES = 20_000
MOST_STATES = 1000
MOST_STORIES = 1000
_PASSING = frozenset({"computes", "waits", "applies"})
_MINOR = frozenset({"notice", "skipped", "evaluation", "snapshot"})


class Moment(NamedTuple):
    """The number of an event in the history, and its time in seconds."""

    number: int
    at: float


class SeriesPoint(NamedTuple):
    """A value; None for a number that is not finite. number: of its event."""

    number: int
    at: float
    step: int
    value: float | None


@dataclass(slots=True)
class ThinnedSeries:
    """The points of one metric: the newest ones, and of the older ones each n-th."""

    _whole: list[SeriesPoint] = field(default_factory=list)
    _recent: deque[SeriesPoint] = field(default_factory=deque)
    _stride: int = 1
    _passed: int = 0  # points that have left the recent ones

    def add(self, point: SeriesPoint, limit: int) -> None:
        """Add a point; `at` never decreases. limit: the number of points to keep."""
        self._recent.append(point)
        while len(self._recent) > max(1, limit // 2):
            old = self._recent.popleft()
            if self._passed % self._stride == 0:
                self._whole.append(old)
            self._passed += 1
        while len(self._whole) > max(1, limit // 2):
            # Each second one, by its place in all points: what is kept is the same in whatever steps it was thinned.
            self._whole = self._whole[::2]
            self._stride *= 2

    def since(self, number: int) -> list[SeriesPoint]:
        """Return the points with higher numbers, in order."""
        if not self._recent or self._recent[-1].number <= number:
            return []  # so it is for most of thousands of series
        if self._recent[0].number > number:
            at = bisect_right(self._whole, number, key=lambda point: point.number)
            return [*self._whole[at:], *self._recent]
        new = []
        # From the end: of hundreds of points one or two are new.
        for point in reversed(self._recent):
            if point.number <= number:
                break
            new.append(point)
        new.reverse()
        return new


class SeriesTable:
    """All series of a history, by process or group and by metric."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], ThinnedSeries] = {}
        self._limit = MOST_POINTS
        """The number of points of each series."""

    def add(self, now: Moment, of: str, metric: str, value: float, step: int) -> None:
        """Add a point, unless there are too many series."""
        series = self._series.get((of, metric))
        if series is None:
            if len(self._series) >= MOST_SERIES:
                return
            series = self._series[of, metric] = ThinnedSeries()
            self._limit = min(MOST_POINTS, max(FEWEST_POINTS, ALL_POINTS // len(self._series)))
        series.add(SeriesPoint(now.number, now.at, step, value if math.isfinite(value) else None), self._limit)

    def as_data(self, cursor: int, whole: bool) -> list[dict[str, Any]]:
        """Return the series as in the view, with the points behind a cursor.

        whole: also the series without such points.
        """
        found = []
        for (of, metric), series in self._series.items():
            points = [[round(point.at, 3), point.step, point.value] for point in series.since(cursor)]
            if whole or points:
                found.append({"id": f"{of}:{metric}", "metric": metric, "of": of, "points": points})
        return found


@dataclass(slots=True)
class StateTrack:
    _entries: list[tuple[int, float, str]] = field(default_factory=list)

    @property
    def now(self) -> str:
        """The present state; "": none yet."""
        return self._entries[-1][2] if self._entries else ""

    def enter(self, now: Moment, state: str) -> bool:
        """Enter a state, unless it is the present one; return whether it is new."""
        if state == self.now:
            return False
        self._entries.append((*now, state))
        if len(self._entries) > MOST_STATES:
            half = MOST_STATES // 2
            # Of the older entries only those stay that tell more than that a process works or waits.
            old = [
                entry
                for before, entry in zip([None, *self._entries[: half - 1]], self._entries[:half], strict=True)
                if before is None or not {before[2], entry[2]} <= _PASSING
            ]
            self._entries = [*old[-half:], *self._entries[half:]]
        return True

    def since(self, number: int) -> list[list[Any]]:
        """Return the entries with higher numbers as in the view."""
        new = bisect_right(self._entries, number, key=lambda entry: entry[0])
        return [[round(at, 3), state] for _, at, state in self._entries[new:]]


@dataclass(slots=True)
class StoryTrack:
    """The moments of a job in words; of too many, older ones of little matter go first."""

    _entries: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Each with its number, and as in the view. of: the name of a process, or "job"."""

    def add(self, now: Moment, kind: str, of: str, text: str) -> None:
        self._entries.append((now.number, {"at": round(now.at, 3), "kind": kind, "of": of, "text": text}))
        if len(self._entries) > MOST_STORIES:
            old = self._entries[: MOST_STORIES // 2]
            minor = next((at for at, (_, entry) in enumerate(old) if entry["kind"] in _MINOR), 1)
            del self._entries[minor]

    def since(self, number: int) -> list[dict[str, Any]]:
        """Return the moments with higher numbers as in the view."""
        return [entry for at, entry in self._entries if at > number]
