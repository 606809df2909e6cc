"""What compression brings on a slow link, and what it costs on a fast one.

One step of Sandblaster, four workers and one server, on a model of 4.5 MB: over a pretended link of 100 Mbit/s, where
the wire is what a step takes, and over TCP inside the host, where the processors are. Times are ratios to the same job
without compression; the arithmetic is the share of the bytes.
"""

import argparse
from collections.abc import Sequence
from functools import partial

from benchmarks.harness import ROUNDS, Row, interleave, row
from benchmarks.record import run_table
from benchmarks.sides import Sides, cluster

NAME, TITLE = "compressed", "Compression"

MBIT = 100
LINK = f"link {{ bandwidth: {MBIT} }}"
RATIO = 0.01
SHARES = {"kFp16": 1 / 2, "kBf16": 1 / 2, "kInt8": 1 / 4 + 1 / 512, "kTopK": 2 * RATIO}  # of float32's bytes
HIDDEN = "grads: kHidden"
WHERE = {f"{MBIT} Mbit/s": (LINK, 1), "loopback TCP": ("transport: kTcp", 8)}
"""Place -> what the cluster block says of it, and steps per turn: seconds each on the link, 40 ms on loopback."""


def steps(where: str, inside: str, rounds: int, count: int) -> list[Row]:
    """All kinds in turn in one place."""
    with Sides() as sides:
        living = {
            kind: sides.job(
                f"{kind} {where}",
                cluster(4, 1, inside=f"{inside} compression: {kind} compression_ratio: {RATIO}", top=HIDDEN),
                4,
                "small",
            )
            for kind in ("kNone", *SHARES)
        }
        found = interleave({kind: partial(side.run, count) for kind, side in living.items()}, rounds)
    rows = [row("", f"{where}: step without compression", found["kNone"].figure.times(1e3), "ms", mode="kHidden")]
    for kind, share in SHARES.items():
        note = f"{share:.1%} of the bytes"
        rows.append(row("", f"{where}: {kind}", found[kind].over(found["kNone"]), "× kNone", "", note, "kHidden"))
    return rows


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=0, help="per turn; 0: as many as the place needs")


def measure(options: argparse.Namespace) -> Sequence[Row]:
    return [
        found
        for where, (inside, count) in WHERE.items()
        for found in steps(where, inside, options.rounds, options.steps or count)
    ]


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
