"""A training step on GPUs: DDP over NCCL, `engine: kNccl`, Sandblaster, Downpour, and islands.

What keeps one model must end with DDP's parameters, nearly. A GPU with two workers computes for both in turn, so all
sides of a row have as many processes on a GPU as "alone", where nothing is exchanged.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks import contest
from benchmarks.contest import ALONE, MODES, Contestant, Limits
from benchmarks.harness import Row
from benchmarks.record import run_table
from benchmarks.sides import cluster, topotrain

MOST_WORKERS = 4
PATIENCE_S = 60.0
TOLERANCE = 1e-3
"""Kernels of GPUs add in no fixed order: a side differs from itself a little."""
NCCL, GLOO = "DDP (NCCL)", "DDP (Gloo)"
PLAIN, HIDDEN, ARRIVAL = list(MODES)[:3]
ONE_GPU = "NCCL refuses two ranks on one GPU; with one worker it is measured below"
OUTER = "sync_freq: 32 outer { type: kNesterov momentum: 0.9 learning_rate { type: kFixed base_lr: 0.7 } }"


@dataclass(frozen=True, slots=True)
class Target:
    """What sides compute on.

    Args:
        gpus: their names. Without one sides compute on the CPU, to try all of this.
        gibibytes: the memory of the smallest.
        cuda: what torch is built for.
        wanted: workers. 0: one for each GPU, at least 2 and at most MOST_WORKERS.
    """

    gpus: tuple[str, ...] = ()
    gibibytes: float = 0.0
    cuda: str = ""
    wanted: int = 0

    def __str__(self) -> str:
        """As the record describes it."""
        kinds = [f"{self.gpus.count(kind)} × {kind} ({self.gibibytes:.0f} GiB)" for kind in dict.fromkeys(self.gpus)]
        return ", ".join([*kinds, self.cuda] if kinds else ["no GPU"])

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    @property
    def workers(self) -> int:
        return self.wanted or max(2, min(len(self.gpus), MOST_WORKERS))

    @property
    def crowded(self) -> bool:
        """Whether workers share a GPU, so that NCCL cannot connect them."""
        return bool(self.gpus) and len(self.gpus) < self.workers

    def times(self, sides: int) -> int:
        """So many times the samples that suit a core: as far as the memory goes that all processes share."""
        each = self.gibibytes * len(self.gpus) / (sides * self.workers)
        return 64 if each > 5 else 16 if each > 2 else 4 if self.gpus else 1


def target(wanted: int = 0) -> Target:
    """The GPUs of this machine, asked in another process: a driver that hangs or crashes ends only that one."""
    torch = json.loads(topotrain("doctor", "--json"))["torch"]
    found = torch["gpus"]
    least = min((gpu["memory_bytes"] for gpu in found), default=0) / 2**30
    return Target(tuple(gpu["name"] for gpu in found), least, torch["built_for"], wanted)


def contestants(on: Target) -> list[Contestant]:
    """All sides of a model."""
    many, ddp = on.workers, GLOO if on.crowded or not on.gpus else NCCL
    found = [Contestant(ALONE, many, way="alone")]
    if on.gpus:
        nccl = Contestant(NCCL, many, way="ddp+nccl")
        found.append(replace(nccl, way="", missing=ONE_GPU) if on.crowded else nccl)
    if ddp == GLOO:
        found.append(Contestant(GLOO, many, way="ddp"))
    for engine in ("kNccl" if on.gpus else "kGloo", "kOwn"):
        for mode in (PLAIN, HIDDEN):
            conf = cluster(many, many, separate=False, inside=f"engine: {engine}", top=MODES[mode])
            one = Contestant(f"AllReduce, engine {engine}", many, conf=conf, over=ddp, same_as=ddp, mode=mode)
            found.append(replace(one, missing=ONE_GPU) if on.crowded and engine == "kNccl" else one)
    servers = max(1, many // 2)
    for mode in (PLAIN, HIDDEN, ARRIVAL):
        one = Contestant("Sandblaster, servers on the CPU", many, over=ddp, same_as=ddp, mode=mode)
        found.append(replace(one, conf=cluster(many, servers, top=MODES[mode])))
    for mode in (PLAIN, ARRIVAL):
        conf = cluster(1, servers, groups=many, top=MODES[mode])
        name = f"Downpour, {many} groups, servers on the CPU: samples per second"
        found.append(Contestant(name, many, conf=conf, mode=mode, rate=True))
    islands = cluster(1, servers, groups=many, inside=OUTER)
    found.append(Contestant(f"{many} islands: samples per second", many, conf=islands, rate=True))
    return found + (_single() if on.crowded else [])


def _single() -> list[Contestant]:
    """What NCCL does with a single worker, where it refuses more."""
    alone, ddp = f"{ALONE}, one worker", f"{NCCL}, one worker"
    conf = cluster(1, 1, separate=False, inside="engine: kNccl")
    return [
        Contestant(alone, 1, way="alone", over=alone),
        Contestant(ddp, 1, way="ddp+nccl", over=alone),
        Contestant("AllReduce, engine kNccl, one worker", 1, conf=conf, over=ddp, same_as=ddp, mode=PLAIN),
    ]


def measure_model(model: str, on: Target, rounds: int, seconds: Limits, chosen: Sequence[Contestant]) -> list[Row]:
    """All rows of one model."""
    times = on.times(sum(not one.missing for one in chosen))
    return contest.contest(model, chosen, rounds, seconds, ("--device", on.device, "--times", str(times)))


def declare(parser: argparse.ArgumentParser) -> None:
    contest.declare(parser)
    workers = f"0: one for each GPU, at least 2, at most {MOST_WORKERS}"
    parser.add_argument("--workers", type=int, default=0, help=workers)
    parser.add_argument("--seconds", type=float, default=540.0, help="sides that are not begun by then are left out")


def measure(options: argparse.Namespace) -> Sequence[Row]:
    # A trial is on the CPU, with Gloo.
    on = Target(wanted=options.workers) if options.trial else target(options.workers)
    if not on.gpus and not options.trial:
        raise SystemExit("not measured: torch sees no GPU on this machine")
    limits, chosen = Limits(options.seconds, PATIENCE_S, TOLERANCE), contestants(on)
    return [row for model in options.models for row in measure_model(model, on, options.rounds, limits, chosen)]


if __name__ == "__main__":
    run_table("gpu_training", "A training step on GPUs", measure, declare, lambda: str(target()))
