"""One model split over two processes: branches side by side, and pipelines of two stages.

Rule: two workers share 2 cores, each with one thread; the process that has the whole model has one thread, too. A
figure over "one process" is therefore at best 0.5. Every side takes the same steps over 2,048 samples. What the cores
lose when both are busy is measured apart, by two processes that do not know of each other.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.harness import ROUNDS, Row, interleave, ratio, row
from benchmarks.record import run_table, say
from benchmarks.sides import Side, Sides, cluster, gather

STAGES = 2
WHOLE, HALVES = "one process", "halves"
OVER = "a step over the same step in one process"
BRANCHES: Mapping[str, str] = {
    "by location": 'partition { match: "^left" partition_dim: -1 location: 0 }\n'
    'partition { match: "^right" partition_dim: -1 location: 1 }',
    "by features": 'partition { match: "^left|^right" partition_dim: 1 }',
    "by samples, nothing split": "grads: kHidden",
}


@dataclass(frozen=True, slots=True)
class Way:
    """A pipeline: its number of micro-batches, and 1F1B (with the loss inside the model) or GPipe."""

    micros: int
    interleaved: bool = False

    @property
    def name(self) -> str:
        return f"{'1F1B' if self.interleaved else 'GPipe'}, M = {self.micros}"

    @property
    def model(self) -> str:
        return "stages with loss" if self.interleaved else "stages"

    @property
    def top(self) -> str:
        """The text of the split into two stages."""
        return (
            'partition { match: "^first" partition_dim: -1 location: 0 }\n'
            'partition { match: "^second|^head" partition_dim: -1 location: 1 }\n'
            f"microbatches: {self.micros}\n"
            f"schedule: {'k1F1B' if self.interleaved else 'kGPipe'}"
        )

    @property
    def bound(self) -> float:
        """A step over one process's if stages take as long and the bubble is all that is lost."""
        return (self.micros + STAGES - 1) / (self.micros * STAGES)


WAYS = (*map(Way, (1, 2, 4, 8)), Way(4, True), Way(8, True))


def conf(top: str) -> str:
    """Two workers, a server beside each, on shared memory where that is there."""
    return cluster(workers=2, servers=2, separate=False, top=top)


def measure_branches(rounds: int, steps: int) -> list[Row]:
    """The two-branch net against one process, and against data parallelism on the same two cores."""
    with Sides() as sides:
        starts: dict[str, Callable[[], Side]] = {
            WHOLE: lambda: sides.peer("one", "alone", 1, "branches/2"),
            HALVES: lambda: sides.peer("halves", "alone", 2, "branches"),
            **{mode: partial(sides.job, mode, conf(top), 2, "branches") for mode, top in BRANCHES.items()},
        }
        living, missing = gather(starts)
        found = interleave({name: partial(side.run, steps) for name, side in living.items()}, rounds)
    what = "two branches: two processes that share nothing, half the samples each, over one process"
    apart = row(what, found[HALVES].over(found[WHOLE]), "×", mode="two cores at once")
    return [apart, *(ratio(f"two branches: {OVER}", found, missing, mode, WHOLE, "×", mode=mode) for mode in BRANCHES)]


def measure_pipeline(rounds: int, steps: int) -> list[Row]:
    """Two stages with more and more micro-batches."""
    with Sides() as sides:
        starts: dict[str, Callable[[], Side]] = {WHOLE: lambda: sides.peer("one", "alone", 1, "stages/2")}
        starts |= {way.name: partial(sides.job, way.name, conf(way.top), 2, way.model) for way in WAYS}
        living, missing = gather(starts)
        found = interleave({name: partial(side.run, steps) for name, side in living.items()}, rounds)
    what = f"pipeline of two stages: {OVER}"
    notes = {way.name: f"{way.bound:.2f} if the bubble were all" for way in WAYS}
    return [ratio(what, found, missing, name, WHOLE, "×", note, name) for name, note in notes.items()]


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=3, help="per turn")


def measure(options: argparse.Namespace) -> Sequence[Row]:
    rows = []
    for part in (measure_branches, measure_pipeline):
        say(f"  {part.__name__.removeprefix('measure_')}")
        rows += part(options.rounds, options.steps)
    return rows


if __name__ == "__main__":
    run_table("splitting", "One model split over two workers of a group", measure, declare)
