"""Which batches of the data are in the values: from counts of applied units per stream to runs of the loader's batches.

Rule: pure. A stream counts units from 0, as the workers of this start of the job form them; a snapshot tells batches of
an epoch's full list, because another start may form other units. What an earlier start has applied is left out of the
list before units are formed, so both counts are brought together here.
"""

from collections.abc import Iterable, Mapping

from topotrain.core.server.component_state import State
from topotrain.core.server.consistency import STATIC as STATIC
from topotrain.training.data.batch_ranges import Runs, origin


class DataPosition:
    """The data of one start of a job, as its coordinator sees it.

    Args:
        groups: worker groups of the job.
        unit: the loader's batches that make a unit.
        before: what was applied before this start, by epoch.
        first: all epochs before this one are read to their end.
    """

    def __init__(self, groups: int, unit: int, before: Mapping[int, Runs], first: int = 0) -> None:
        self._groups, self._unit = groups, unit
        self._before = dict(before)
        self._first: dict[int, int] = {}
        self.closed = first
        """All epochs before this one are read to their end, and have no account."""

    def leased(self, epoch: int, lease: int, first: int) -> None:
        """A lease begins with this unit of its epoch."""
        if epoch >= self.closed:
            self._first[epoch << 32 | lease] = first

    def close(self, epoch: int) -> None:
        """All epochs before this one are read to their end, and need no account any more."""
        if epoch > self.closed:
            self.closed = epoch
            self._first = {stream: first for stream, first in self._first.items() if stream >> 32 >= epoch}
            self._before = {known: runs for known, runs in self._before.items() if known >= epoch}

    def applied(self, counts: Mapping[int, int]) -> dict[int, Runs]:
        """Batches by epoch that are in the values when so many units of each stream are."""
        units: dict[int, list[tuple[int, int]]] = {epoch: [] for epoch in self._before}
        static: dict[int, dict[int, int]] = {}
        for stream, count in counts.items():
            epoch = stream >> 32
            if epoch < self.closed or count <= 0:
                continue
            if stream & STATIC:
                static.setdefault(epoch, {})[stream & ~STATIC & 0xFFFF_FFFF] = count
            elif stream in self._first:
                first = self._first[stream]
                units.setdefault(epoch, []).append((first, first + count))
        for epoch, by_group in static.items():
            units.setdefault(epoch, []).extend(self._dealt(by_group))
        return {epoch: self._batches(epoch, runs) for epoch, runs in sorted(units.items())}

    def _dealt(self, counts: Mapping[int, int]) -> Iterable[tuple[int, int]]:
        """Units of groups that take every so-manieth one: what all have done is one run."""
        groups = self._groups
        least = min(counts.get(group, 0) for group in range(groups))
        yield 0, least * groups
        for group, count in counts.items():
            for turn in range(least, count):
                yield turn * groups + group, turn * groups + group + 1

    def _batches(self, epoch: int, units: Iterable[tuple[int, int]]) -> Runs:
        before = self._before.get(epoch, ())
        return origin(before, ((first * self._unit, last * self._unit) for first, last in units))

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
        return {"before": self._before, "first": self._first, "closed": self.closed}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self._before, self._first, self.closed = dict(state["before"]), dict(state["first"]), state["closed"]
