"""What it costs to go on after deaths: the pause when a worker of a synchronous group is killed, and snapshots.

The pause: two kinds of jobs take turns, and differ in the script alone. In one a step has one backward, so that the
survivors repeat the step (in-place recovery). In the other it has two, so that the whole group restarts. Worker 0/1 is
killed behind its 50th step. The pauses are those of the job's report: `others_waited_s`, from the last step of a
survivor to its repeated one, and `waited_s`, from the loss to the first step of the restarted group.

Snapshots: jobs of an MLP of 10.5 M parameters, Adam, 2 workers and 2 servers (126 MB each) that differ in `snapshot_s`
alone take turns. A turn is so many seconds of steps, and the next one begins when the last snapshot of this one is on
disk: what a job writes must not slow down another's steps.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import ROUNDS, Figure, Row, Samples, absent, interleave, row
from benchmarks.learning import run_program
from benchmarks.record import run_table
from benchmarks.sides import Refused, Side, Sides, cluster
from topotrain.extensions.checkpointing.checkpoint_reader import FOLDER, numbers

PROGRAM = Path(__file__).parent / "programs" / "mourner.py"
JOBS = {
    "Sandblaster, 3 workers": cluster(3, 2, top="snapshot_s: 0"),
    "Downpour, 2 groups of 2 workers": cluster(2, 2, 2, top="snapshot_s: 0"),
}
STEP, USUAL_S = "a synchronous step, 2 workers, MLP of 10.5 M parameters, Adam", 30.0
WRITTEN_S = 60.0
"""How long a snapshot may take until it is on disk."""


def once(sides: Sides, conf: str, steps: int, backwards: int) -> dict[str, float]:
    """The incident of one job. Raises Refused."""
    folder = run_program(sides, "death", conf, PROGRAM, str(steps), str(backwards)).parent
    (incident,) = json.loads((folder / "report.json").read_text())["incidents"]
    return dict(incident)


def pauses(rounds: int, steps: int) -> list[Row]:
    rows = []
    for name, conf in JOBS.items():
        kept, restarted, back = [], [], []
        with Sides() as sides:
            for _ in range(rounds):
                incident = once(sides, conf, steps, 1)
                kept.append(incident["others_waited_s"])
                back.append(incident["waited_s"])
                restarted.append(once(sides, conf, steps, 2)["waited_s"])
        what = f"{name}, one of them killed"
        note = f"the dead worker trains again after {Samples(tuple(back)).median:.2f} s"
        # The report does not tell the survivors of the group from the other groups.
        note += "; groups report steps four times a second" if "Downpour" in name else ""
        rows += [
            row(f"{what}: pause of the survivors", Samples(tuple(kept)).figure, "s", note, "in place"),
            row(f"{what}: pause of the group", Samples(tuple(restarted)).figure, "s", mode="group restarts"),
        ]
    return rows


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
        deadline = time.monotonic() + WRITTEN_S
        while numbers(self.folder, whole=False)[-1:] != numbers(self.folder)[-1:]:
            if time.monotonic() > deadline:
                raise Refused(f"a snapshot was not on disk within {WRITTEN_S:g} s")
            time.sleep(0.02)
        self.taken.append(self._newest() - before)
        return found

    @property
    def folder(self) -> Path:
        return self.side.folder / "work" / FOLDER

    def _newest(self) -> int:
        return max(numbers(self.folder, whole=False), default=0)


def snapshots(rounds: int, seconds: float) -> list[Row]:
    with Sides() as sides:
        try:
            turns = {}
            for each in (0.0, 1.0):
                conf = cluster(servers=2, top=f"snapshot_s: {each:g}")
                turns[f"{each:g}"] = Turns(sides.job(f"every {each:g} s", conf, 2, "mlp+adam"), seconds)
            found = interleave({name: turn.run for name, turn in turns.items()}, rounds)
        except Refused as reason:
            return [absent(STEP, "%", str(reason))]
    taken = {name: turn.taken[-rounds:] for name, turn in turns.items()}
    never, often = found["0"], found["1"]
    cost = Samples(
        tuple(
            (mine / its - 1) * seconds / max(1, count)
            for mine, its, count in zip(often.values, never.values, taken["1"], strict=True)
        )
    ).figure
    step = f"a step takes {never.median * 1e3:.1f} ms without; {rounds} turns of {seconds:g} s each"
    return [
        row(f"{STEP}: snapshot_s: 1 against 0", percent(often.over(never)), "%", step),
        row("from it: a snapshot costs", cost.times(1e3), "ms", f"{sum(taken['1'])} of them"),
        row("from it: one per 30 s costs", cost.times(100 / USUAL_S), "%"),
    ]


def percent(figure: Figure) -> Figure:
    """A ratio as what it is more than 1."""
    return Figure(*(100 * (value - 1) for value in (figure.value, figure.low, figure.high)))


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=400, help="of a job of which a worker is killed")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a turn")


def measure(options: argparse.Namespace) -> Sequence[Row]:
    return [*pauses(options.rounds, options.steps), *snapshots(options.rounds, options.seconds)]


if __name__ == "__main__":
    run_table("survivors", "Deaths of workers, and snapshots", measure, declare)
