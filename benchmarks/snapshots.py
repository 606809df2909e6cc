"""What snapshots cost a synchronous job: MLP of 10.5 M parameters, Adam, 2 workers, 2 servers; 126 MB each.

Rule: jobs that differ in `snapshot_s` alone take turns on an idle machine. A turn is so many seconds of steps, and the
next one begins when the last snapshot of this one is on disk: what a job writes must not slow down another's steps. How
many snapshots a turn really had is counted. At one per second the cost of one is seen best; from it follows that of one
per 30 s, which is measured, too, where a turn is long enough to have one in its own time (--seconds 31).
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import ROUNDS, Figure, Row, Samples, absent, interleave, row
from benchmarks.record import run_table, say
from benchmarks.sides import Refused, Side, Sides, cluster
from topotrain.extensions.checkpointing.checkpoint_reader import FOLDER, numbers

NAME, TITLE, GOALS = "snapshots", "What snapshots cost", ()

WHAT, BOUND, USUAL_S = "a synchronous step, 2 workers, MLP of 10.5 M parameters, Adam", "< 3", 30.0
WRITTEN_S = 60.0
"""How long a snapshot may take until it is on disk."""


@dataclass(slots=True)
class Turns:
    """One side's turns: `run` takes the steps of one, and returns its seconds per step."""

    side: Side
    seconds: float
    taken: list[int] = field(default_factory=list)
    _steps: int = 0

    def run(self) -> float:
        if not self._steps:
            self._steps = max(1, round(self.seconds / self.side.run(20)))
        before = self._newest()
        found = self.side.run(self._steps)
        self._settle()
        self.taken.append(self._newest() - before)
        return found

    @property
    def folder(self) -> Path:
        return self.side.folder / "work" / FOLDER

    def _newest(self) -> int:
        return max(numbers(self.folder, whole=False), default=0)

    def _settle(self) -> None:
        """Wait until nothing is being written any more."""
        deadline = time.monotonic() + WRITTEN_S
        while numbers(self.folder, whole=False)[-1:] != numbers(self.folder)[-1:]:
            if time.monotonic() > deadline:
                raise Refused(f"a snapshot was not on disk within {WRITTEN_S:g} s")
            time.sleep(0.02)


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a turn; 31 measures one snapshot per 30 s, too")
    parser.add_argument("--model", default="mlp+adam", help="another one to see whether this works: small+adam")


def percent(figure: Figure) -> Figure:
    """A ratio as what it is more than 1."""
    return Figure(*(100 * (value - 1) for value in (figure.value, figure.low, figure.high)))


def per_snapshot(every: Samples, never: Samples, seconds: float, taken: Sequence[int]) -> Samples:
    """Seconds that one snapshot has cost, by round. seconds: of a turn without any."""
    rounds = zip(every.values, never.values, taken, strict=True)
    return Samples(tuple((mine / its - 1) * seconds / max(1, count) for mine, its, count in rounds))


def measure(options: argparse.Namespace) -> Sequence[Row]:
    times = [0.0, 1.0, *([USUAL_S] if options.seconds > USUAL_S else [])]
    with Sides() as sides:
        try:
            turns = {
                f"{each:g}": Turns(
                    sides.job(f"every {each:g} s", cluster(servers=2, top=f"snapshot_s: {each:g}"), 2, options.model),
                    options.seconds,
                )
                for each in times
            }
            found = interleave({name: turn.run for name, turn in turns.items()}, options.rounds)
        except Refused as reason:
            return [absent("", WHAT, "%", str(reason), BOUND)]
    taken = {name: turn.taken[-options.rounds :] for name, turn in turns.items()}
    say(f"  snapshots in each turn: {taken}")
    step = (
        f"a step takes {found['0'].median * 1e3:.1f} ms without; {options.rounds} turns of {options.seconds:g} s each"
    )
    each = per_snapshot(found["1"], found["0"], options.seconds, taken["1"])
    rows = [
        row("", f"{WHAT}: snapshot_s: 1 against 0", percent(found["1"].over(found["0"])), "%", "", step),
        row("", "from it: a snapshot costs", each.figure.times(1e3), "ms", "", f"{sum(taken['1'])} of them"),
        row("", "from it: one per 30 s costs", each.figure.times(100 / USUAL_S), "%", BOUND),
    ]
    if "30" in found:
        note = f"{sum(taken['30'])} of them"
        rows.append(
            row("", f"{WHAT}: snapshot_s: 30 against 0", percent(found["30"].over(found["0"])), "%", BOUND, note)
        )
    else:
        note = "needs longer turns: --seconds 31"
        rows.append(absent("", f"{WHAT}: snapshot_s: 30 against 0", "%", note, BOUND))
    return rows


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
