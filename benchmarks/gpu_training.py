"""A training step on GPUs: DDP over NCCL, `engine: kNccl`, Sandblaster, Downpour, and islands.

Rule: every side that fails is a row with its reason, and the others go on without it. What keeps one model must end
with DDP's parameters, nearly, or has no figure. A GPU with two workers computes for both in turn, so all sides of a row
have as many processes on a GPU as "alone", where nothing is exchanged.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks import models
from benchmarks.gpus import Gpus, probe
from benchmarks.harness import ROUNDS, Row, Samples, absent, interleave, row
from benchmarks.processor import Turn
from benchmarks.record import run_table, say
from benchmarks.sides import Refused, Side, Sides, attempt, cluster

MOST_WORKERS = 4
TURN_S, MOST_STEPS = 0.3, 64
PATIENCE_S = 60.0
TOLERANCE = 1e-3
"""Of the mean magnitude of parameters. Kernels of GPUs add in no fixed order: a side differs from itself a little."""
ALONE, NCCL, GLOO = "alone", "DDP (NCCL)", "DDP (Gloo)"
HIDDEN, ARRIVAL = "grads: kHidden", "grads: kHidden apply: kOnArrival"
MODES = {"": "kVisible, kAtStep", HIDDEN: "kHidden, kAtStep", ARRIVAL: "kHidden, kOnArrival"}
ONE_GPU = "NCCL refuses two ranks on one GPU; with one worker it is measured below"
OUTER = "sync_freq: 32 outer { type: kNesterov momentum: 0.9 learning_rate { type: kFixed base_lr: 0.7 } }"


@dataclass(frozen=True, slots=True)
class Target:
    """What sides compute on.

    Args:
        device: "cuda", or "cpu" to try all of this without a GPU.
        gpus: those of the machine.
        workers: 0: one for each GPU, at least 2 and at most MOST_WORKERS.
    """

    device: str
    gpus: Gpus
    wanted: int = 0

    @property
    def workers(self) -> int:
        return self.wanted or max(2, min(self.gpus.count, MOST_WORKERS))

    @property
    def crowded(self) -> bool:
        """Whether workers share a GPU, so that NCCL cannot connect them."""
        return self.device == "cuda" and self.gpus.count < self.workers

    @property
    def engine(self) -> str:
        return "kNccl" if self.device == "cuda" else "kGloo"

    def times(self, sides: int) -> int:
        """So many times the samples that suit a core: as far as the memory goes that all processes share."""
        if self.device == "cpu":
            return 1
        each = self.gpus.gibibytes * max(1, self.gpus.count) / (sides * self.workers)
        return 64 if each > 5 else 16 if each > 2 else 4


@dataclass(frozen=True, slots=True)
class Contestant:
    """A side, before it is started.

    `way` is set for a peer, `conf` for a job, and `missing` says why it cannot be started. Its time is divided by that
    of the side `over`; with `rate` it is the other way round, and stands for samples per second.
    """

    name: str
    workers: int
    way: str = ""
    conf: str = ""
    missing: str = ""
    over: str = ALONE
    mode: str = ""
    rate: bool = False

    @property
    def key(self) -> str:
        return f"{self.name}, {self.mode}" if self.mode else self.name

    def start(self, sides: Sides, model: str) -> Side:
        """Start it. Raises Refused."""
        if self.missing:
            raise Refused(self.missing)
        if self.way:
            return sides.peer(f"{model} {self.key}", self.way, self.workers, model)
        return sides.job(f"{model} {self.key}", self.conf, self.workers, model)


def contestants(target: Target) -> list[Contestant]:
    """All sides of a model."""
    many, ddp = target.workers, GLOO if target.crowded or target.device == "cpu" else NCCL
    found = [Contestant(ALONE, many, way="alone")]
    if target.device == "cuda":
        nccl = Contestant(NCCL, many, way="ddp+nccl")
        found.append(replace(nccl, way="", missing=ONE_GPU) if target.crowded else nccl)
    if ddp == GLOO:
        found.append(Contestant(GLOO, many, way="ddp"))
    found += _all_reduces(target, ddp)
    servers = max(1, many // 2)
    for top, mode in MODES.items():
        conf = cluster(many, servers, top=top)
        found.append(Contestant("Sandblaster, servers on the CPU", many, conf=conf, over=ddp, mode=mode))
    for top, mode in MODES.items():
        if top != HIDDEN:  # with one worker per group nobody waits for a mean
            conf = cluster(1, servers, groups=many, top=top)
            name = f"Downpour, {many} groups, servers on the CPU"
            found.append(Contestant(name, many, conf=conf, mode=mode, rate=True))
    islands = cluster(1, servers, groups=many, inside=OUTER)
    found.append(Contestant(f"{many} islands", many, conf=islands, rate=True))
    return found + (_single() if target.crowded else [])


def _all_reduces(target: Target, ddp: str) -> list[Contestant]:
    many, found = target.workers, []
    for engine in (target.engine, "kOwn"):
        for top in ("", HIDDEN):
            conf = cluster(many, many, separate=False, inside=f"engine: {engine}", top=top)
            one = Contestant(f"AllReduce, engine {engine}", many, conf=conf, over=ddp, mode=MODES[top])
            refused = target.crowded and engine == "kNccl"
            found.append(replace(one, conf="", missing=ONE_GPU) if refused else one)
    return found


def _single() -> list[Contestant]:
    """What NCCL does with a single worker, where it refuses more."""
    alone, ddp = f"{ALONE}, one worker", f"{NCCL}, one worker"
    conf = cluster(1, 1, separate=False, inside="engine: kNccl")
    return [
        Contestant(alone, 1, way="alone", over=alone),
        Contestant(ddp, 1, way="ddp+nccl", over=alone),
        Contestant("AllReduce, engine kNccl, one worker", 1, conf=conf, over=ddp, mode=MODES[""]),
    ]


class Clock:
    """The seconds that are left of a limit."""

    def __init__(self, seconds: float) -> None:
        self._limit, self._end = seconds, time.monotonic() + seconds

    def check(self) -> None:
        """Raise Refused if nothing is left."""
        if time.monotonic() >= self._end:
            raise Refused(f"left out: the {self._limit:.0f} s for this table were over")


def measure_model(model: str, target: Target, rounds: int, clock: Clock, chosen: Sequence[Contestant]) -> list[Row]:
    """All rows of one model."""
    living: dict[str, Side] = {}
    lost: dict[str, str] = {}
    times = target.times(sum(not one.missing for one in chosen))
    arguments = ("--device", target.device, "--times", str(times))
    with Sides(arguments, PATIENCE_S) as sides:
        for one in chosen:
            side = attempt(_started, one, sides, model, clock)
            if isinstance(side, Side):
                living[one.key] = side
            else:
                lost[one.key] = side
                say(f"  {model}, {one.key}: {side}")
        steps = _steps(living[ALONE]) if ALONE in living else MOST_STEPS // 4
        turns = {name: _turn(side, steps, clock) for name, side in living.items()}
        found = interleave(turns, rounds, lost=lost) if turns else {}
        checks = {name: _checksum(living[name]) for name in found}
    for one in chosen:
        if one.key in found and (wrong := _difference(one, checks)):
            lost[one.key] = wrong
            say(f"  {model}, {one.key}: {wrong}")
    samples = {side.name: side.hellos[0]["samples"] for side in living.values()}
    note = f"{max(samples.values())} samples per step and worker" if samples else ""
    return [_row(model, one, found, lost, note if one.key == ALONE else "") for one in chosen]


def _started(one: Contestant, sides: Sides, model: str, clock: Clock) -> Side:
    clock.check()
    try:
        return one.start(sides, model)
    except (OSError, ValueError) as error:  # what no side is expected to do ends no other side either
        raise Refused(f"{type(error).__name__}: {error}") from error


def _steps(side: Side) -> int:
    """Steps of a turn: about so many as take TURN_S alone."""
    try:
        side.run(2)
        return max(2, min(MOST_STEPS, round(TURN_S / side.run(2))))
    except (Refused, OSError):
        return 2  # its own turn says what is wrong


def _turn(side: Side, steps: int, clock: Clock) -> Callable[[], Turn]:
    def turn() -> Turn:
        try:
            clock.check()
            return side.turn(steps)
        except (Refused, OSError):
            side.end()  # what is left of it would take time from the others
            raise

    return turn


def _checksum(side: Side) -> float | str:
    try:
        return float(side.ask(check=True)[0]["checksum"])
    except (Refused, OSError) as error:
        return str(error)


def _difference(one: Contestant, checks: Mapping[str, float | str]) -> str:
    """Why a side's figure does not count; empty if it does."""
    mine, wanted = checks[one.key], checks.get(one.over)
    if isinstance(mine, str):
        return f"its parameters could not be compared: {mine}"
    if one.rate or not one.conf or not isinstance(wanted, float):
        return ""
    # A NaN is not near anything.
    return (
        "" if abs(mine / wanted - 1) <= TOLERANCE else f"ends with other parameters than DDP ({mine:.6g}, {wanted:.6g})"
    )


def _row(model: str, one: Contestant, found: Mapping[str, Samples], lost: Mapping[str, str], note: str) -> Row:
    crowd = "1 worker" if one.workers == 1 else f"{one.workers} workers"
    what, size = f"{model.upper()}, {crowd}: {one.name}", models.megabytes(model)
    unit = "× samples per second of alone" if one.rate else f"× {one.over}"
    if one.key in lost:
        return absent(what, unit, lost[one.key], mode=one.mode)
    mine = found[one.key]
    if one.key == one.over:
        return row(f"{what}, one step", mine.figure.times(1e3), "ms", note=note).costing(mine, size)
    if one.over not in found:
        line = row(f"{what}, one step", mine.figure.times(1e3), "ms", note=f"{one.over} is missing", mode=one.mode)
        return line.costing(mine, size)
    theirs = found[one.over]
    ratio = theirs.over(mine) if one.rate else mine.over(theirs)
    return row(what, ratio, unit, note=f"{mine.median * 1e3:.2f} ms", mode=one.mode).costing(mine, size)


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="*", default=list(models.TRAINED), choices=[*models.TRAINED, "small"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--workers", type=int, default=0, help=f"0: one for each GPU, at least 2, at most {MOST_WORKERS}"
    )
    parser.add_argument("--seconds", type=float, default=540.0, help="sides that are not begun by then are left out")


def measure(options: argparse.Namespace) -> Sequence[Row]:
    gpus = Gpus() if options.trial else probe()
    if gpus.reason:
        raise SystemExit(f"not measured: {gpus.reason}")
    # A trial is on the CPU, with Gloo.
    target, clock = Target("cpu" if options.trial else "cuda", gpus, options.workers), Clock(options.seconds)
    rows: list[Row] = []
    for model in options.models:
        say(f"  {model}")
        rows += measure_model(model, target, options.rounds, clock, contestants(target))
    return rows


def hardware() -> str:
    """The GPUs, for the record."""
    return str(probe())


if __name__ == "__main__":
    run_table("gpu_training", "A training step on GPUs", measure, declare, hardware)
