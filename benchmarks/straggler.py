"""Four workers, one of them four times slower; how long until the training loss is reached.

Slowness is a rest before each step (15 ms; for the slow one four times that, and three times its own computing), inside
the script: workers rest most of the time, so two cores carry four of them. A synchronous step averages four gradients;
an asynchronous update has one, and a quarter of the rate, so that every sample counts the same. With one backup worker
a step averages the gradients of the three that come first.

What is missing from the theory is counted: how many steps a healthy worker makes in the time of a synchronous step, at
best 4, and how many gradients it takes to the loss.
"""

import argparse
from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.harness import ROUNDS, Row, absent, interleave, row
from benchmarks.learning import Point, ddp, first, job
from benchmarks.record import run_table, say
from benchmarks.sides import Refused, Sides, cluster

REST_MS, RATE, STEPS, BOUND_STEPS, LOSS = 15, 0.2, 70, 85, 0.35
WAYS = {
    "synchronous": cluster(workers=4),
    "asynchronous": cluster(workers=1, groups=4),
    "bounded staleness 3": cluster(workers=1, groups=4, inside="max_staleness: 3"),
    "one backup worker": cluster(workers=4, inside="backup: 1", top="grads: kHidden per_worker_batch: true"),
}
EITHER = ("asynchronous", "one backup worker")
_COMMON = ("--rest", str(REST_MS), "--slow", "3", "--every", "2")


def once(sides: Sides, way: str, seed: int) -> Point:
    """Where one run reaches the loss. Raises Refused if it does not get there."""
    args = (*_COMMON, "--seed", str(seed))
    if way == "DDP":
        return first(ddp(sides, way, 4, *args, "--rate", str(RATE), "--steps", str(STEPS)), loss=LOSS)
    rate = RATE if way in ("synchronous", "one backup worker") else RATE / 4
    # A group that nothing binds to the slow one takes four steps to its one; a bound group goes at its pace.
    steps = {"bounded staleness 3": BOUND_STEPS, "asynchronous": 3 * STEPS // 2}.get(way, STEPS)
    more = {"asynchronous": ("--slow-steps", str(steps // 4)), "one backup worker": ("--loader", "4")}.get(way, ())
    args = (*args, "--rate", str(rate), "--steps", str(steps), *more)
    return first(job(sides, way, WAYS[way], *args), loss=LOSS)


def counted(points: Mapping[str, Sequence[Point]], way: str) -> str:
    """What a way needs in steps and gradients beside synchronous training, in words."""
    pace = {name: median(point.seconds / point.step for point in points[name]) for name in ("synchronous", way)}
    steps = {name: median(point.step for point in points[name]) for name in ("synchronous", way)}
    healthy = pace["synchronous"] / pace[way]
    told = f"a healthy worker makes {healthy:.2f} steps in the time of a synchronous one, 4 at best"
    if way == "one backup worker":
        return f"{told}; {3 * steps[way]:.0f} gradients to the loss, synchronous {4 * steps['synchronous']:.0f}"
    # The slow worker makes a step in the time of a synchronous one.
    gradients = steps[way] * (3 + 1 / healthy)
    return f"{told}; {gradients:.0f} gradients to the loss, synchronous {4 * steps['synchronous']:.0f}"


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--ddp", action="store_true", help="DDP, too: a minute or two more")


def measure(options: argparse.Namespace) -> Sequence[Row]:
    what, unit = f"4 workers, training loss {LOSS}", "× faster than synchronous"
    rows: list[Row] = []
    with Sides() as sides:
        seeds = dict.fromkeys((*WAYS, "DDP") if options.ddp else WAYS, 0)

        points: dict[str, list[Point]] = {way: [] for way in seeds}

        def turn(way: str) -> float:
            seeds[way] += 1
            say(f"  {way}, seed {seeds[way]}")
            points[way].append(once(sides, way, seeds[way]))
            return points[way][-1].seconds

        try:
            found = interleave({way: lambda way=way: turn(way) for way in seeds}, options.rounds, spare=0)
        except Refused as reason:
            return [absent(what, unit, str(reason))]
    rows.append(row("synchronous: to the loss", found["synchronous"].figure, "s"))
    theory = {"asynchronous": "theory 3.25: 13 gradients instead of 4", "one backup worker": "theory 4"}
    for way in EITHER:
        note = f"{theory[way]}; {counted(points, way)}"
        rows.append(row(f"{what}: {way}", found["synchronous"].over(found[way]), unit, note))
    note = "theory 1: nobody is ahead of the slow one for long"
    bounded = found["synchronous"].over(found["bounded staleness 3"])
    rows.append(row(f"{what}: bounded staleness 3", bounded, unit, note))
    if "DDP" in found:
        rows.append(row(f"{what}: DDP", found["synchronous"].over(found["DDP"]), unit))
    else:
        rows.append(absent(f"{what}: DDP", unit, "not asked for: --ddp"))
    return rows


if __name__ == "__main__":
    run_table("straggler", "One worker of four slowed four times", measure, declare)
