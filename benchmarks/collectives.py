"""How all-reduce grows with the processes: ours over TCP and shared memory, beside Gloo's.

P processes on this machine, each with a `Relay` for every way, on our TCP transport and on shared memory, and one
member of Gloo. A time is that from the order to the last process's having all results. After the last round every
process compares every result with the sum that it should be (kAuto and kNaive: bit for bit).

Our TCP transport chooses its congestion control (reno on loopback), and Gloo takes the system's default, which the
machine of a table names: part of a difference is this alone.
"""

import argparse
from collections.abc import Sequence
from functools import partial

from benchmarks.harness import ROUNDS, Row, interleave, row
from benchmarks.programs.adder import BUCKET, GLOO, WAYS
from benchmarks.record import ROOT, run_table, say
from benchmarks.sides import Sides

PROGRAM = ROOT / "benchmarks" / "programs" / "adder.py"


def measure_size(size: int, megabytes: float, rounds: int) -> list[Row]:
    """All rows of so many processes, each way in its turn."""
    with Sides() as sides:
        side = sides.peer(f"{size} processes", "gloo", size, f"{megabytes:g}", script=PROGRAM)
        found = interleave({way: partial(side.run, 1, way=way) for way in (GLOO, *WAYS)}, rounds)
        side.ask(check=True)
    what, peer = f"{size} processes, {megabytes:g} MB", found.pop(GLOO)
    rows = [row(f"{what}: Gloo", peer.figure.times(1e3), "ms")]
    for way, mine in found.items():
        note, mode = f"{mine.median * 1e3:.1f} ms", f"buckets of {BUCKET // 1024} KB"
        rows.append(row(f"{what}: {way}", mine.over(peer), "x Gloo", note, mode))
    return rows


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--megabytes", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)


def measure(options: argparse.Namespace) -> Sequence[Row]:
    rows: list[Row] = []
    for size in options.processes:
        say(f"  {size} processes")
        rows += measure_size(size, options.megabytes, options.rounds)
    return rows


if __name__ == "__main__":
    run_table("collectives", "All-reduce, from 2 to 8 processes", measure, declare)
