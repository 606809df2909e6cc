"""Sides that take the same steps of a model in turn; a figure is the time of a step over another side's.

Every side that fails is a row with its reason, and the others go on without it. Sides that keep the same model must end
with the same parameters, or have no figure.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf

from benchmarks import models
from benchmarks.harness import ROUNDS, Row, Samples, absent, interleave, ratio, row
from benchmarks.processor import Turn
from benchmarks.record import say
from benchmarks.sides import PATIENCE_S, Refused, Side, Sides

ALONE = "alone"
TURN_S, MOST_STEPS = 0.3, 64
TOLERANCE = 1e-5
"""Of the mean magnitude of parameters."""
MODES: Mapping[str, str] = {
    "kVisible, kAtStep": "",
    "kHidden, kAtStep": "grads: kHidden",
    "kHidden, kOnArrival": "grads: kHidden apply: kOnArrival",
    "kHidden, kOnArrival, kLazy": "grads: kHidden apply: kOnArrival pull: kLazy",
}
"""Ways of a step, the default first."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A side, before it is started.

    Attributes:
        name: of its row.
        workers: how many processes compute.
        way: of a peer.
        conf: of a job.
        transport: of the job, if not the default.
        missing: why it cannot be started.
        over: the side by whose time its own is divided. The row of a side over itself has the time.
        same_as: the side that has the same parameters at the end, if any.
        mode: of its row.
        rate: whether the row has samples per second, which are the other way round.
    """

    name: str
    workers: int = 2
    way: str = ""
    conf: str = ""
    transport: str = ""
    missing: str = ""
    over: str = ALONE
    same_as: str = ""
    mode: str = ""
    rate: bool = False

    @property
    def key(self) -> str:
        return f"{self.name}: {self.mode}" if self.mode else self.name

    def start(self, sides: Sides, model: str) -> Side:
        """Start it. Raises Refused."""
        if self.missing:
            raise Refused(self.missing)
        if self.way:
            return sides.peer(f"{model} {self.key}", self.way, self.workers, model)
        return sides.job(f"{model} {self.key}", self.conf, self.workers, model, self.transport)


@dataclass(frozen=True, slots=True)
class Limits:
    """What is allowed.

    Attributes:
        seconds: sides that are not begun by then are left out.
        patience_s: the most that an answer of a side may take.
        tolerance: how far parameters may be from those that they should be.
    """

    seconds: float = inf
    patience_s: float = PATIENCE_S
    tolerance: float = TOLERANCE
    began: float = field(default_factory=time.monotonic)

    def check(self) -> None:
        """Raise Refused if no time is left."""
        if time.monotonic() >= self.began + self.seconds:
            raise Refused(f"left out: the {self.seconds:.0f} s for this table were over")


def contest(
    model: str, chosen: Sequence[Contestant], rounds: int, limits: Limits, arguments: Sequence[str] = ()
) -> list[Row]:
    """All rows of one model. arguments: of the stepper."""
    say(f"  {model}")
    living: dict[str, Side] = {}
    lost: dict[str, str] = {}
    with Sides(arguments, limits.patience_s) as sides:
        for one in chosen:
            try:
                limits.check()
                living[one.key] = one.start(sides, model)
            except (Refused, OSError, ValueError) as reason:
                lost[one.key] = str(reason) or type(reason).__name__
        found: Mapping[str, Samples] = {}
        if living:
            steps = _steps(next(iter(living.values())))
            turns = {name: _turn(side, steps, limits) for name, side in living.items()}
            found = interleave(turns, rounds, lambda name: living[name].run(1), lost=lost)
        sums = {name: _checksum(living[name]) for name in found}
    lost |= {one.key: wrong for one in chosen if (wrong := _difference(one, sums, limits.tolerance))}
    for name, why in lost.items():
        say(f"  {model}, {name}: {why}")
    return [_row(one, f"{model.upper()}: {one.name}", found, lost) for one in chosen]


def _steps(side: Side) -> int:
    """Steps of a turn: about so many as take TURN_S."""
    with suppress(Refused, OSError):  # its own turn says what is wrong
        side.run(2)
        return max(2, min(MOST_STEPS, round(TURN_S / side.run(2))))
    return 2


def _turn(side: Side, steps: int, limits: Limits) -> Callable[[], Turn]:
    def turn() -> Turn:
        try:
            limits.check()
            return side.turn(steps)
        except (Refused, OSError):
            side.end()  # what is left of it would take time from the others
            raise

    return turn


def _checksum(side: Side) -> float | None:
    with suppress(Refused, OSError):
        return float(side.ask(check=True)[0]["checksum"])
    return None


def _difference(one: Contestant, sums: Mapping[str, float | None], tolerance: float) -> str:
    """Why a side's figure does not count; empty if it does."""
    mine, wanted = sums.get(one.key), sums.get(one.same_as)
    # A NaN is not near anything.
    if not mine or not wanted or abs(mine / wanted - 1) <= tolerance:
        return ""
    return f"ends with other parameters than {one.same_as} ({mine:.8g}, not {wanted:.8g})"


def _row(one: Contestant, what: str, found: Mapping[str, Samples], lost: Mapping[str, str]) -> Row:
    unit = f"× {one.over}"
    if one.key in lost:
        return absent(what, unit, lost[one.key], one.mode)
    mine = found[one.key]
    if one.over == one.key:
        return row(f"{what}, one step", mine.figure.times(1e3), "ms").costing(mine)
    pair = (one.over, one.key) if one.rate else (one.key, one.over)
    return ratio(what, found, lost, *pair, unit, f"{mine.median * 1e3:.2f} ms", one.mode).costing(mine)


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options of such a table."""
    parser.add_argument("--models", nargs="*", default=list(models.TRAINED), choices=[*models.TRAINED, "small"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
