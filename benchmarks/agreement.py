"""How server groups agree, `python -m benchmarks.agreement`.

Accuracies of Distributed Hogwild with three groups in virtual time, as in `asynchrony`. They do not depend on the speed
of the machine.
"""

import argparse
from collections.abc import Sequence
from statistics import mean

import torch

from benchmarks.asynchrony import GROUPS, in_turn, one_group
from benchmarks.harness import Figure, Row, row
from benchmarks.record import run_table, say
from topotrain.config.job import Agreement

NAME, TITLE, GOALS = "agreement", "How server groups agree", ()
TRIPS = (((0.1, 0.4), 1), ((0.5, 1.0), 1), ((0.1, 0.4), 4))
"""The time of a message in steps, and `sync_freq`."""
ADAM_RATES, ADAM_FREQS = (0.003, 0.01, 0.03), (1, 10)


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
    return rows + [line for rate in ADAM_RATES for line in _adaptive(rate, options.seeds)]


def _adaptive(rate: float, seeds: int) -> list[Row]:
    """Adam in each group, whose steps are as long as the rate, whatever the gradient is."""

    def line(what: str, found: Sequence[float], mode: str) -> Row:
        say(f"Adam {rate:g}, {what}, {mode}: {[f'{one:.3f}' for one in found]}")
        figure = Figure(mean(found), min(found), max(found))
        return row("", f"Adam, rate {rate:g}, {what}", figure, "accuracy", mode=mode, note=f"{len(found)} seeds")

    lines = [
        line("one process", [one_group(seed, rate) for seed in range(seeds)], ""),
        line("one process with a third of the data", [one_group(seed, rate, GROUPS) for seed in range(seeds)], ""),
    ]
    master = Agreement.kMaster
    for freq in ADAM_FREQS:
        for agreement, used, words in (
            (master, rate, ""),
            (master, rate / GROUPS, " at a third of it"),
            (Agreement.kRingAverage, rate, ""),
            (Agreement.kElastic, rate, ""),
            (Agreement.kGossip, rate, ""),
        ):
            found = [in_turn(seed, 0.0, TRIPS[0][0], freq, agreement, used) for seed in range(seeds)]
            lines.append(line(f"3 groups{words}, sync_freq {freq}", found, agreement.value))
    return lines


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
