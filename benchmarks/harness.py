"""Figures that can be trusted a little: sides in turn, medians, and ratios within one run.

A figure is a ratio of medians of one run, with the smallest and the largest ratio of a round beside it. Every round has
its own order of the sides, because a side that always follows the same other one inherits its caches and its backlog.
Times of different runs are never compared: the machine drifts by up to two times within minutes.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median

from benchmarks.processor import Turn

ROUNDS = 5
"""The least number of rounds that a median is taken of."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with the lowest and the highest value that it had in a round."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> "Figure":
        """The same in another unit; `factor` > 0."""
        return Figure(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Samples:
    """What one side measured, one number per round, in the order of the rounds.

    `processor` are the processor seconds of the same turns, where they were measured.
    """

    values: tuple[float, ...]
    processor: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def figure(self) -> Figure:
        return Figure(self.median, min(self.values), max(self.values))

    def over(self, other: "Samples") -> Figure:
        """The ratio of medians; low and high are those of the rounds."""
        rounds = [mine / its for mine, its in zip(self.values, other.values, strict=True)]
        return Figure(self.median / other.median, min(rounds), max(rounds))


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table.

    A `figure` of None could not be measured, and the note says why. `processor_ms` is the processor time of a step in
    all processes of the side, and `megabytes` are those of its parameters in tables of earlier commits.
    """

    what: str
    figure: float | None
    unit: str
    low: float | None = None
    high: float | None = None
    note: str = ""
    mode: str = ""
    processor_ms: float | None = None
    megabytes: float | None = None

    def costing(self, samples: Samples) -> "Row":
        """The same with the processor time of a side's turns."""
        spent = median(samples.processor) * 1e3 if samples.processor else None
        return replace(self, processor_ms=spent)


def row(what: str, figure: Figure | float, unit: str, note: str = "", mode: str = "") -> Row:
    """A measured line."""
    if isinstance(figure, Figure):
        return Row(what, figure.value, unit, figure.low, figure.high, note, mode)
    return Row(what, figure, unit, note=note, mode=mode)


def absent(what: str, unit: str, reason: str, mode: str = "") -> Row:
    """A line that could not be measured, and why."""
    return Row(what, None, unit, note=reason, mode=mode)


def ratio(
    what: str,
    found: Mapping[str, Samples],
    missing: Mapping[str, str],
    side: str,
    over: str,
    unit: str,
    note: str = "",
    mode: str = "",
) -> Row:
    """The ratio of two sides of a table, or why one of them is missing."""
    for name in (side, over):
        if name not in found:
            return absent(what, unit, missing.get(name, f"{name} is missing"), mode)
    return row(what, found[side].over(found[over]), unit, note, mode)


def interleave(
    sides: Mapping[str, Callable[[], float | Turn]],
    rounds: int = ROUNDS,
    warm: Callable[[str], object] | None = None,
    spare: int = 1,
    seed: int = 1,
    lost: MutableMapping[str, str] | None = None,
) -> dict[str, Samples]:
    """Measure all sides in turn, `rounds` times over, after `spare` rounds that do not count.

    Args:
        sides: what each side is called, and a call that measures it once (seconds, say, or a turn with both times).
        rounds: at least ROUNDS. Raises ValueError for fewer.
        warm: called with a side's name before each of its turns; for what the turn before has driven from the caches.
        spare: 0 where every turn starts its own processes and times them from their first step on.
        seed: of the order of the sides, which is another one in each round.
        lost: gets the sides that fail, with the reason; the others go on without them. None: a failure ends all.
    """
    if rounds < ROUNDS:
        raise ValueError(f"rounds = {rounds}: must be >= {ROUNDS}, for the median to mean something")
    order = Random(seed)
    found: dict[str, list[float | Turn]] = {name: [] for name in sides}
    for number in range(spare + rounds):
        turns = [(name, measure) for name, measure in sides.items() if name in found]
        order.shuffle(turns)
        for name, measure in turns:
            try:
                if warm is not None:
                    warm(name)
                value = measure()
            except Exception as error:
                if lost is None:
                    raise
                lost[name] = str(error) or type(error).__name__
                del found[name]
                continue
            if number >= spare:
                found[name].append(value)
    return {name: _samples(values) for name, values in found.items()}


def _samples(values: Sequence[float | Turn]) -> Samples:
    walls = tuple(value.wall if isinstance(value, Turn) else value for value in values)
    return Samples(walls, tuple(value.processor for value in values if isinstance(value, Turn)))
