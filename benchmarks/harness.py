"""Figures that can be trusted a little: sides in turn, A B A B, medians, and ratios within one run.

Rule: a figure is a ratio of medians of one interleaved run, with the smallest and the largest ratio of a round beside
it. Times of different runs are never compared: the machine drifts by up to two times within minutes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

ROUNDS = 5
"""The least number of rounds that a median is taken of."""

_HOLDS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": lambda figure, limit: figure <= limit,
    ">=": lambda figure, limit: figure >= limit,
    "<": lambda figure, limit: figure < limit,
}


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
    """What one side measured, one number per round, in the order of the rounds."""

    values: tuple[float, ...]

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
    """One line of a table. `goal` is "P1" to "P12", or empty where a figure is reported without one.

    `bound` is like "<= 0.85" (empty: none), `met` whether it holds (None: no bound, or no figure); a `figure` of None
    could not be measured, and the note says why.
    """

    goal: str
    what: str
    figure: float | None
    unit: str
    bound: str = ""
    met: bool | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""
    mode: str = ""


def row(
    goal: str, what: str, figure: Figure | float, unit: str, bound: str = "", note: str = "", mode: str = ""
) -> Row:
    """A measured line, judged."""
    if not isinstance(figure, Figure):
        return Row(goal, what, figure, unit, bound, holds(figure, bound), None, None, note, mode)
    met = holds(figure.value, bound)
    return Row(goal, what, figure.value, unit, bound, met, figure.low, figure.high, note, mode)


def absent(goal: str, what: str, unit: str, reason: str, bound: str = "", mode: str = "") -> Row:
    """A line that could not be measured, and why."""
    return Row(goal, what, None, unit, bound, None, None, None, reason, mode)


def holds(figure: float, bound: str) -> bool | None:
    """Whether a figure keeps a bound such as "<= 0.85"; None for an empty bound. Raises ValueError for another form."""
    if not bound:
        return None
    sign, _, limit = bound.partition(" ")
    if sign not in _HOLDS:
        raise ValueError(f"bound = {bound!r}: must be {', '.join(_HOLDS)}, a space and a number")
    return _HOLDS[sign](figure, float(limit))


def interleave(
    sides: Mapping[str, Callable[[], float]],
    rounds: int = ROUNDS,
    warm: Callable[[str], object] | None = None,
    spare: int = 1,
    order: Random | None = None,
) -> dict[str, Samples]:
    """Measure all sides in turn, `rounds` times over, after `spare` rounds that do not count.

    Args:
        sides: what each side is called, and a call that measures it once (seconds, say).
        rounds: at least ROUNDS. Raises ValueError for fewer.
        warm: called with a side's name before each of its turns; for what the turn before has driven from the caches.
        spare: 0 where every turn starts its own processes and times them from their first step on.
        order: shuffles the sides of each round, so that no side always follows the same other one.
    """
    if rounds < ROUNDS:
        raise ValueError(f"rounds = {rounds}: must be >= {ROUNDS}, for the median to mean something")
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(spare + rounds):
        turns = list(sides.items())
        if order is not None:
            order.shuffle(turns)
        for name, measure in turns:
            if warm is not None:
                warm(name)
            value = measure()
            if number >= spare:
                found[name].append(value)
    return {name: Samples(tuple(values)) for name, values in found.items()}


def fastest(samples: Mapping[str, Samples], names: Sequence[str]) -> str:
    """The name with the lowest median."""
    return min(names, key=lambda name: samples[name].median)
