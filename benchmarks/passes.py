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
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.exchange import ARRIVAL, HIDDEN, MEGABYTES, PUSHER
from benchmarks.harness import Row, absent, row
from benchmarks.programs.counting import FOLDER, Counts
from benchmarks.record import run_table, say
from benchmarks.sides import Refused, Sides, cluster

NAME, TITLE, GOALS = "passes", "Passes over memory, counted", ()

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


def count(workers: int, top: str, servers: int = 1, separate: bool = True, way: str = "step") -> Passes:
    """Run a job and count one of its steps. Raises Refused."""
    with TemporaryDirectory(prefix="bench-passes-") as folder, _variable(folder), Sides() as sides:
        conf = cluster(workers, servers, separate=separate, top=f'{top} import: "benchmarks.programs.counting"')
        side = sides.job("passes", conf, workers, way, "" if not separate else "kShm", script=PUSHER)
        side.run(STEPS)
        found = [dict(answer["counts"]) for answer in side.ask(count=1)]
        side.run(1)  # servers write the counts of a step when the next one begins
        files = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    if not any(str(COUNTED) in by_step for by_step in files):
        raise Refused("no server has counted")
    return Passes(merged([by_step.get(str(COUNTED), {}) for by_step in files]), merged(found))


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
    what = f"{workers} worker{'s' * (workers > 1)} 1 server"
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


def measure(options: argparse.Namespace) -> Sequence[Row]:
    rows: list[Row] = []
    for workers in options.workers:
        for top in MODES:
            say(f"  {workers} workers, {MODES[top]}")
            rows += rows_of(workers, top)
    return rows


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 3])


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
