"""Momentum where worker groups do not wait for each other: `python -m benchmarks.asynchrony`.

Accuracies, no times. Handwritten digits, SGD with rate 0.05, from a start that was trained for two epochs.

    in step   a plain loop of three groups, each with a copy and a momentum of its own; all that the others add arrives
              so many steps late
    in turn   three groups in virtual time, and between them the product's master group; a message takes so many times
              as long as a step
    job       real processes, with and without the job's `correction`
    limit     the largest learning rate times curvature at which three such groups are stable on a quadratic: from the
              roots of the recursion
"""

import argparse
import heapq
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from itertools import count, product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.harness import Figure, Row, row
from benchmarks.programs.momentum import accuracy, build, read_digits, warm_up
from benchmarks.record import ROOT, run_table, say
from benchmarks.sides import topotrain
from topotrain.config.sharding import Parameter, cut
from topotrain.core.model.schema import BucketValues, FlatBuffers, PrivateMemory
from topotrain.core.server.group_sync import MasterSync

RATE, BATCH, EPOCHS, GROUPS = 0.05, 32, 10, 3
LATE = (0, 1, 2, 4)
PROGRAM = Path(__file__).parent / "programs" / "momentum.py"


class Digits:
    """A start, its gradients, and what they lead to."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._train, self._test = read_digits()
        self._model = build()
        warm_up(self._model, self._train, BATCH)
        self.start = torch.nn.utils.parameters_to_vector(self._model.parameters()).detach()
        rng = torch.Generator().manual_seed(seed)
        order = (torch.randperm(len(self._train), generator=rng).split(BATCH) for _ in range(EPOCHS))
        self.batches: Iterator[torch.Tensor] = (batch for epoch in order for batch in epoch)

    def gradient(self, values: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """At these values."""
        torch.nn.utils.vector_to_parameters(values, self._model.parameters())
        self._model.zero_grad()
        images, labels = self._train.tensors
        nn.functional.cross_entropy(self._model(images[batch]), labels[batch]).backward()
        return torch.cat([p.grad.reshape(-1) for p in self._model.parameters() if p.grad is not None])

    def accuracy(self, values: torch.Tensor) -> float:
        """On what was held out."""
        torch.nn.utils.vector_to_parameters(values, self._model.parameters())
        return accuracy(self._model, self._test)


def in_step(seed: int, momentum: float, late: int) -> float:
    """Each group sees its own changes at once and those of the others `late` steps later."""
    digits = Digits(seed)
    size = digits.start.numel()
    added = [torch.zeros(size) for _ in range(GROUPS)]
    velocity = [torch.zeros(size) for _ in range(GROUPS)]
    past: list[list[torch.Tensor]] = []
    while len(batches := [b for _, b in zip(range(GROUPS), digits.batches, strict=False)]) == GROUPS:
        past = [*past, [one.clone() for one in added]][-late - 1 :]
        for group, batch in enumerate(batches):
            others = sum((one for other, one in enumerate(past[0]) if other != group), torch.zeros(size))
            seen = digits.start + past[-1][group] + others
            velocity[group] = momentum * velocity[group] + digits.gradient(seen, batch)
        for group in range(GROUPS):
            added[group] -= RATE * velocity[group]
    return digits.accuracy(digits.start + sum(added, torch.zeros(size)))


def in_turn(seed: int, momentum: float, trip: tuple[float, float], sync_freq: int = 1) -> float:
    """Distributed Hogwild in virtual time: a step takes 0.8 to 1.2, a message `trip`."""
    digits, rng, numbers = Digits(seed), random.Random(seed), count()
    size = digits.start.numel()
    velocity = [torch.zeros(size) for _ in range(GROUPS)]
    slice_map = cut([Parameter("w", (size,), (1,), "float32", True)], 1, groups=GROUPS)
    buckets = slice_map.buckets
    values = []
    agreements: list[MasterSync] = []
    for group in range(GROUPS):
        flats = FlatBuffers(slice_map, 0, PrivateMemory())
        values.append(flats.flat("values", 0))
        values[group][:size] = digits.start
        agreements.append(MasterSync(group, BucketValues(flats, buckets), sync_freq))
        agreements[-1].begin()
    ahead: list[tuple[float, int, tuple[Any, ...]]] = []
    arrived: dict[tuple[int, int], float] = {}

    def post(now: float, group: int, out: Sequence[tuple[int, Any]]) -> None:
        for to, message in out:
            time = arrived[group, to] = max(now + rng.uniform(*trip), arrived.get((group, to), 0.0))
            heapq.heappush(ahead, (time, next(numbers), (to, group, message)))

    def begin(now: float, group: int) -> None:
        batch = next(digits.batches, None)
        if batch is not None:
            step = (group, batch, values[group][:size].clone())
            heapq.heappush(ahead, (now + rng.uniform(0.8, 1.2), next(numbers), step))

    for group in range(GROUPS):
        begin(0.0, group)
    for ended in (False, True):
        for group in range(GROUPS) if ended else ():
            post(0.0, group, agreements[group].drain())
        while ahead:
            now, _, (group, what, more) = heapq.heappop(ahead)
            if isinstance(what, int):
                # A message without a body says only that a reply has arrived.
                if more.body is not None:
                    post(now, group, agreements[group].meet(what, more, more.body.clone()))
                continue
            velocity[group] = momentum * velocity[group] + digits.gradient(more, what)
            values[group][:size] -= RATE * velocity[group]
            post(now, group, agreements[group].updated([bucket.id for bucket in buckets]))
            begin(now, group)
    ends = (agreements[b.master].result(b.id, values[b.master][b.lo : b.hi]) for b in buckets)
    return digits.accuracy(torch.cat(list(ends))[:size])


def job(seed: int, momentum: float, conf: str, *settings: str) -> float:
    """A real one; its accuracy."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        sets = [word for each in (f"cluster.workspace={folder}/workspace", *settings) for word in ("--set", each)]
        file = ROOT / "examples" / "conf" / f"{conf}.conf"
        script = (str(PROGRAM), "--seed", str(seed), "--momentum", str(momentum))
        topotrain("run", "--quiet", "--report", str(report), *sets, str(file), *script)
        return float(json.loads(report.read_text())["metrics"]["accuracy"])


def limit(momentum: float, late: int) -> float:
    """By bisection; the groups together, and what they differ in."""
    low, high = 0.0, 8.0
    for _ in range(40):
        middle = (low + high) / 2
        stable = all(_stable(middle, momentum, others, late) for others in (GROUPS - 1, -1))
        low, high = (middle, high) if stable else (low, middle)
    return low


def _stable(rate: float, momentum: float, others: int, late: int) -> bool:
    """z^2 - (1 + m) z + m + rate z (1 + others z^-late): all roots within the unit circle, or on it at 1."""
    polynomial = np.zeros(late + 3)
    polynomial[:3] += (1.0, -1.0 - momentum, momentum)
    polynomial[1] += rate
    polynomial[1 + late] += rate * others
    return bool(np.abs(np.roots(polynomial)).max() < 1 + 1e-6)


SIX = "cluster.nworker_groups=6"
MASTERS = (SIX, "cluster.nserver_groups=6")
AS_IS = "correction=kNone"
JOBS: Sequence[tuple[str, float, str, tuple[str, ...]]] = (
    ("Downpour, 6 groups of 2", 0.9, "downpour", (SIX, AS_IS)),
    ("Downpour, 6 groups of 2, correction: kRate", 0.9, "downpour", (SIX, "correction=kRate")),
    ("Downpour, 6 groups of 2, correction: kMomentum", 0.9, "downpour", (SIX, "correction=kMomentum")),
    ("Downpour, 6 groups of 2", 0.0, "downpour", (SIX, AS_IS)),
    ("Distributed Hogwild, 6 groups", 0.9, "hogwild", (*MASTERS, AS_IS)),
    ("Distributed Hogwild, 6 groups, correction: kMomentum", 0.9, "hogwild", (*MASTERS, "correction=kMomentum")),
    ("AllReduce, 1 group of 3", 0.9, "allreduce", ()),
)


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3)


def measure(options: argparse.Namespace) -> Sequence[Row]:
    torch.set_num_threads(1)
    seeds, rows = range(options.seeds), []

    def told(what: str, found: Sequence[float]) -> None:
        say(f"{what}: {[f'{one:.3f}' for one in found]}")
        rows.append(row(what, Figure(mean(found), min(found), max(found)), "accuracy", note=f"{len(found)} seeds"))

    told("the start", [digits.accuracy(digits.start) for digits in map(Digits, seeds)])
    for momentum in (0.0, 0.9):
        start = f"momentum {momentum:g}"
        for late in LATE:
            told(f"{start}, in step, others {late} late", [in_step(seed, momentum, late) for seed in seeds])
        for trip in ((0.0, 0.001), (0.1, 0.4), (0.5, 1.0), (1.0, 2.0)):
            what = f"{start}, in turn, a message takes {trip[0]:g} to {trip[1]:g} steps"
            told(what, [in_turn(seed, momentum, trip) for seed in seeds])
        rare = [in_turn(seed, momentum, (0.1, 0.4), sync_freq=4) for seed in seeds]
        told(f"{start}, in turn, 0.1 to 0.4, sync_freq 4", rare)
    for what, momentum, conf, settings in JOBS:
        told(f"momentum {momentum:g}, job: {what}", [job(seed, momentum, conf, *settings) for seed in seeds])
    for momentum, late in product((0.0, 1 / GROUPS, 0.9), LATE):
        what = f"momentum {momentum:.2g}, {GROUPS} groups, others {late} late: limit"
        rows.append(row(what, limit(momentum, late), "rate x curve"))
    return rows


if __name__ == "__main__":
    run_table("asynchrony", "Momentum, and groups that do not wait", measure, declare)
