"""Four workers, one of them four times slower; how long until the training loss is reached.

Slowness is a rest before each step (15 ms; for the slow one four times that, and three times its own computing), inside
the script: workers rest most of the time, so two cores carry four of them. A synchronous step averages four gradients;
an asynchronous update has one, and a quarter of the rate, so that every sample counts the same. With one backup worker
a step averages the gradients of the three that come first.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import count

from benchmarks.harness import ROUNDS, Row, absent, interleave, row
from benchmarks.learning import Point, first, job
from benchmarks.record import run_table, say
from benchmarks.sides import Refused, Sides, cluster

REST_MS, RATE, STEPS, BOUND_STEPS, LOSS = 15, 0.2, 70, 85, 0.35
WAYS = {
    "synchronous": cluster(workers=4),
    "asynchronous": cluster(workers=1, groups=4),
    "bounded staleness 3": cluster(workers=1, groups=4, inside="max_staleness: 3"),
    "one backup worker": cluster(workers=4, inside="backup: 1", top="grads: kHidden per_worker_batch: true"),
}
THEORY = {
    "asynchronous": "theory 3.25: 13 gradients instead of 4",
    "one backup worker": "theory 4",
    "bounded staleness 3": "theory 1: nobody is ahead of the slow one for long",
}
_COMMON = ("--rest", str(REST_MS), "--slow", "3", "--every", "2")


def once(sides: Sides, way: str, seed: int) -> Point:
    """Where one run reaches the loss. Raises Refused if it does not get there."""
    args = (*_COMMON, "--seed", str(seed))
    rate = RATE if way in ("synchronous", "one backup worker") else RATE / 4
    # A group that nothing binds to the slow one takes four steps to its one; a bound group goes at its pace.
    steps = {"bounded staleness 3": BOUND_STEPS, "asynchronous": 3 * STEPS // 2}.get(way, STEPS)
    more = {"asynchronous": ("--slow-steps", str(steps // 4)), "one backup worker": ("--loader", "4")}.get(way, ())
    args = (*args, "--rate", str(rate), "--steps", str(steps), *more)
    return first(job(sides, way, WAYS[way], *args), loss=LOSS)


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS)


def measure(options: argparse.Namespace) -> Sequence[Row]:
    what, unit = f"4 workers, training loss {LOSS}", "× faster than synchronous"
    rows: list[Row] = []
    with Sides() as sides:
        seeds = {way: count(1) for way in WAYS}

        def turn(way: str) -> float:
            seed = next(seeds[way])
            say(f"  {way}, seed {seed}")
            return once(sides, way, seed).seconds

        try:
            found = interleave({way: partial(turn, way) for way in WAYS}, options.rounds, spare=0)
        except Refused as reason:
            return [absent(what, unit, str(reason))]
    rows.append(row("synchronous: to the loss", found["synchronous"].figure, "s"))
    rows += [row(f"{what}: {way}", found["synchronous"].over(found[way]), unit, note) for way, note in THEORY.items()]
    return rows


if __name__ == "__main__":
    run_table("straggler", "One worker of four slowed four times", measure, declare)
