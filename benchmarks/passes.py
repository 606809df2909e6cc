"""Passes over memory of a step that pushes, applies and pulls 40 MB over shared memory, counted and not timed.

Rule: real jobs with the worker's real client (benchmarks/programs/pusher.py); every operation of torch in servers and
workers is counted with the bytes that it reads and writes. One pass reads or writes all parameters once. What a cache
saves is not seen, so a count is the same on every machine.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.exchange import ARRIVAL, HIDDEN, MEGABYTES, PUSHER
from benchmarks.harness import Row, absent, row
from benchmarks.programs.counting import FOLDER, Counts
from benchmarks.record import run_table, say
from benchmarks.sides import Refused, Sides, cluster

NAME, TITLE, GOALS = "passes", "Passes over memory, counted", ()

COUNTING = "benchmarks.programs.counting"
STEPS = 8
COUNTED = 4
"""The step that is shown: buffers are made in the first ones."""
UNIT = "passes over 40 MB"
MODES = {ARRIVAL: "kHidden, kOnArrival", HIDDEN: "kHidden, kAtStep", "": "kVisible, kAtStep"}


@dataclass(frozen=True, slots=True)
class Passes:
    """The counts of one step, by operation, of all servers and of all workers."""

    servers: Counts
    workers: Counts


def least(workers: int) -> int:
    """The passes that no server can save: it reads all gradients, values and momentum, and writes the last two."""
    return workers + 4


def with_torch(workers: int) -> int:
    """The same with torch's kernels, none of which adds gradients and updates in one pass."""
    # The sum of n gradients: n - 1 additions of two inputs and one output each.
    return 3 * (workers - 1) + 5


def count(workers: int, top: str, groups: int = 1) -> Passes:
    """Run Sandblaster, or Downpour, with one server; count one step of all groups. Raises Refused."""
    with TemporaryDirectory(prefix="bench-passes-") as folder, _variable(folder), Sides(preload=[COUNTING]) as sides:
        conf = cluster(workers, groups=groups, top=top)
        side = sides.job("passes", conf, workers * groups, "step", "kShm", script=PUSHER)
        side.run(STEPS)
        found = [dict(answer["counts"]) for answer in side.ask(count=1)]
        side.run(1)
        return Passes(_servers(folder, f"{COUNTED}/*"), merged(found))


def count_reduction(ranks: int) -> Counts:
    """Run AllReduce, and count what all ranks do for one reduction. Raises Refused."""
    with TemporaryDirectory(prefix="bench-passes-") as folder, _variable(folder), Sides(preload=[COUNTING]) as sides:
        conf = cluster(ranks, ranks, separate=False)
        side = sides.job("passes", conf, ranks, "reduce", script=PUSHER)
        # Its step is never committed: every reduction is a backward of the first step.
        side.run(STEPS)
        return _servers(folder, f"0/{COUNTED}")


def _servers(folder: str, pattern: str) -> Counts:
    """The counts that servers have left for steps and backwards: each of them as soon as a later one has begun."""
    files = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    found = [counts for by_key in files for key, counts in by_key.items() if fnmatch(key, pattern)]
    if not found:
        raise Refused("no server has counted")
    return merged(found)


class _variable:
    """Sets the variable of the counts while it is entered."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        os.environ[FOLDER] = self._folder

    def __exit__(self, *_: object) -> None:
        del os.environ[FOLDER]


def merged(parts: Sequence[Counts]) -> Counts:
    """The sums of these counts."""
    total: Counts = {}
    for part in parts:
        for name, numbers in part.items():
            total[name] = [a + b for a, b in zip(total.get(name, [0, 0, 0]), numbers, strict=True)]
    return total


def passes(counts: Counts) -> float:
    """Reads and writes, in passes over the parameters."""
    return sum(read + written for _, read, written in counts.values()) / (MEGABYTES * 2**20)


def told(counts: Counts) -> str:
    """The passes by operation, in words; those that are worth naming."""
    size = MEGABYTES * 2**20
    shown: Mapping[str, tuple[float, float]] = {n: (read / size, out / size) for n, (_, read, out) in counts.items()}
    words = [f"{n} {read:.3g} + {out:.3g}" for n, (read, out) in shown.items() if read + out >= 0.01]
    return f"read + written: {', '.join(words)}" if words else "no operation touches the parameters"


def rows_of(workers: int, top: str) -> list[Row]:
    """Rows of Sandblaster with one server."""
    what = f"P1, {workers} worker{'s' * (workers > 1)} 1 server"
    try:
        found = count(workers, top)
    except Refused as reason:
        return [absent("", what, UNIT, str(reason), mode=MODES[top])]
    theory = (
        f"least {least(workers)}, with torch's kernels {with_torch(workers)}, which do not add and update at once; "
        f"the rest divides and looks for numbers that are not finite"
    )
    return [
        row(
            "", f"{what}: server", passes(found.servers), UNIT, note=f"{told(found.servers)}; {theory}", mode=MODES[top]
        ),
        row("", f"{what}: workers together", passes(found.workers), UNIT, note=told(found.workers), mode=MODES[top]),
    ]


def downpour_rows() -> list[Row]:
    """The rows of Downpour with two groups of one worker."""
    rows: list[Row] = []
    for top in (ARRIVAL, ""):
        what, mode = "P6, 2 groups of 1 worker, 1 server: server, for both", MODES[top]
        try:
            found = count(1, top, groups=2)
        except Refused as reason:
            rows.append(absent("", what, UNIT, str(reason), mode=mode))
            continue
        theory = f"least {2 * least(1)}: an update of each group's gradient, with values in one place"
        rows.append(row("", what, passes(found.servers), UNIT, note=f"{told(found.servers)}; {theory}", mode=mode))
    return rows


def reduction_rows(ranks: int) -> list[Row]:
    """The row of an all-reduce."""
    what, mode = f"P3, {ranks} ranks on one host, together", "kVisible"
    try:
        found = count_reduction(ranks)
    except Refused as reason:
        return [absent("", what, UNIT, str(reason), mode=mode)]
    theory = (
        f"least {2 * ranks}: every gradient is read, and every mean written; with torch's kernels {5 * ranks - 3}: "
        f"{ranks - 1} additions, a division, {ranks - 1} copies"
    )
    return [row("", what, passes(found), UNIT, note=f"{told(found)}; {theory}", mode=mode)]


def measure(options: argparse.Namespace) -> Sequence[Row]:
    rows: list[Row] = []
    for workers in options.workers:
        for top in MODES:
            say(f"  {workers} workers, {MODES[top]}")
            rows += rows_of(workers, top)
    say("  Downpour, 2 groups")
    rows += downpour_rows()
    for ranks in options.ranks:
        say(f"  all-reduce of {ranks} ranks")
        rows += reduction_rows(ranks)
    return rows


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3, 4])


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
