"""Predicted against measured: the time of a step, and whether the fastest layout was known before it ran.

Three models, five layouts, five networks. For each case the model is probed, the job is predicted, run as a real one,
and measured: the time of a step is that of a worker, over all samples of the job. The probe is made right before the
job, because the machine is up to a third slower at other times of an hour. Cases run in shuffled order.

Cases of HELD_OUT are left out, so that constants can be looked at with the others. `--held-out` runs these cases only,
and writes a table of its own.

    python -m benchmarks.predictions --cases 6 --trial       the first six of the shuffled cases; nothing is written
    python -m benchmarks.predictions --held-out              at the end, once

The regret of a model on a network is the measured time of the layout that is predicted to be the fastest, over that of
the layout that is the fastest; both for as many samples, whatever an update of stale values is worth.
"""

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.harness import Figure, Row, absent, row
from benchmarks.record import environment, run_table, say
from benchmarks.sides import Refused, Side, Sides, cluster, topotrain

if TYPE_CHECKING:
    from topotrain.tools.prediction.prediction import Prediction
    from topotrain.tools.probe.probe_file import Probe

NAME, TITLE = "predictions", "Predicted against measured"
HELD_OUT_NAME, HELD_OUT_TITLE = "predictions_held_out", "Predicted against measured: cases that nothing was tuned on"
PROGRAM = Path(__file__).parent / "programs" / "predicted_steps.py"
WORKERS = 2
STRAGGLER, FACTOR = 1, 4
TURNS = 3
TURN_S = 3.0
FEWEST, MOST = 2, 200
"""Steps of a turn."""
SYNC_FREQ = 8

MODELS = ("char", "small", "cnn")
OUTER = "outer { type: kNesterov momentum: 0.9 learning_rate { type: kFixed base_lr: 0.7 } }"


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to train with two workers.

    period: steps after which it does the same again, and after which groups wait for one another. 0: they never wait.
    """

    workers: int
    servers: int = 1
    groups: int = 1
    server_groups: int = 1
    separate: bool = True
    inside: str = ""
    period: int = 1

    def steps_of_turn(self, step_s: float) -> int:
        """Whole periods that take about TURN_S. step_s: seconds of a step."""
        period = max(1, self.period)
        return period * math.ceil(min(MOST, max(FEWEST, round(TURN_S / max(step_s, 1e-4)))) / period)

    def conf(self, network: "Network") -> str:
        inside = " ".join(filter(None, (self.inside, network.inside)))
        return cluster(self.workers, self.servers, self.groups, self.server_groups, self.separate, inside)


@dataclass(frozen=True, slots=True)
class Network:
    """What lies between the processes, and whether one worker is slow."""

    inside: str = ""
    transport: str = ""
    straggler: bool = False


LAYOUTS: Mapping[str, Layout] = {
    "Sandblaster": Layout(WORKERS),
    "AllReduce": Layout(WORKERS, WORKERS, separate=False),
    "Downpour": Layout(1, groups=WORKERS, period=0),
    "Hogwild": Layout(1, groups=WORKERS, server_groups=WORKERS, separate=False, period=0),
    "islands": Layout(1, groups=WORKERS, inside=f"sync_freq: {SYNC_FREQ} {OUTER}", period=SYNC_FREQ),
}
NETWORKS: Mapping[str, Network] = {
    "shared memory": Network(),
    "TCP": Network(transport="kTcp"),
    "100 Mbit/s, 20 ms": Network("link { bandwidth: 100 delay: 20 }"),
    "1 Gbit/s, 1 ms": Network("link { bandwidth: 1000 delay: 1 }"),
    "straggler": Network(straggler=True),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One model, in one layout, on one network."""

    model: str
    layout: str
    network: str

    def __str__(self) -> str:
        return f"{self.model}, {self.layout}, {self.network}"


CASES = tuple(Case(model, layout, network) for model in MODELS for layout in LAYOUTS for network in NETWORKS)
_CHOSEN = Random(19).sample([case for case in CASES if case.model != "cnn"], 15)
HELD_OUT = frozenset({*_CHOSEN, *(case for case in CASES if case.model == "cnn")})
"""All cases of one model, and fifteen of the others."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case with both figures: seconds of a step of one worker."""

    case: Case
    predicted: float
    measured: Figure

    @property
    def job_s(self) -> float:
        """Measured seconds for as many samples as one batch of the loader has."""
        return self.measured.value / LAYOUTS[self.case.layout].groups

    @property
    def predicted_job_s(self) -> float:
        """The same, as it was predicted."""
        return self.predicted / LAYOUTS[self.case.layout].groups

    @property
    def error(self) -> float:
        """The relative error of the prediction; above 0 it was too long."""
        return self.predicted / self.measured.value - 1

    def row(self) -> Row:
        note = f"predicted {self.predicted * 1e3:.1f} ms, {100 * self.error:+.0f} %"
        return row(str(self.case), self.measured.times(1e3), "ms", note=note)


# --- predicting ---


def probe(model: str, folder: Path, seconds: float) -> "Probe":
    """Probe the program with this model, as a user does. Raises Refused."""
    from topotrain.tools.probe.probe_file import load_probe

    file = folder / f"{model}.json"
    words = ("probe", "--seconds", f"{seconds:g}", "--quiet", "--out", str(file), str(PROGRAM), "--model", model)
    topotrain(*words, folder=folder)
    return load_probe(file)


def prediction(case: Case, known: "Probe") -> "Prediction":
    """What the product says about a case."""
    from topotrain.config import job_file
    from topotrain.tools.prediction.machines import Machines
    from topotrain.tools.prediction.predict import predict

    network = NETWORKS[case.network]
    sets = [f"cluster.transport={network.transport}"] if network.transport else []
    job = job_file.loads(LAYOUTS[case.layout].conf(network), str(case), sets)
    stragglers = {STRAGGLER: float(FACTOR)} if network.straggler else {}
    return predict(job, known, Machines(stragglers=stragglers).with_job(job))


def step_s(found: "Prediction", known: "Probe", layout: Layout) -> float:
    """The time of a step of one worker, from the samples of the whole job in a second."""
    return WORKERS * known.batch.size / layout.workers / found.samples_per_s


# --- measuring ---


def measure_case(case: Case, predicted_s: float) -> Figure:
    """Seconds of a step of one worker, from a real job. Raises Refused."""
    layout, network = LAYOUTS[case.layout], NETWORKS[case.network]
    model = f"{case.model}/{STRAGGLER}x{FACTOR}" if network.straggler else case.model
    with Sides() as sides:
        side = sides.job(str(case), layout.conf(network), WORKERS, model, network.transport, script=PROGRAM)
        turn(side, layout, FEWEST * max(1, layout.period), predicted_s)
        found = [turn(side, layout, layout.steps_of_turn(predicted_s), predicted_s) for _ in range(TURNS)]
    return Figure(median(found), min(found), max(found))


def turn(side: Side, layout: Layout, count: int, predicted_s: float) -> float:
    """Seconds of a step of one worker, in a turn of about so many steps."""
    if layout.period:
        answers = side.ask(steps=count)
        return max(answer["seconds"] / answer["made"] for answer in answers)
    # Groups at their own pace: each makes as many steps as it can.
    answers = side.ask(lasting=max(TURN_S, count * predicted_s))
    return len(answers) / sum(answer["made"] / answer["seconds"] for answer in answers)


# --- the table ---


def summary(outcomes: Sequence[Outcome]) -> list[Row]:
    """The errors over all cases, and the regret of each model on each network."""
    if not outcomes:
        return []
    errors = sorted(100 * abs(outcome.error) for outcome in outcomes)
    what = f"error of the predicted step, {len(errors)} cases"
    rows = [
        row(f"{what}: median", Figure(median(errors), errors[0], errors[-1]), "%"),
        row(f"{what}: nine of ten are below", nine_of_ten(errors), "%"),
    ]
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.case.model, outcome.case.network), []).append(outcome)
    regrets = [_regret(group) for group in groups.values() if len(group) > 1]
    if regrets:
        worst = max(value for value, _ in regrets)
        how = "; ".join(text for value, text in regrets if value > 1)
        what = (
            f"measured time of the layout that is predicted to be the fastest, over the fastest, {len(regrets)} times"
        )
        values = [value for value, _ in regrets]
        rows.append(row(what, Figure(worst, min(values), worst), "×, at worst", how))
    return rows


def nine_of_ten(values: Sequence[float]) -> float:
    """The smallest of these values that nine of ten do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)]


def _regret(group: Sequence[Outcome]) -> tuple[float, str]:
    """The regret of the advice, and what it was."""
    advised = min(group, key=lambda outcome: outcome.predicted_job_s)
    best = min(group, key=lambda outcome: outcome.job_s)
    where = f"{best.case.model}, {best.case.network}"
    regret = advised.job_s / best.job_s
    return regret, f"{where}: {advised.case.layout} instead of {best.case.layout}, {regret:.2f}"


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this table."""
    parser.add_argument("--held-out", action="store_true", help="only the cases that are kept apart")
    parser.add_argument("--cases", type=int, default=0, metavar="N", help="only the first N of them; 0: all")
    parser.add_argument("--probe-seconds", type=float, default=15.0, help="of the probe before each case")


def chosen(options: argparse.Namespace) -> list[Case]:
    """The cases to run, in their order."""
    cases = [case for case in CASES if (case in HELD_OUT) == options.held_out]
    Random(1).shuffle(cases)
    return cases[: options.cases or None]


def measure(options: argparse.Namespace) -> Sequence[Row]:
    """All rows: of each case, and of all together."""
    # Predictions are made by this process, and must not take more cores than the jobs.
    os.environ.update({name: value for name, value in environment().items() if name.endswith("_NUM_THREADS")})
    rows: list[Row] = []
    outcomes: list[Outcome] = []
    cases = chosen(options)
    with Sides() as sides:
        folder = sides.room("probes")
        for number, case in enumerate(cases, 1):
            try:
                known = probe(case.model, folder, options.probe_seconds)
                predicted = step_s(prediction(case, known), known, LAYOUTS[case.layout])
                outcomes.append(Outcome(case, predicted, measure_case(case, predicted)))
                rows.append(outcomes[-1].row())
                say(f"  [{number}/{len(cases)}] {case}: {rows[-1].figure:.1f} ms, {rows[-1].note}")
            except (Refused, ValueError) as reason:
                say(f"  [{number}/{len(cases)}] {case}: {reason}")
                rows.append(absent(str(case), "ms", str(reason).splitlines()[0]))
    return [*summary(outcomes), *sorted(rows, key=lambda found: found.what)]


if __name__ == "__main__":
    name, title = (HELD_OUT_NAME, HELD_OUT_TITLE) if "--held-out" in sys.argv else (NAME, TITLE)
    run_table(name, title, measure, declare, module=NAME)
