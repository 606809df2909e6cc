"""Uneven workers of one synchronous group: the gain of `shares` and of `backup`.

Four workers sleep for every sample, so two cores carry them. `shares` is measured with one worker that is always four
times slower. `backup` is measured with a pause of one worker in every fifth step. All sides read the same 1,280 samples
in an epoch. The time of the last epoch is compared.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness import ROUNDS, Row, absent, interleave, row
from benchmarks.learning import run_program
from benchmarks.record import run_table
from benchmarks.sides import Refused, Sides, cluster

NAME, TITLE, GOALS = "uneven", "One slow worker in a synchronous group", ()
PROGRAM = Path(__file__).parent / "programs" / "uneven.py"
_SPARE = "grads: kHidden per_worker_batch: true"
_SLOW, _PAUSES = ("--batch", "64", "--slow", "3"), ("--batch", "16", "--pauses")
WAYS = {
    "equal shares": (cluster(workers=4), _SLOW),
    "shares": (cluster(workers=4, inside="shares: [4, 4, 4, 1]"), _SLOW),
    "all workers": (cluster(workers=4, top=_SPARE), _PAUSES),
    "backup": (cluster(workers=4, inside="backup: 1", top=_SPARE), _PAUSES),
}


def once(sides: Sides, way: str) -> float:
    """Seconds of the last epoch. Raises Refused."""
    conf, args = WAYS[way]
    return float(run_program(sides, way, conf, PROGRAM, *args).read_text())


def measure(options: argparse.Namespace) -> Sequence[Row]:
    unit = "× faster"
    with Sides() as sides:
        try:
            found = interleave({way: partial(once, sides, way) for way in WAYS}, options.rounds, spare=0)
        except Refused as reason:
            return [absent("", "an epoch with uneven workers", unit, str(reason))]
    note = "theory 3.25: the slow worker gets 5 samples of 64 instead of 16"
    shares, backup = found["equal shares"].over(found["shares"]), found["all workers"].over(found["backup"])
    return [
        row("", "one slow worker, equal shares: an epoch", found["equal shares"].figure, "s"),
        row("", "one slow worker, shares [4, 4, 4, 1]", shares, unit, "", note),
        row("", "pauses, no backup worker: an epoch", found["all workers"].figure, "s"),
        row("", "pauses, backup: 1", backup, unit, "", "the work of a late worker is done twice"),
    ]


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, lambda parser: parser.add_argument("--rounds", type=int, default=ROUNDS))
