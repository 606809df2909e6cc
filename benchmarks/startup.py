"""P12: from `topotrain run` on the command line to the first step of the last of the workers, 6 processes, cold.

Cold means that nothing of the job runs before: it loads torch itself. The files are in the kernel's cache. A worker
says when its first step, forward to new values, was over; the table takes the last one.
"""

import argparse
import time
from collections.abc import Sequence

from benchmarks.harness import ROUNDS, Row, Samples, row
from benchmarks.record import run_table
from benchmarks.sides import Sides, cluster

NAME, TITLE, GOALS = "startup", "Start-up", ("P12",)

CONF = cluster(workers=2, servers=2, groups=2)


def once(sides: Sides, cold: bool) -> float:
    """Seconds of one start."""
    began = time.time()
    side = sides.job("start", CONF, 4, "small", cold=cold)
    first = max(hello["first"] for hello in side.hellos)
    side.end()
    del sides.living["start"]
    return first - began


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS)


def measure(options: argparse.Namespace) -> Sequence[Row]:
    cold, warm = [], []
    for number in range(options.rounds + 1):
        with Sides() as sides:
            value = once(sides, True)
        if number:
            cold.append(value)
    with Sides() as sides:
        for number in range(options.rounds + 1):
            value = once(sides, False)
            if number:
                warm.append(value)
    what = "topotrain run, 4 workers and 2 servers (Downpour), to the last worker's first step"
    note = "each with a forkserver of its own; files in the kernel's cache"
    return [
        row("P12", what, Samples(tuple(cold)).figure, "s", "<= 6", note, "cold"),
        row("", what, Samples(tuple(warm)).figure, "s", "", "a forkserver was running already", "warm"),
    ]


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
