"""One model split over two processes: branches side by side, pipelines of two stages, and what travels between them.

Rule: two workers share 2 cores, each with one thread; the process that has the whole model has one thread, too. A
figure over "one process" is therefore at best 0.5. Every side takes the same steps over the same 2,048
samples. What the cores lose when both are busy, and what a batch loses by being cut into parts, is measured apart: by
two processes that do not know of each other, and by one process that takes the parts one after the other.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from benchmarks.harness import ROUNDS, Figure, Row, Samples, absent, interleave, row
from benchmarks.programs import splitter
from benchmarks.record import ROOT, run_table, say
from benchmarks.sides import Side, Sides, attempt, cluster

SCRIPT = ROOT / "benchmarks" / "programs" / "splitter.py"
STAGES = 2
MICROBATCHES = (1, 2, 4, 8)
INTERLEAVED = (4, 8)
WHOLE = "one"
HALVES = "halves"
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
    def net(self) -> str:
        return "losing" if self.interleaved else "stages"

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
        return 1 / STAGES / (1 - bubble(self.micros))


WAYS = (*(Way(count) for count in MICROBATCHES), *(Way(count, True) for count in INTERLEAVED))


def conf(top: str) -> str:
    """Two workers, a server beside each, on shared memory where that is there."""
    return cluster(workers=2, servers=2, separate=False, top=top)


def bubble(microbatches: int, stages: int = STAGES) -> float:
    """The share of its time that a stage waits where all stages take as long: (S - 1) / (M + S - 1)."""
    return (stages - 1) / (microbatches + stages - 1)


def planned(net: str, top: str) -> int:
    """Bytes per step over the edges of the cut graph, there and back, as `topotrain plan` says."""
    from topotrain.config import job_file
    from topotrain.tools.plan.model_cut import cut_of

    torch.manual_seed(0)
    job = job_file.loads(conf(top), "the conf")
    arguments = [f"{splitter.SAMPLES}x{splitter.INPUTS}"]
    if net == "losing":
        arguments.append(f"{splitter.SAMPLES}:int64")
    cut = cut_of(job, splitter.NETS[net](), None, arguments)
    if cut is None:
        return 0
    return sum(sum(cut.plan.bill.pairs(back).values()) for back in (False, True))


@dataclass(frozen=True, slots=True)
class Told:
    """What the workers of a side told of one turn: seconds of all of them together, bytes that left per step."""

    seconds: float
    computed: float
    waited: float
    sent: int


class Turns:
    """Sides that take turns, and what their workers told of each turn."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.missing: dict[str, str] = {}
        self.told: dict[str, list[Told]] = {}
        self.found: Mapping[str, Samples] = {}
        self._turns: dict[str, Callable[[], float]] = {}

    def plain(self, sides: Sides, net: str, parts: Sequence[int] = (1,), processes: bool = False) -> None:
        """One process with the whole batch, in so many parts; and two that have half of it each."""
        side = sides.plain(f"{net} one", SCRIPT, f"plain/{net}", 1)
        for count in parts:
            self._turns[one(count)] = partial(self._turn, one(count), side, parts=count)
        if processes:
            side = sides.plain(f"{net} halves", SCRIPT, f"half/{net}", 2)
            self._turns[HALVES] = partial(self._turn, HALVES, side)

    def job(self, sides: Sides, net: str, name: str, top: str) -> None:
        """Two workers of topotrain."""
        side = attempt(self._start, sides, net, name, top)
        if isinstance(side, Side):
            self._turns[name] = partial(self._turn, name, side)
        else:
            self.missing[name] = side
            say(f"  {net}, {name}: {side}")

    def run(self, rounds: int) -> None:
        """Measure seconds per step of each."""
        self.found = interleave(self._turns, rounds)
        self.told = {name: told[-rounds:] for name, told in self.told.items()}  # without the round to warm up

    def _start(self, sides: Sides, net: str, name: str, top: str) -> Side:
        return sides.job(f"{net} {name}", conf(top), 2, f"job/{net}", script=SCRIPT)

    def _turn(self, name: str, side: Side, **order: int) -> float:
        answers = side.ask(steps=self.steps, **order)

        def added(what: str) -> float:
            return sum(float(answer.get(what, 0)) for answer in answers)

        sent = int(added("sent")) // self.steps
        self.told.setdefault(name, []).append(Told(added("seconds"), added("computed"), added("waited"), sent))
        return max(float(answer["seconds"]) for answer in answers) / self.steps

    def over(self, name: str, other: str = WHOLE) -> Figure:
        """Seconds of a step over another side's."""
        return self.found[name].over(self.found[other])

    def share(self, name: str, of: Callable[[Told], float]) -> Figure:
        """Percent of the workers' time."""
        return Samples(tuple(of(told) / told.seconds for told in self.told[name])).figure.times(100)

    def speed(self, name: str) -> str:
        """In words."""
        seconds = self.found[name].median
        work = median(told.computed for told in self.told[name]) / self.steps
        rate = splitter.SAMPLES / seconds
        return f"{rate:,.0f} samples/s; {seconds * 1e3:.0f} ms per step, {work * 1e3:.0f} ms of processors"


def one(parts: int) -> str:
    """The name of the one process that takes the batch in so many parts."""
    return WHOLE if parts == 1 else f"{WHOLE}, {parts} parts"


def measure_branches(rounds: int, steps: int) -> list[Row]:
    """The two-branch net against one process, and against data parallelism on the same two cores."""
    turns = Turns(steps)
    with Sides() as sides:
        turns.plain(sides, "branches", processes=True)
        for mode, top in BRANCHES.items():
            turns.job(sides, "branches", mode, top)
        turns.run(rounds)
    what = "two branches: a step over the same step in one process"
    rows = [_apart(turns, "two branches")]
    for mode in BRANCHES:
        if mode in turns.missing:
            rows.append(absent(what, "×", turns.missing[mode], mode))
        else:
            rows.append(row(what, turns.over(mode), "×", _beside(turns, mode), mode))
    return rows + [_moved(turns, "branches", mode, BRANCHES[mode]) for mode in list(BRANCHES)[:2] if mode in turns.told]


def measure_pipeline(rounds: int, steps: int) -> list[Row]:
    """Two stages with more and more micro-batches."""
    turns = Turns(steps)
    with Sides() as sides:
        turns.plain(sides, "stages", MICROBATCHES)
        for way in WAYS:
            turns.job(sides, way.net, way.name, way.top)
        turns.run(rounds)
    living = [way for way in WAYS if way.name not in turns.missing]
    what = "pipeline of two stages: a step over the same step in one process"
    rows = [absent(what, "×", turns.missing[way.name], way.name) for way in WAYS if way.name in turns.missing]
    for parts in MICROBATCHES[1:]:
        name = one(parts)
        cut = "one process: a step in parts over a step in one"
        rows.append(row(cut, turns.over(name), "×", _beside(turns, name), f"{parts} parts"))
    for way in living:
        note = f"{way.bound:.2f} if the bubble were all; {_beside(turns, way.name)}"
        rows.append(row(what, turns.over(way.name), "×", note, way.name))
    for way in living:
        rows.append(_over_bound(turns, way))
    for way in living:
        note = f"the bubble's formula: (S-1)/(M+S-1) = {100 * bubble(way.micros):.0f} %; {_waits(turns, way.name)}"
        idle = turns.share(way.name, lambda told: told.seconds - told.computed)
        rows.append(row("the same: time in which workers do not compute", idle, "%", note, way.name))
    return rows + [_moved(turns, way.net, way.name, way.top) for way in (*living[:1], *living[-1:])]


def _apart(turns: Turns, net: str) -> Row:
    what = f"{net}: two processes that share nothing, half the samples each, over one process"
    return row(what, turns.over(HALVES), "×", _beside(turns, HALVES), "two cores at once")


def _over_bound(turns: Turns, way: Way) -> Row:
    """What is lost besides the bubble and the smaller parts."""
    figure = turns.over(way.name, one(way.micros)).times(1 / way.bound)
    what = "the same over its bound: one process's step in as many parts, times (M+S-1)/(M·S)"
    return row(what, figure, "×", "1 if nothing were lost but the bubble", way.name)


def _beside(turns: Turns, name: str) -> str:
    return f"{turns.speed(name)}; one process: {turns.speed(WHOLE)}"


def _waits(turns: Turns, name: str) -> str:
    return f"{turns.share(name, lambda told: told.waited).value:.0f} % are waits for values of the other stage"


def _moved(turns: Turns, net: str, mode: str, top: str) -> Row:
    """Bytes counted where they are sent, beside the plan's."""
    sent = turns.told[mode][-1].sent
    note = f"{sent:,} bytes counted where they are sent, {planned(net, top):,} by the plan"
    return row(f"{net}: bytes from worker to worker per step", sent / 1e6, "MB", note, mode)


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
