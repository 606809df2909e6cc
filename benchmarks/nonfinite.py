"""What it costs to look at every gradient for NaN and infinity: a step with the look, over the same step without.

Rule: both sides of an arrangement live at once and take turns. A training step is what a user has; 40 MB of memory with
no work to do but a pass over it is the most that the look can cost.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence

from benchmarks.harness import Row, absent, interleave, row
from benchmarks.record import run_table, say
from benchmarks.sides import Refused, Sides, cluster

NAME, TITLE, GOALS = "nonfinite", "Looking at gradients for NaN and infinity, 2 workers on one host", ()

HIDDEN = "grads: kHidden"
ARRANGEMENTS: Mapping[str, tuple[str, str]] = {
    "AllReduce": (cluster(servers=2, separate=False), ""),
    "Sandblaster, shared memory": (cluster(), "kShm"),
    "Sandblaster, TCP": (cluster(), "kTcp"),
    "Sandblaster, shared memory, kHidden": (cluster(top=HIDDEN), "kShm"),
    "Downpour, shared memory": (cluster(workers=1, groups=2), "kShm"),
}
"""Name -> conf and road."""

MODELS: Mapping[str, tuple[str, int]] = {
    "MLP": ("mlp", 3),
    "small MLP": ("small", 40),
    "40 MB, no work": ("memory:40000000", 4),
}
"""Name -> model and steps per turn."""

LOOKING, NOT = "nonfinite: kSkip\n", "nonfinite: kAllow\n"


def measure_one(model: str, arrangement: str, rounds: int) -> Row:
    """One model in one arrangement."""
    (work, steps), (conf, road) = MODELS[model], ARRANGEMENTS[arrangement]
    say(f"  {model}: {arrangement}")
    with Sides() as sides:
        try:
            living = {way: sides.job(way.split()[1], way + conf, 2, work, road) for way in (LOOKING, NOT)}
        except Refused as error:
            return absent("", model, "× without", str(error), "", arrangement)
        turns: dict[str, Callable[[], float]] = {way: lambda s=side: s.run(steps) for way, side in living.items()}  # type: ignore[misc]
        found = interleave(turns, rounds, lambda way: living[way].run(1))
    step = found[NOT].median / steps * 1e3
    limit = "<= 1.02" if model == "MLP" else ""
    return row("", model, found[LOOKING].over(found[NOT]), "× without", limit, f"{step:.1f} ms without", arrangement)


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--arrangements", nargs="*", default=list(ARRANGEMENTS), choices=ARRANGEMENTS)
    parser.add_argument("--rounds", type=int, default=7)


def measure(options: argparse.Namespace) -> Sequence[Row]:
    """A row for each model and arrangement."""
    return [measure_one(m, a, options.rounds) for m in options.models for a in options.arrangements]


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
