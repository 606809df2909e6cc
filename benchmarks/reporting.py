"""What progress, events and checks cost together, on a step of about 20 ms.

Rule: one job, one worker and one server, on a pretended terminal with the live table that a user sees. The same worker
runs blocks of steps with reporting and blocks without, in turn, so nothing but reporting differs: without it nothing
follows a step, and the check of the parameters before the step is left out.
"""

import argparse
from collections.abc import Sequence

from benchmarks.harness import Figure, Row, Samples, interleave, row
from benchmarks.record import run_table
from benchmarks.sides import Sides, cluster

NAME, TITLE, GOALS = "reporting", "What reporting costs", ()


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=20, help="per turn")


def measure(options: argparse.Namespace) -> Sequence[Row]:
    with Sides() as sides:
        side = sides.job("reporting", cluster(workers=1), 1, "twenty", cold=True, terminal=True)
        turns = {
            "with": lambda: side.run(options.steps, mute=False),
            "without": lambda: side.run(options.steps, mute=True),
        }
        found = interleave(turns, options.rounds)
        side.run(1, mute=False)
        spent = [side.ask(timed=options.steps)[0]["seconds"] for _ in range(options.rounds)]
    ratio = found["with"].over(found["without"])
    percent = Figure(*(100 * (value - 1) for value in (ratio.value, ratio.low, ratio.high)))
    step = found["without"].median * 1e3
    note = f"a step takes {step:.1f} ms without; {options.rounds} rounds of {options.steps} steps each way"
    told = Samples(tuple(spent)).figure.times(100 / found["without"].median)
    return [
        row("", "progress, events and checks together: steps with against steps without", percent, "%", "< 1", note),
        row("", "the same: time that a worker spends in them", told, "% of a step", "< 1", "measured inside"),
    ]


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
