"""One model split over two processes: branches side by side, pipelines of two stages, and what travels between them.

Rule: two workers share 2 cores, each with one thread; the process that has the whole model has one thread, too. A
figure over "one process" is therefore at best 0.5. Every side takes the same steps over the same 1,024
samples.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from benchmarks.harness import ROUNDS, Figure, Row, Samples, absent, interleave, row
from benchmarks.programs import splitter
from benchmarks.record import run_table, say
from benchmarks.sides import ROOT, Side, Sides, attempt, cluster

NAME, TITLE, GOALS = "splitting", "One model split over two workers of a group", ()

SCRIPT = ROOT / "benchmarks" / "programs" / "splitter.py"
STAGES = 2
MICROBATCHES = (1, 2, 4, 8)
BRANCHES: Mapping[str, str] = {
    "by location": 'partition { match: "^left" partition_dim: -1 location: 0 }\n'
    'partition { match: "^right" partition_dim: -1 location: 1 }',
    "by features": 'partition { match: "^left|^right" partition_dim: 1 }',
    "by samples, nothing split": "grads: kHidden",
}


def conf(top: str) -> str:
    """Two workers, a server beside each, on shared memory where that is there."""
    return cluster(workers=2, servers=2, separate=False, top=top)


def pipeline(microbatches: int) -> str:
    """The text of the split into two stages."""
    return (
        'partition { match: "^first" partition_dim: -1 location: 0 }\n'
        'partition { match: "^second|^head" partition_dim: -1 location: 1 }\n'
        f"microbatches: {microbatches}"
    )


def bubble(microbatches: int, stages: int = STAGES) -> float:
    """The share of its time that a stage waits where all stages take as long: (S - 1) / (M + S - 1)."""
    return (stages - 1) / (microbatches + stages - 1)


def planned(net: str, top: str) -> int:
    """Bytes per step over the edges of the cut graph, there and back, as `topotrain plan` says."""
    from topotrain import textproto
    from topotrain.front.cutting import cut_of

    torch.manual_seed(0)
    job = textproto.loads(conf(top), "the conf")
    cut = cut_of(job, splitter.NETS[net](), None, [f"{splitter.SAMPLES}x{splitter.WIDTH}"])
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

    def __init__(self, net: str, tops: Mapping[str, str], steps: int) -> None:
        self.net, self.tops, self.steps = net, tops, steps
        self.missing: dict[str, str] = {}
        self.told: dict[str, list[Told]] = {}

    def run(self, rounds: int) -> Mapping[str, Samples]:
        """Seconds per step of each side; "one" is one process."""
        with Sides() as sides:
            living = {"one": sides.plain(f"{self.net} one", SCRIPT, f"plain/{self.net}", 1)}
            for name, top in self.tops.items():
                side = attempt(self._start, sides, name, top)
                if isinstance(side, Side):
                    living[name] = side
                else:
                    self.missing[name] = side
                    say(f"  {self.net}, {name}: {side}")
            turns = {name: partial(self._turn, name, side) for name, side in living.items()}
            found = interleave(turns, rounds)
        self.told = {name: told[-rounds:] for name, told in self.told.items()}  # without the round to warm up
        return found

    def _start(self, sides: Sides, name: str, top: str) -> Side:
        return sides.job(f"{self.net} {name}", conf(top), 2, f"job/{self.net}", script=SCRIPT)

    def _turn(self, name: str, side: Side) -> float:
        answers = side.ask(steps=self.steps)

        def added(what: str) -> float:
            return sum(float(answer.get(what, 0)) for answer in answers)

        sent = int(added("sent")) // self.steps
        self.told.setdefault(name, []).append(Told(added("seconds"), added("computed"), added("waited"), sent))
        return max(float(answer["seconds"]) for answer in answers) / self.steps

    def share(self, name: str, of: Callable[[Told], float]) -> Figure:
        """Percent of the workers' time."""
        return Samples(tuple(of(told) / told.seconds for told in self.told[name])).figure.times(100)

    def work(self, name: str) -> float:
        """Milliseconds of processor time per step, all processes together."""
        return median(told.computed for told in self.told[name]) / self.steps * 1e3


def measure_branches(rounds: int, steps: int) -> list[Row]:
    """The two-branch net against one process, and against data parallelism on the same two cores."""
    turns = Turns("branches", BRANCHES, steps)
    found = turns.run(rounds)
    alone = f"one process takes {found['one'].median * 1e3:.0f} ms of time, {turns.work('one'):.0f} of a processor"
    rows = []
    for mode in BRANCHES:
        what = "two branches: a step over the same step in one process"
        if mode in turns.missing:
            rows.append(absent("", what, "×", turns.missing[mode], "", mode))
        else:
            rows.append(row("", what, found[mode].over(found["one"]), "×", "", _work(alone, turns, mode), mode))
    return rows + _moved(turns)


def measure_pipeline(rounds: int, steps: int) -> list[Row]:
    """Two stages with more and more micro-batches."""
    turns = Turns("stages", {f"M = {count}": pipeline(count) for count in MICROBATCHES}, steps)
    found = turns.run(rounds)
    alone = f"one process takes {found['one'].median * 1e3:.0f} ms of time, {turns.work('one'):.0f} of a processor"
    rows = []
    for count in MICROBATCHES:
        mode = f"M = {count}"
        if mode in turns.missing:
            rows.append(absent("", "pipeline of two stages", "×", turns.missing[mode], "", mode))
            continue
        ideal = 1 / STAGES / (1 - bubble(count))
        note = f"{_work(alone, turns, mode)}; {ideal:.2f} if the bubble were all"
        ratio = found[mode].over(found["one"])
        rows.append(
            row("", "pipeline of two stages: a step over the same step in one process", ratio, "×", "", note, mode)
        )
    for count in MICROBATCHES:
        mode = f"M = {count}"
        if mode not in turns.missing:
            formula = f"the bubble's formula: (S-1)/(M+S-1) = {100 * bubble(count):.0f} %"
            idle = turns.share(mode, lambda told: told.seconds - told.computed)
            waits = turns.share(mode, lambda told: told.waited).value
            note = f"{formula}; {waits:.0f} % are waits for values of the other stage"
            rows.append(row("", "the same: time in which workers do not compute", idle, "%", "", note, mode))
    return rows + _moved(turns)


def _work(alone: str, turns: Turns, mode: str) -> str:
    return f"{alone}; here {turns.work(mode):.0f} of processors"


def _moved(turns: Turns) -> list[Row]:
    """Bytes counted where they are sent, beside the plan's."""
    rows = []
    for mode, told in turns.told.items():
        sent = told[-1].sent
        if not sent:
            continue
        plan = planned(turns.net, turns.tops[mode])
        what = f"{turns.net}: bytes from worker to worker per step"
        note = f"{sent:,} bytes counted where they are sent, {plan:,} by the plan"
        rows.append(row("", what, sent / 1e6, "MB", "", note, mode))
    return rows


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=2, help="per turn")


def measure(options: argparse.Namespace) -> Sequence[Row]:
    rows = []
    for part in (measure_branches, measure_pipeline):
        say(f"  {part.__name__.removeprefix('measure_')}")
        rows += part(options.rounds, options.steps)
    return rows


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
