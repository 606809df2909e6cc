"""The seconds of steps, which differ by chance.

The forward and the backward of a step take their mean times a log-normal factor of the probe's `spread`, as in a
rehearsal. A group waits for the slowest of its workers. Groups that wait for each other are followed over some hundred
rounds, of which the draws are the same in each run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from topotrain.tools.prediction.flow.flow_costs import Computing
from topotrain.tools.prediction.flow.flow_loads import Amounts

LEVELS = 1024
"""Values of a sample."""
_GRID = 2048
_DRAWS = 1 << 16
_LEAST_ROUNDS, _MOST_ROUNDS = 64, 1024
_MOST_AHEAD = 1000
"""Rounds of a lead that are followed. Longer ones are never used up in a job of a few thousand rounds."""
_SHARES: Amounts = (np.arange(LEVELS) + 0.5) / LEVELS


@dataclass(frozen=True, eq=False, slots=True)
class StepLengths:
    """A sample of the seconds of steps.

    Attributes:
        values: seconds.
        weights: of each value, as often as there are such steps.
    """

    values: Amounts
    weights: Amounts

    @property
    def mean(self) -> float:
        """The mean of all steps."""
        return float(np.average(self.values, weights=self.weights))

    def later(self, seconds: float) -> "StepLengths":
        """Return the same steps, each of them so much longer."""
        return replace(self, values=self.values + seconds)

    def quantile(self, share: float) -> float:
        """Return the seconds that this share of the steps does not exceed."""
        order = np.argsort(self.values, kind="stable")
        passed = np.cumsum(self.weights[order])
        place = int(np.searchsorted(passed, share * passed[-1] * (1 - 1e-12)))
        return float(self.values[order[min(place, len(order) - 1)]])


def all_steps(parts: Sequence[tuple[StepLengths, float]]) -> StepLengths:
    """Return the steps of several samples as one.

    Each has the weight that its steps have in all.
    """
    values = np.concatenate([lengths.values for lengths, _ in parts])
    return StepLengths(
        values, np.concatenate([lengths.weights * (weight / lengths.weights.sum()) for lengths, weight in parts])
    )


@dataclass(frozen=True, slots=True)
class PacedGroups:
    """Worker groups that compute alike.

    Attributes:
        count: their number.
        workers: the computing of the workers of each group -> how many there are.
        busy_s: seconds of a group's own part of an exchange.
    """

    count: int
    workers: Mapping[Computing, int]
    busy_s: float


@dataclass(frozen=True, slots=True)
class Rhythm:
    """The rounds of groups, each of which ends with an exchange.

    Attributes:
        steps: of a round.
        overlap: steps that a group makes while its exchange is under way.
        exchange_s: from the last push of a round until its values are there.
        lead: rounds by which a group may be ahead of the slowest one.
        script_s: seconds of each step beside the computing.
    """

    steps: int = 1
    overlap: int = 0
    exchange_s: float = 0.0
    lead: int = 0
    script_s: float = 0.0


def slowest_of(workers: Mapping[Computing, int], spread: float, steps: int = 1) -> Amounts:
    """Return in how many seconds the slowest of these workers makes so many steps.

    The result has LEVELS quantiles in their order.
    """
    if not spread:
        return np.full(LEVELS, steps * max(each.total for each in workers))
    # The mean of several log-normal numbers is nearly one, with less spread.
    sigma = math.sqrt(math.log1p(spread * spread / steps))
    least, most = (
        max(each.script + each.drawn * math.exp(z * sigma - sigma * sigma / 2) for each in workers) for z in (-5, 6)
    )
    grid = np.linspace(least, most, _GRID)
    log_below = np.zeros(_GRID)
    normal = NormalDist()
    for each, count in workers.items():
        if each.drawn > 0:
            z = (np.log(np.maximum(grid - each.script, 1e-300) / each.drawn) + sigma * sigma / 2) / sigma
            below = np.array([normal.cdf(value) for value in z.tolist()])
            log_below += count * np.log(np.maximum(below, 1e-300))
    return np.interp(_SHARES, np.exp(log_below), grid) * steps


def paced(groups: Sequence[PacedGroups], spread: float, rhythm: Rhythm) -> Sequence[StepLengths]:
    """Return the steps of each kind of groups.

    All of these groups wait for each other.
    """
    whole = sum(each.count for each in groups)
    rounds = min(_MOST_ROUNDS, max(_LEAST_ROUNDS, _DRAWS // whole))
    rounds = max(rounds, 4 * min(rhythm.lead + 1, _MOST_AHEAD))
    dice = np.random.default_rng(0)
    apart, during = rhythm.steps - rhythm.overlap, rhythm.overlap
    before = _draws(groups, spread, apart, rounds, dice) + apart * rhythm.script_s
    beside = _draws(groups, spread, during, rounds, dice) + during * rhythm.script_s if during else None
    busy = np.repeat([each.busy_s for each in groups], [each.count for each in groups])
    waits = _waits(before, beside, busy, rhythm)
    found, first = [], 0
    for each in groups:
        here = slice(first, first + each.count)
        first += each.count
        if rhythm.steps == 1:
            found.append(_even(_levels(before[:, here] + busy[here] + waits[:, here])))
            continue
        local = slowest_of(each.workers, spread) + rhythm.script_s
        exchanges = dice.permuted(local) + _levels(waits[:, here])
        pushes = local + each.busy_s
        if not during:
            exchanges, pushes = exchanges + each.busy_s, local
        parts = [(_even(exchanges), 1.0), (_even(pushes), 1.0), (_even(local), rhythm.steps - 2.0)]
        found.append(all_steps(parts))
    return found


def _draws(groups: Sequence[PacedGroups], spread: float, steps: int, rounds: int, dice: np.random.Generator) -> Amounts:
    """The seconds in which each group makes so many steps, by round and group."""
    columns = []
    for each in groups:
        values = np.resize(slowest_of(each.workers, spread, steps), rounds * each.count)
        columns.append(dice.permuted(values).reshape(rounds, each.count))
    return np.concatenate(columns, axis=1)


def _waits(before: Amounts, beside: Amounts | None, busy: Amounts, rhythm: Rhythm) -> Amounts:
    """The seconds for which each group waits in each round."""
    found = np.zeros_like(before)
    now = np.zeros(before.shape[1])
    over: list[float] = []
    for number in range(len(before)):
        now = now + before[number]
        there = float(now.max()) + rhythm.exchange_s
        now += busy
        over.append(max(there, float(now.max())))
        if beside is not None:
            now += beside[number]
        if number >= rhythm.lead:
            found[number] = np.maximum(0.0, over[number - rhythm.lead] - now)
            now += found[number]
    return found


def _levels(values: Amounts) -> Amounts:
    return np.quantile(values, _SHARES)


def _even(values: Amounts) -> StepLengths:
    return StepLengths(values, np.ones(len(values)))
