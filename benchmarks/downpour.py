"""Samples per second of Downpour with two groups, beside two processes that never hear of each other."""

import argparse
from collections.abc import Sequence

from benchmarks.contest import MODES, Contestant, Limits, contest, declare
from benchmarks.harness import Row
from benchmarks.record import run_table
from benchmarks.sides import cluster

INDEPENDENT, RATE = "independent", "samples per second"


def contestants() -> list[Contestant]:
    """Two independent processes, and two groups in each mode."""
    found = [Contestant(INDEPENDENT, way="alone", over=INDEPENDENT)]
    for mode, top in MODES.items():
        # With one worker per group no worker waits for a mean, so kHidden alone is no other way.
        if mode != "kHidden, kAtStep":
            conf = cluster(workers=1, groups=2, top=top)
            found.append(Contestant(RATE, conf=conf, over=INDEPENDENT, mode=mode, rate=True))
    return found


def measure(options: argparse.Namespace) -> Sequence[Row]:
    chosen = contestants()
    return [line for model in options.models for line in contest(model, chosen, options.rounds, Limits())]


if __name__ == "__main__":
    run_table("downpour", "Downpour, 2 groups on one host", measure, declare)
