"""P7: four workers, one of them four times slower; how long until the training loss is reached.

Slowness is a rest before each step (15 ms; for the slow one four times that, and three times its own computing), inside
the script: workers rest most of the time, so two cores carry four of them. A synchronous step averages four gradients;
an asynchronous update has one, and a quarter of the rate, so that every sample counts the same.
"""

import argparse
from collections.abc import Sequence

from benchmarks.harness import ROUNDS, Row, absent, interleave, row
from benchmarks.learning import ddp, first, job
from benchmarks.record import run_table, say
from benchmarks.sides import Refused, Sides, cluster

NAME, TITLE, GOALS = "straggler", "One worker of four slowed four times", ("P7",)

REST_MS, RATE, STEPS, BOUND_STEPS, LOSS = 15, 0.2, 70, 85, 0.35
WAYS = {
    "synchronous": cluster(workers=4),
    "asynchronous": cluster(workers=1, groups=4),
    "bounded staleness 3": cluster(workers=1, groups=4, inside="max_staleness: 3"),
}
_COMMON = ("--rest", str(REST_MS), "--slow", "3", "--every", "2")


def once(sides: Sides, way: str, seed: int) -> float:
    """Seconds of one run to the loss. Raises Refused if it does not get there."""
    args = (*_COMMON, "--seed", str(seed))
    if way == "DDP":
        return first(ddp(sides, way, 4, *args, "--rate", str(RATE), "--steps", str(STEPS)), loss=LOSS).seconds
    rate = RATE if way == "synchronous" else RATE / 4
    # A group that nothing binds to the slow one takes four steps to its one; a bound group goes at its pace.
    steps = {"synchronous": STEPS, "asynchronous": 3 * STEPS // 2}.get(way, BOUND_STEPS)
    slow = ("--slow-steps", str(steps // 4)) if way == "asynchronous" else ()
    args = (*args, "--rate", str(rate), "--steps", str(steps), *slow)
    return first(job(sides, way, WAYS[way], *args), loss=LOSS).seconds


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--ddp", action="store_true", help="DDP, too: a minute or two more")


def measure(options: argparse.Namespace) -> Sequence[Row]:
    what, unit = f"4 workers, training loss {LOSS}", "× faster than synchronous"
    rows: list[Row] = []
    with Sides() as sides:
        seeds = dict.fromkeys((*WAYS, "DDP") if options.ddp else WAYS, 0)

        def turn(way: str) -> float:
            seeds[way] += 1
            say(f"  {way}, seed {seeds[way]}")
            return once(sides, way, seeds[way])

        try:
            found = interleave({way: lambda way=way: turn(way) for way in seeds}, options.rounds, spare=0)
        except Refused as reason:
            return [absent("P7", what, unit, str(reason), ">= 3.0")]
    rows.append(row("", "synchronous: to the loss", found["synchronous"].figure, "s"))
    note = "theory 3.25: in the time of a slow step, 13 gradients instead of 4"
    rows.append(
        row("P7", f"{what}: asynchronous", found["synchronous"].over(found["asynchronous"]), unit, ">= 3.0", note)
    )
    note = "theory 1: nobody is ahead of the slow one for long"
    rows.append(
        row("", f"{what}: bounded staleness 3", found["synchronous"].over(found["bounded staleness 3"]), unit, "", note)
    )
    if "DDP" in found:
        rows.append(row("", f"{what}: DDP", found["synchronous"].over(found["DDP"]), unit))
    else:
        rows.append(absent("", f"{what}: DDP", unit, "not asked for: --ddp"))
    rows.append(absent("", f"{what}: one backup worker of 4", unit, "backup workers are not there yet"))
    return rows


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
