"""Modules in the order they run, cut into one stretch per worker.

First, the fullest worker gets as little time and memory as possible. Then, of all cuts that are hardly worse, the cut
with the fewest crossing bytes is taken. Both are dynamic programming over the positions of the cuts (PipeDream,
Narayanan et al. 2019; GPipe's stages).
"""

from collections.abc import Sequence
from itertools import accumulate

from topotrain.parallel.auto_placement.cost_model import TaskGraph

SLACK = 1.05
"""Maximum load of the fullest worker, over the least possible one. More slack lets fewer bytes cross the cuts."""


class _Loads:
    """The load of a worker with a stretch of units that the user has not placed."""

    def __init__(self, work: TaskGraph, workers: int, limits: Sequence[int] | None) -> None:
        self.free = [number for number, unit in enumerate(work.units) if unit.fixed is None]
        seconds = [work.seconds(number) for number in range(len(work.units))]
        memory = [unit.memory for unit in work.units]
        # Prefix sums, because the search asks for the load of every stretch.
        self._seconds = [0.0, *accumulate(seconds[n] for n in self.free)]
        self._memory = [0, *accumulate(memory[n] for n in self.free)]
        self._fixed_seconds = [0.0] * workers
        self._fixed_memory = [work.everywhere] * workers
        for number, unit in enumerate(work.units):
            if unit.fixed is not None:
                self._fixed_seconds[unit.fixed] += seconds[number]
                self._fixed_memory[unit.fixed] += memory[number]
        self._of_time = sum(seconds) or 1.0
        self._of_memory = sum(memory) or 1
        self._limits = limits

    def __call__(self, worker: int, low: int, high: int) -> float:
        held = self._fixed_memory[worker] + self._memory[high] - self._memory[low]
        # Infinite, so that no minimum takes a stretch that does not fit.
        if self._limits is not None and held > self._limits[worker]:
            return float("inf")
        busy = self._fixed_seconds[worker] + self._seconds[high] - self._seconds[low]
        # Fractions of the whole: time and memory have no common unit.
        return busy / self._of_time + held / self._of_memory


def stages_of(work: TaskGraph, workers: int, limits: Sequence[int] | None) -> list[int] | None:
    """Return the worker of each unit, or None if no cut fits."""
    load = _Loads(work, workers, limits)
    count = len(load.free)
    # fullest[high]: the least load of the fullest of the workers so far, with the first `high` units on them.
    fullest = [load(0, 0, high) for high in range(count + 1)]
    for worker in range(1, workers):
        fullest = [
            min(max(fullest[low], load(worker, low, high)) for low in range(high + 1)) for high in range(count + 1)
        ]
    if fullest[count] == float("inf"):
        return None
    cuts = _cheapest(load, _crossing(work, load.free), workers, count, SLACK * fullest[count])
    places = [unit.fixed if unit.fixed is not None else 0 for unit in work.units]
    for worker, (low, high) in enumerate(zip([0, *cuts], [*cuts, count], strict=True)):
        for number in load.free[low:high]:
            places[number] = worker
    return places


def _cheapest(load: _Loads, crossing: Sequence[int], workers: int, count: int, most: float) -> list[int]:
    """Return the cuts with the fewest crossing bytes and no load above `most`."""
    nothing = (float("inf"), float("inf"))
    best = [(0.0, load(0, 0, high)) if load(0, 0, high) <= most else nothing for high in range(count + 1)]
    cuts: list[list[int]] = []
    for worker in range(1, workers):
        row, chosen = [], []
        for high in range(count + 1):
            options = []
            for low in range(high + 1):
                more = load(worker, low, high)
                if more <= most and best[low] != nothing:
                    fewer, full = best[low]
                    options.append(((fewer + (crossing[low] if low < count else 0), max(full, more)), low))
            # A tie goes to the more even cut, because the load comes second.
            cost, low = min(options, default=(nothing, 0))
            row.append(cost)
            chosen.append(low)
        best = row
        cuts.append(chosen)
    # Walk back from the last worker: each row knows where the stretch before it ends.
    found: list[int] = []
    high = count
    for chosen in reversed(cuts):
        high = chosen[high]
        found.insert(0, high)
    return found


def _crossing(work: TaskGraph, free: Sequence[int]) -> list[int]:
    """Return the bytes that cross each position between two free units."""
    position = {unit: at for at, unit in enumerate(free)}
    found = [0] * (len(free) + 1)
    reach: dict[int, tuple[int, int, int]] = {}
    for task in work.tasks:
        for source, size in task.reads:
            ends = work.tasks[source].unit, task.unit
            if ends[0] in position and ends[1] in position:
                # A result that several units read crosses each cut once, up to its last reader.
                low, high = sorted(position[unit] for unit in ends)
                known = reach.get(source, (low, high, size))
                reach[source] = (min(low, known[0]), max(high, known[1]), size)
    for low, high, size in reach.values():
        for at in range(low + 1, high + 1):
            found[at] += size
    return found
