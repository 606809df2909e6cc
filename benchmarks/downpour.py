"""Samples per second of Downpour with two groups, beside two processes that never hear of each other."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from benchmarks import models
from benchmarks.harness import ROUNDS, Figure, Row, absent, interleave, row
from benchmarks.record import run_table, say
from benchmarks.sides import Side, Sides, cluster, gather

MODES: Mapping[str, str] = {
    "kVisible, kAtStep": "",
    "kHidden, kOnArrival": "grads: kHidden apply: kOnArrival",
    "kHidden, kOnArrival, kLazy": "grads: kHidden apply: kOnArrival pull: kLazy",
}
"""With one worker per group no worker waits for a mean, so kHidden alone is no other way."""
STEPS = {"mlp": 8, "gpt": 3, "cnn": 5}
"""Steps of a turn: about half a second's."""


def measure_model(model: str, rounds: int, steps: int) -> list[Row]:
    """All rows of one model."""
    with Sides() as sides:
        starts: dict[str, Callable[[], Side]] = {"two": partial(sides.peer, f"{model} two", "alone", 2, model)}
        for mode, top in MODES.items():
            conf = cluster(workers=1, groups=2, top=top)
            starts[mode] = partial(sides.job, f"{model} {mode}", conf, 2, model)
        living, missing = gather(starts)
        samples = 2 * living["two"].hellos[0]["samples"]
        turns = {name: partial(side.turn, steps) for name, side in living.items()}
        found = interleave(turns, rounds, lambda name: living[name].run(1))
    two, size = found["two"], models.megabytes(model)
    rate = Figure(samples / two.median, samples / max(two.values), samples / min(two.values))
    rows = [row(f"{model.upper()}: two independent processes", rate, "samples/s").costing(two, size)]
    what, unit = f"{model.upper()}: samples per second", "× independent"
    for mode in MODES:
        if mode in missing:
            rows.append(absent(what, unit, missing[mode], mode))
        else:  # as many samples in each turn, so rates are as times upside down
            rows.append(row(what, two.over(found[mode]), unit, mode=mode).costing(found[mode], size))
    return rows


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="*", default=list(models.TRAINED), choices=models.TRAINED)
    parser.add_argument("--rounds", type=int, default=ROUNDS)


def measure(options: argparse.Namespace) -> Sequence[Row]:
    rows: list[Row] = []
    for model in options.models:
        say(f"  {model}")
        rows += measure_model(model, options.rounds, STEPS[model])
    return rows


if __name__ == "__main__":
    run_table("downpour", "Downpour, 2 groups on one host", measure, declare)
