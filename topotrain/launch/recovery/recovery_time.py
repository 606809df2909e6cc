"""How long it took until a job trained again after an incident, and how long the others were held up by it.

Rule: a loss is over with the next step of those who lost somebody; who else trains is to notice nothing of it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from topotrain.core.events import Recovered


@dataclass(slots=True)
class _Wait:
    """An incident after which nobody of `group` has stepped yet; None: nobody of the job."""

    number: int
    group: int | None
    since: float
    gap: float = 0.0


class RecoveryTimes:
    """Of a job, over all its lives.

    Args:
        group_of: worker -> its group.
        near: the workers of whom every step is told; None: all. Of the others only while somebody waits.
    """

    def __init__(self, group_of: Mapping[str, int], near: frozenset[str] | None) -> None:
        self._group_of, self._near = group_of, near
        self._waits: list[_Wait] = []
        self._stepped: dict[str, float] = {}

    def __bool__(self) -> bool:
        """Whether somebody has not made a step since an incident."""
        return bool(self._waits)

    def for_group(self, group: int) -> bool:
        """Whether an incident is over only when this group steps."""
        return any(wait.group == group for wait in self._waits)

    def begin(self, number: int, group: int | None, now: float) -> None:
        """With this incident somebody is waited for; None: whoever of the job comes first."""
        self._waits.append(_Wait(number, group, now))
        for who in self._stepped.keys() - (self._near or self._group_of.keys()):
            del self._stepped[who]  # an old word, since not all of them are told here

    def drop(self, group: int) -> None:
        """The group is not waited for any more."""
        self._waits = [wait for wait in self._waits if wait.group != group]

    def widen(self) -> None:
        """The whole job starts again: all incidents are over with its first step."""
        for wait in self._waits:
            wait.group = None

    def take_over(self, former: "RecoveryTimes") -> None:
        """Whoever was waited for in another layout of the job is waited for here."""
        self._waits = former._waits

    def renewed(self) -> None:
        """No process is left of those that stepped."""
        self._stepped.clear()

    def forget(self, members: Iterable[str]) -> None:
        """Other processes take the places of these workers."""
        for who in members:
            self._stepped.pop(who, None)

    def step(self, who: str, finished: Collection[str], now: float) -> list[Recovered]:
        """A worker has made a step; what is over with that."""
        group, last = self._group_of[who], self._stepped.get(who, now)
        self._stepped[who] = now
        over = [wait for wait in self._waits if wait.group in (None, group)]
        self._waits = [wait for wait in self._waits if wait not in over]
        for wait in self._waits:
            wait.gap = max(wait.gap, now - last)
        return [Recovered(wait.number, now - wait.since, self._gap(wait, finished, now)) for wait in over]

    def _gap(self, wait: _Wait, finished: Collection[str], now: float) -> float:
        """The longest time that a worker of another group was silent while this was waited for."""
        if wait.group is None:
            return 0.0
        others = [w for w, group in self._group_of.items() if group != wait.group and w not in finished]
        return max([wait.gap, *(now - self._stepped[who] for who in others if who in self._stepped)])
