"""How server groups agree: `kMaster` and `kRingAverage`, `python -m benchmarks.agreement`.

Accuracies of Distributed Hogwild with three groups in virtual time, as in `asynchrony`. They do not depend on the speed
of the machine.
"""

import argparse
from collections.abc import Sequence
from statistics import mean

import torch

from benchmarks.asynchrony import in_turn
from benchmarks.harness import Figure, Row, row
from benchmarks.record import run_table
from topotrain.config.job import Agreement

NAME, TITLE, GOALS = "agreement", "How server groups agree", ()
TRIPS = (((0.1, 0.4), 1), ((0.5, 1.0), 1), ((0.1, 0.4), 4))
"""The time of a message in steps, and `sync_freq`."""


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3)


def measure(options: argparse.Namespace) -> Sequence[Row]:
    torch.set_num_threads(1)
    rows = []
    for momentum in (0.0, 0.9):
        for trip, freq in TRIPS:
            what = f"momentum {momentum:g}, a message takes {trip[0]:g} to {trip[1]:g} steps, sync_freq {freq}"
            for agreement in Agreement:
                found = [in_turn(seed, momentum, trip, freq, agreement) for seed in range(options.seeds)]
                figure = Figure(mean(found), min(found), max(found))
                rows.append(row("", what, figure, "accuracy", mode=agreement.value, note=f"{len(found)} seeds"))
    return rows


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
