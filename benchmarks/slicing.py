"""What fine slices and priority bring on a slow link: 4 workers, 4 servers, 4.5 MB of gradients, 100 Mbit/s per unit.

Slicing: the same job with buckets of 64 KB to 1 MB. Priority: servers update, and send, what a forward needs first,
and with `pull: kLazy` the forward of the first layers runs while the rest is on its way (P3: Jayarajan et al., 2019).
"""

import argparse
from collections.abc import Sequence
from functools import partial

from benchmarks.harness import ROUNDS, Row, absent, interleave, row
from benchmarks.record import run_table
from benchmarks.sides import Side, Sides, cluster, gather

NAME, TITLE, GOALS = "slicing", "Slicing and priority on a slow link", ()

LINK = "link { bandwidth: 100 }"
ARRIVAL = "grads: kHidden apply: kOnArrival"
SIZES = (64, 128, 256, 1024)  # KB
LAZY = "lazily"


def measure(options: argparse.Namespace) -> Sequence[Row]:
    """All rows."""
    with Sides() as sides:

        def job(kilobytes: int, more: str = "") -> Side:
            inside = f"slice_bytes: {kilobytes * 1024} {LINK}"
            return sides.job(f"{kilobytes} {more}", cluster(4, 4, inside=inside, top=f"{ARRIVAL} {more}"), 4, "small")

        starts = {f"{size} KB": partial(job, size) for size in SIZES}
        starts[LAZY] = partial(job, 128, "pull: kLazy")
        living, missing = gather(starts)
        measured = interleave({name: partial(side.run, 3) for name, side in living.items()}, options.rounds)
    rows: list[Row] = []
    coarse = measured.get("1024 KB")
    for name in starts:
        base = measured.get("128 KB") if name == LAZY else coarse
        what = "pull: kLazy over pull: kStep, buckets of 128 KB" if name == LAZY else f"buckets of {name} over 1024 KB"
        if name in missing or base is None:
            rows.append(absent("", what, "x faster", missing.get(name, "nothing to compare with")))
            continue
        note = f"{measured[name].median * 1e3:.0f} ms a step"
        rows.append(row("", what, base.over(measured[name]), "x faster", "", note, "kHidden, kOnArrival"))
    return rows


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, lambda parser: parser.add_argument("--rounds", type=int, default=ROUNDS))
