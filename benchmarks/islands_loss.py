"""What islands cost in loss: `python -m benchmarks.islands --only loss [--seeds 3] [--ways diloco-10 diloco-50]`.

Each way is a real job of four workers that reads 400 steps of 256 characters for each worker. The model is a
transformer of 0.47 M parameters on the characters of Python's help pages, and the optimizer is AdamW with a cosine.
All ways read the same samples. The figure is the held-out loss of the job's final parameters. It does not depend on the
speed of the machine, but where no worker waits the order of arrival changes its last digits.

Gaps are to AllReduce with the same seeds, in which every step has the mean gradient of all four.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean

from benchmarks.harness import Figure, Row, absent, row
from benchmarks.learning import run_program
from benchmarks.programs.characters import saved_loss
from benchmarks.record import say
from benchmarks.sides import Refused, Sides, cluster

PROGRAM = Path(__file__).parent / "programs" / "characters.py"
WORKERS, STEPS, BATCH, RATE = 4, 400, 4, 3e-3
LIMIT_S = 900.0
TCP = "transport: kTcp"
"""Bytes over loopback are counted as on any other link."""
NESTEROV = "outer {{ type: kNesterov momentum: {} learning_rate {{ type: kFixed base_lr: 0.7 }} }}"
SHORT, PAPER = NESTEROV.format(0.5), NESTEROV.format(0.9)
"""The outer momentum of the papers is for jobs of many more rounds than these."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train.

    Attributes:
        what: in the table.
        conf: the job.
        groups: worker groups, which have batches of their own.
        workers: of the job.
        rate: of the script's optimizer.
        deaths: 1:100 for a worker 1 that dies behind its step 100.
    """

    what: str
    conf: str
    groups: int = WORKERS
    workers: int = WORKERS
    rate: float = RATE
    deaths: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """The arguments of the program, without the seed."""
        sizes = ["--samples", str(STEPS * BATCH * self.workers), "--batch", str(BATCH * self.workers // self.groups)]
        return [*sizes, "--rate", str(self.rate), *(("--deaths", *self.deaths) if self.deaths else ())]


def _islands(inside: str, outer: str = SHORT) -> str:
    return cluster(1, 1, WORKERS, inside=f"{TCP} {outer} {inside}")


def _server_groups(inside: str) -> str:
    return cluster(1, 1, WORKERS, WORKERS, separate=False, inside=f"{TCP} sync_freq: 10 {inside}")


def _streaming(overlap: int, keep: str) -> Way:
    inside = f"sync_freq: 24 fragments: 6 overlap: {overlap} keep: {keep}"
    return Way(f"Streaming: sync_freq 24, 6 fragments, overlap {overlap}, {keep}", _islands(inside))


DECOUPLED = "sync_freq: 24 fragments: 6 quorum: 1"
ALL, ALONE = "allreduce", "alone"
WAYS: Mapping[str, Way] = {
    ALL: Way("AllReduce, 4 workers", cluster(WORKERS, WORKERS, separate=False, inside=TCP), groups=1),
    ALONE: Way("one worker with a quarter of the samples", cluster(1, 1, inside=TCP), groups=1, workers=1),
    "kmaster": Way("Hogwild, kMaster, sync_freq 10", _server_groups("")),
    "kmaster-quarter": Way("Hogwild, kMaster, sync_freq 10, a quarter of the rate", _server_groups(""), rate=RATE / 4),
    "ring": Way("Hogwild, kRingAverage, sync_freq 10", _server_groups("agreement: kRingAverage")),
    "diloco-10": Way("DiLoCo, sync_freq 10", _islands("sync_freq: 10")),
    "diloco-10-paper": Way("DiLoCo, sync_freq 10, outer momentum 0.9", _islands("sync_freq: 10", PAPER)),
    "diloco-50": Way("DiLoCo, sync_freq 50", _islands("sync_freq: 50")),
    "diloco-10-e3m0": Way("DiLoCo, sync_freq 10, kE3M0", _islands("sync_freq: 10 compression: kE3M0")),
    "streaming-2-add": _streaming(2, "kAdd"),
    "streaming-2-blend": _streaming(2, "kBlend"),
    "streaming-3-add": _streaming(3, "kAdd"),
    "streaming-3-blend": _streaming(3, "kBlend"),
    "decoupled": Way("Decoupled: sync_freq 24, 6 fragments, quorum 1", _islands(DECOUPLED)),
    "decoupled-deaths": Way(
        "Decoupled, and three workers die",
        _islands(DECOUPLED),
        deaths=("1:100", "2:200", "3:300"),
    ),
}


@dataclass(frozen=True, slots=True)
class Trained:
    """The end of one job.

    Attributes:
        loss: held-out.
        megabytes: that a worker other than the first has sent.
        deaths: that the job has noticed.
    """

    loss: float
    megabytes: float
    deaths: int


def train(sides: Sides, name: str, seed: int) -> Trained:
    """Run one job to its end. Raises Refused."""
    way = WAYS[name]
    arguments = [*way.arguments, "--seed", str(seed)]
    folder = run_program(sides, f"{name}-{seed}", way.conf, PROGRAM, *arguments, limit_s=LIMIT_S).parent
    report = json.loads((folder / "report.json").read_text())
    sent = [process["bytes_out"] for process in report["processes"] if process["rank"]]
    incidents = len(report["incidents"])
    if incidents != len(way.deaths):
        raise Refused(f"{incidents} processes died, and {len(way.deaths)} should have")
    return Trained(saved_loss(folder / "work" / "final.safetensors", seed), mean(sent or [0.0]) / 1e6, incidents)


def rows_of(found: Mapping[str, Sequence[Trained]], lost: Mapping[str, str]) -> list[Row]:
    """The table: for each way its loss, and where AllReduce is there the gap to it."""
    rows: list[Row] = []
    best = [one.loss for one in found.get(ALL, ())]
    alone = [one.loss for one in found.get(ALONE, ())]
    for name in (name for name in WAYS if name in found or name in lost):
        what = WAYS[name].what
        if name in lost:
            rows.append(absent(what, "nats", lost[name]))
            continue
        losses = [one.loss for one in found[name]]
        words = [f"a worker sent {mean(one.megabytes for one in found[name]):.1f} MB"]
        if best and alone and name not in (ALL, ALONE):
            words.insert(0, f"{(mean(alone) - mean(losses)) / (mean(alone) - mean(best)):.0%} of what 4 workers bring")
        words.append(f"{len(losses)} seeds")
        rows.append(row(what, Figure(mean(losses), min(losses), max(losses)), "nats", note="; ".join(words)))
        if best and name != ALL:
            gaps = [100 * (loss / least - 1) for loss, least in zip(losses, best, strict=False)]
            gap = Figure(100 * (mean(losses) / mean(best) - 1), min(gaps), max(gaps))
            rows.append(row(f"{what}: gap to AllReduce", gap, "%"))
    return rows


def measure(names: Sequence[str], seeds: int) -> list[Row]:
    """Train in each of these ways with so many seeds, in shuffled order."""
    found: dict[str, list[Trained]] = {}
    lost: dict[str, str] = {}
    order = Random(1)
    with Sides() as sides:
        for seed in range(seeds):
            for name in order.sample(names, len(names)):
                if name in lost:
                    continue
                try:
                    found.setdefault(name, []).append(train(sides, name, seed))
                    say(f"  seed {seed}, {WAYS[name].what}: {found[name][-1].loss:.4f}")
                except Refused as reason:
                    lost[name] = str(reason)
                    found.pop(name, None)
                    say(f"  seed {seed}, {WAYS[name].what}: {reason}")
    return rows_of(found, lost)
