"""The wishes of a user for an advice, and the time that its search may take."""

import time
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Wishes:
    """The wishes of a user for an advice, and how long its search may take.

    Attributes:
        sync: only layouts with the updates of one process.
        most: candidates that are rehearsed at most.
        within_s: seconds after which no further candidate is rehearsed.
    """

    sync: bool = False
    most: int = 40
    within_s: float = 60.0


class SearchClock(Protocol):
    """The time of a search."""

    def now(self) -> float:
        """Return seconds since any moment."""
        ...


class MonotonicClock:
    """The clock of this machine."""

    def now(self) -> float:
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class SearchTime:
    """The time of a search, from its start to its end.

    Attributes:
        clock: of the search.
        within_s: seconds that the whole search may take.
        began: when it began, by the clock.
    """

    clock: SearchClock
    within_s: float
    began: float

    def is_over(self, share: float = 1.0) -> bool:
        """Whether this share of the time is over."""
        return self.clock.now() - self.began >= self.within_s * share


def search_time(within_s: float, clock: SearchClock | None = None) -> SearchTime:
    """Return the time of a search that begins now."""
    used = clock or MonotonicClock()
    return SearchTime(used, within_s, used.now())
