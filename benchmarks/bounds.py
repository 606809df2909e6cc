"""What no exchange can beat on this machine: kernels, copies, bare sockets, computing alone; and the goals beside it.

Rule: the parts are measured in turn, and a bound is a formula of them, which stands in the remark of its row. A bound
is for torch's kernels, none of which adds gradients and updates a value in one pass, and for the sockets of Linux. It
assumes that nothing waits, that no message costs anything, and that all cores are busy all the time. So a goal beyond
its bound cannot be met here, and one within it may be missed for another reason.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from benchmarks import models
from benchmarks.exchange import ARRIVAL, MEGABYTES, PUSHER, RANKS
from benchmarks.harness import ROUNDS, Row, Samples, absent, interleave, row
from benchmarks.processor import Turn
from benchmarks.programs.pusher import ELEMENTS, MOMENTUM, RATE, SLOPE, TENSORS, Copies
from benchmarks.record import run_table, say
from benchmarks.sides import Side, Sides, attempt, cluster
from benchmarks.slow_link import MBIT, wire_s
from topotrain.config.slice_size import SLOW_BYTES

NAME, TITLE, GOALS = "bounds", "What this machine can do at best", ()

BARE = Path(__file__).parent / "programs" / "bare.py"
CORES = os.cpu_count() or 1
COPIES, GLOO, SOCKETS = "two copies + update", "Gloo all-reduce + step", "bare sockets"
LEFT = "a copy of each worker's gradients from where backward leaves them"
LIMITS: Mapping[str, float] = {"mlp": 0.75, "gpt": 0.85, "cnn": 0.85}
"""The goals of P4 for the fastest mode, times DDP."""


class Kernels:
    """Torch's kernels on the 40 MiB of a step, in the buckets of shared memory."""

    def __init__(self) -> None:
        def buckets(value: float) -> list[torch.Tensor]:
            return list(torch.full((TENSORS * ELEMENTS,), value).split(ELEMENTS))

        self._first, self._second, self._third = buckets(SLOPE), buckets(SLOPE), buckets(SLOPE)
        self._sums, self._scratch = buckets(0.0), torch.zeros(ELEMENTS)
        self.values = [torch.nn.Parameter(part) for part in buckets(0.0)]
        self._optimizers = [torch.optim.SGD([v], lr=RATE, momentum=MOMENTUM, fused=True) for v in self.values]

    def copy(self) -> None:
        """Copy everything."""
        for out, first in zip(self._sums, self._first, strict=True):
            out.copy_(first)

    def look(self) -> None:
        """Look for numbers that are not finite, as servers do."""
        for first in self._first:
            torch.dot(first, first).item()

    def update(self) -> None:
        """Update all values from gradients in memory."""
        for number, first in enumerate(self._first):
            self._apply(number, first)

    def sum_two(self) -> None:
        """Add two gradients."""
        for out, first, second in zip(self._sums, self._first, self._second, strict=True):
            torch.add(first, second, out=out)

    def sum_three(self) -> None:
        """Add three gradients."""
        self.sum_two()
        for out, third in zip(self._sums, self._third, strict=True):
            out.add_(third)

    def divide(self) -> None:
        """Divide everything by 3."""
        for out in self._sums:
            out.div_(3)

    def multiply(self) -> None:
        """Multiply everything by 1/2."""
        for out in self._sums:
            out.mul_(0.5)

    def serve_one(self) -> None:
        """What a server does for one worker, a bucket after the other."""
        for number, first in enumerate(self._first):
            torch.dot(first, first).item()
            self._apply(number, first)

    def serve_two(self) -> None:
        """What a server does for two workers."""
        for number, (first, second) in enumerate(zip(self._first, self._second, strict=True)):
            torch.add(first, second, out=self._scratch)
            self._scratch.mul_(0.5)
            torch.dot(self._scratch, self._scratch).item()
            self._apply(number, self._scratch)

    def add_and_update(self) -> None:
        """The same without the mean and without a look."""
        for number, (first, second) in enumerate(zip(self._first, self._second, strict=True)):
            torch.add(first, second, out=self._scratch)
            self._apply(number, self._scratch)

    def _apply(self, number: int, gradient: torch.Tensor) -> None:
        self.values[number].grad = gradient
        self._optimizers[number].step()


KERNELS: Mapping[str, Callable[[Kernels], None]] = {
    "copy": Kernels.copy,
    "look for numbers that are not finite": Kernels.look,
    "fused update": Kernels.update,
    "sum of two gradients": Kernels.sum_two,
    "sum of three gradients": Kernels.sum_three,
    "division by 3": Kernels.divide,
    "multiplication by 1/2": Kernels.multiply,
    "sum + update, 2 workers": Kernels.add_and_update,
    "all kernels of a server, 1 worker": Kernels.serve_one,
    "all kernels of a server, 2 workers": Kernels.serve_two,
}
ONE, TWO, SUM = "all kernels of a server, 1 worker", "all kernels of a server, 2 workers", "sum + update, 2 workers"


def here(call: Callable[[], object]) -> Callable[[], Turn]:
    """A side that is a call in this process."""

    def turn() -> Turn:
        wall, processor = time.perf_counter(), time.process_time()
        call()
        return Turn(time.perf_counter() - wall, time.process_time() - processor)

    return turn


def beyond(limit: float, least: float, sign: str = "<=") -> str:
    """Whether a goal is where nothing can be."""
    reachable = limit >= least if sign == "<=" else limit <= least
    return f"the goal {'≤' if sign == '<=' else '≥'} {limit:g} is {'within' if reachable else 'BEYOND'} it"


def shared_time(computing: float, workers: int, more: float, cores: int = CORES) -> float:
    """The least time of a step in which so many workers compute at once, and `more` seconds of a core are needed.

    Cores are busy all the time, and no worker computes on two.
    """
    return max(computing, (workers * computing + more) / cores)


# --- the parts -------------------------------------------------------------------------------------------------------


def _processes(sides: Sides, starts: Mapping[str, Callable[[], Side]], lost: dict[str, str]) -> dict[str, Side]:
    living: dict[str, Side] = {}
    for name, start in starts.items():
        side = attempt(start)
        if isinstance(side, Side):
            living[name] = side
        else:
            lost[name] = side
            say(f"  {name}: {side}")
    return living


def measure_parts(rounds: int, lost: dict[str, str]) -> dict[str, Samples]:
    """Kernels in this process, and bare sockets and Gloo between two others."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    kernels, copies = Kernels(), Copies()
    with Sides() as sides:
        starts = {
            GLOO: lambda: sides.plain(GLOO, PUSHER, "gloo step", 2),
            SOCKETS: lambda: sides.plain(SOCKETS, BARE, "sockets", 2),
        }
        living = _processes(sides, starts, lost)
        turns: dict[str, Callable[[], Turn]] = {n: lambda s=side: s.turn(4) for n, side in living.items()}
        turns[COPIES] = here(copies.step)
        turns |= {name: here(lambda k=kernel: k(kernels)) for name, kernel in KERNELS.items()}
        found = interleave(turns, rounds, lost=lost)
        if SOCKETS in found and any(answer["value"] != 1.0 for answer in living[SOCKETS].ask(check=True)):
            lost[SOCKETS] = "other values came than were sent"
            del found[SOCKETS]
    return found


def measure_reductions(rounds: int, lost: dict[str, str]) -> dict[str, Samples]:
    """An all-reduce in shared memory without anything but its arithmetic, and Gloo's."""
    shared = Path("/dev/shm")
    found: dict[str, Samples] = {}
    for ranks in RANKS:
        with TemporaryDirectory(prefix="bench-", dir=shared if shared.is_dir() else None) as folder, Sides() as sides:
            starts = {
                f"bare {ranks}": lambda n=ranks, f=folder: sides.plain(f"bare {n}", BARE, f"reduce:{f}", n),
                f"Gloo {ranks}": lambda n=ranks: sides.plain(f"Gloo {n}", PUSHER, "gloo reduce", n),
            }
            living = _processes(sides, starts, lost)
            found |= interleave({n: lambda s=side: s.turn(4) for n, side in living.items()}, rounds, lost=lost)
    return found


def measure_training(rounds: int, lost: dict[str, str], chosen: Sequence[str]) -> dict[str, Samples]:
    """Two workers that compute alone, with an update of their own and with none, and DDP."""
    found: dict[str, Samples] = {}
    for model in chosen:
        with Sides() as sides:
            ways = {"alone": "alone", "no update": "no_update", "DDP": "ddp"}
            starts = {
                f"{model} {n}": lambda n=n, w=w, m=model: sides.peer(f"{m} {n}", w, 2, m) for n, w in ways.items()
            }
            living = _processes(sides, starts, lost)
            steps = {"mlp": 4, "gpt": 2, "cnn": 4}[model]
            turns = {name: lambda s=side, n=steps: s.turn(n) for name, side in living.items()}
            found |= interleave(turns, rounds, lost=lost)
    return found


# --- the bounds ------------------------------------------------------------------------------------------------------


class Derived:
    """Rows that follow from what was measured."""

    def __init__(self, found: Mapping[str, Samples], lost: Mapping[str, str]) -> None:
        self._found, self._lost = found, lost
        self.rows: list[Row] = []

    def part(self, what: str, name: str, note: str = "") -> None:
        """A row of something that was measured itself."""
        if name not in self._found:
            self.rows.append(absent("", what, "ms", self._lost.get(name, "not measured")))
            return
        line = row("", what, self._found[name].figure.times(1e3), "ms", note=note)
        self.rows.append(line.costing(self._found[name], MEGABYTES))

    def ratio(self, what: str, above: str, below: str, unit: str, note: str, limit: float) -> None:
        """A bound that is the ratio of two parts."""
        if missing := [name for name in (above, below) if name not in self._found]:
            self.rows.append(absent("", what, unit, "; ".join(self._lost.get(n, f"no {n}") for n in missing)))
            return
        parts = [self._found[name] for name in (above, below)]
        if above in KERNELS and below in (*KERNELS, COPIES):
            # Calls in one thread wait for nothing, and their processor time does not depend on what else is running.
            parts = [Samples(part.processor) for part in parts]
        figure = parts[0].over(parts[1])
        self.rows.append(row("", what, figure, unit, note=f"{note}; {beyond(limit, figure.value)}"))

    def value(self, what: str, unit: str, needed: Sequence[str], call: Callable[..., float], note: str) -> float | None:
        """A bound that is a formula of the seconds of some parts. None: one of them is missing."""
        if missing := [name for name in needed if name not in self._found]:
            self.rows.append(absent("", what, unit, "; ".join(self._lost.get(n, f"no {n}") for n in missing)))
            return None
        figure = call(*(self._found[name].median for name in needed))
        self.rows.append(row("", what, figure, unit, note=note))
        return figure


def exchange_rows(found: Mapping[str, Samples], lost: Mapping[str, str]) -> list[Row]:
    """P1 and P2, and the parts that they are made of."""
    made = Derived(found, lost)
    for name in (*KERNELS, COPIES, GLOO):
        made.part(f"40 MB: {name}", name)
    made.part(f"4 x 40 MB there and back: {SOCKETS}", SOCKETS, "two processes, one connection, slices of 4 MB")
    counted = "processor time of {0} over that of two copies + update; by count of passes {1} over 9"
    made.ratio("P1, 1 worker 1 server: at best", ONE, COPIES, "x", counted.format(ONE, 6), 0.5)
    made.ratio("P1, the same without a look", "fused update", COPIES, "x", counted.format("fused update", 5), 0.5)
    made.ratio("P1, 2 workers 1 server: at best", TWO, COPIES, "x", counted.format(TWO, 11), 0.8)
    made.ratio("P1, the same without look and mean", SUM, COPIES, "x", counted.format(SUM, 8), 0.8)
    made.ratio("P1, 2 workers 1 server, over Gloo: at best", TWO, GLOO, "x", f"{TWO} over {GLOO}", 0.25)
    carried = "the larger of the sockets' time and their processor time with that of {0}, divided among {1} cores"
    if SOCKETS in found:
        spent = median(found[SOCKETS].processor)
        for name, below, limit in ((TWO, COPIES, 2.6), (TWO, GLOO, 0.70)):
            if below in found:
                least = max(found[SOCKETS].median, (spent + found[name].median) / CORES)
                figure = least / found[below].median
                note = f"{carried.format(name, CORES)}, over {below}; {beyond(limit, figure)}"
                made.rows.append(row("", f"P2, 2 workers 1 server, over {below}: at best", figure, "x", note=note))
    return made.rows


def reduction_rows(found: Mapping[str, Samples], lost: Mapping[str, str]) -> list[Row]:
    """P3."""
    made = Derived(found, lost)
    for ranks in RANKS:
        passes = f"by count of passes {5 * ranks - 3}, on {min(ranks, CORES)} cores"
        note = f"each rank adds its share, divides, and writes {ranks} means, without a message, over Gloo; {passes}"
        made.ratio(f"P3, {ranks} ranks: at best", f"bare {ranks}", f"Gloo {ranks}", "x", note, 0.25)
    return made.rows


def training_rows(found: Mapping[str, Samples], lost: Mapping[str, str], chosen: Sequence[str]) -> list[Row]:
    """P4, P5 and P6."""
    made = Derived(found, lost)
    for model in chosen:
        label, size = model.upper(), models.megabytes(model) / MEGABYTES
        computing, alone, ddp = (f"{model} {way}" for way in ("no update", "alone", "DDP"))
        made.part(f"{label}: computing alone, no update", computing)
        made.part(f"{label}: computing alone with an own update", alone)
        made.part(f"{label}: DDP", ddp)
        share = f"on {CORES} cores: computing of 2 workers and {{0}}, over {{1}}"

        def over(compute: float, kernels: float, peer: float, size: float = size) -> float:
            return shared_time(compute, 2, kernels * size) / peer

        least = made.value(
            f"P4 and P5, {label} over shared memory: at best",
            "× DDP",
            (computing, TWO, "copy", ddp),
            lambda c, k, copy, d, over=over: over(c, k + 2 * copy, d),
            share.format(f"{TWO}, and {LEFT}", "DDP"),
        )
        _judge(made, least, LIMITS[model])
        if SOCKETS in found:
            bytes_s = median(found[SOCKETS].processor)
            least = made.value(
                f"P5, {label} over TCP: at best",
                "× DDP",
                (computing, TWO, "copy", ddp),
                lambda c, k, copy, d, over=over, b=bytes_s: over(c, k + 2 * copy + b, d),
                share.format(f"{TWO}, {LEFT}, and the processor time of bare sockets", "DDP"),
            )
            _judge(made, least, {"mlp": 0.90, "gpt": 0.97, "cnn": 0.95}[model])
        least = made.value(
            f"P6, {label}: at best",
            "× independent",
            (computing, ONE, "copy", alone),
            lambda c, k, copy, a, over=over: 1 / over(c, 2 * (k + 2 * copy), a),
            share.format(f"{ONE}, a copy of the values, and {LEFT}, for each of 2 groups", "computing with an update"),
        )
        _judge(made, least, 0.90, ">=")
    return made.rows


def _judge(made: Derived, least: float | None, limit: float, sign: str = "<=") -> None:
    """Add to the last row whether the goal can be met."""
    if least is not None:
        last = made.rows.pop()
        made.rows.append(_noted(last, f"{last.note}; {beyond(limit, least, sign)}"))


def _noted(line: Row, note: str) -> Row:
    return replace(line, note=note)


def arithmetic_rows() -> list[Row]:
    """P7 and P9, whose bounds depend on no machine."""
    quick = (3 * 4 + 1) / 4
    note = (
        "13 gradients instead of 4 in the time of a slow step, if a step costs nothing but rest and computing, and old "
        f"gradients are as good as new ones; {beyond(3.0, quick, '>=')}"
    )
    rows = [row("", "P7, asynchronous: at best", quick, "× faster", note=note)]
    note = f"a step takes the time of a healthy worker, with three gradients instead of four; {beyond(3.0, 4.0, '>=')}"
    rows.append(row("", "P7, one backup worker: at best", 4.0, "× faster", note=note))
    # Before the first bucket is complete a server has received it from all workers, and after the last one it answers.
    delay = 4 * SLOW_BYTES * 8 / (MBIT * 1e6)
    one, four = (wire_s("small", factor) + delay for factor in (4.0, 1.0))
    note = (
        f"(4 M + n b) / (M + n b) with n = 4 workers and buckets of b = {SLOW_BYTES // 1024} KB: a bucket comes from "
        f"all workers before it is answered, {delay * 1e3:.0f} ms on this link; {beyond(3.7, one / four, '>=')}"
    )
    rows.append(row("", "P9, 1 server over 4 servers: at best", one / four, "×", note=note))
    note = f"6/4 M over M + n b; {beyond(1.4, wire_s('small', 1.5) / four, '>=')}"
    rows.append(row("", "P9, ring over 4 dedicated servers: at best", wire_s("small", 1.5) / four, "×", note=note))
    return rows


def link_rows() -> list[Row]:
    """What pretending a slow link costs, in processor time; the steps are those of P9."""
    inside = f"link {{ bandwidth: {MBIT} }}"
    lost: dict[str, str] = {}
    with Sides() as sides:
        starts = {
            "with": lambda: sides.job("with", cluster(4, 4, inside=inside, top=ARRIVAL), 4, "small"),
            "without": lambda: sides.job(
                "without", cluster(4, 4, inside=f"slice_bytes: {SLOW_BYTES}", top=ARRIVAL), 4, "small", "kTcp"
            ),
        }
        living = _processes(sides, starts, lost)
        spent = interleave({n: lambda s=side: s.turn(2) for n, side in living.items()}, lost=lost)
    rows = []
    for name, about in (("with", f"a pretended link of {MBIT} Mbit/s"), ("without", "plain TCP, the same buckets")):
        what = f"P9, 4 workers 4 servers, processor time of a step: {about}"
        if name in spent:
            figure = Samples(spent[name].processor).figure.times(1e3)
            note = f"{spent[name].median * 1e3:.0f} ms by the clock, on {CORES} cores"
            rows.append(row("", what, figure, "CPU ms", note=note))
        else:
            rows.append(absent("", what, "CPU ms", lost[name]))
    return rows


def measure(options: argparse.Namespace) -> Sequence[Row]:
    lost: dict[str, str] = {}
    say("  kernels, sockets")
    found = measure_parts(options.rounds, lost)
    rows = exchange_rows(found, lost)
    say("  reductions")
    rows += reduction_rows(measure_reductions(options.rounds, lost), lost)
    say("  training")
    found |= measure_training(options.rounds, lost, options.models)
    rows += training_rows(found, lost, options.models)
    say("  pretended links")
    return [*rows, *arithmetic_rows(), *link_rows()]


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=2 * ROUNDS - 1)
    parser.add_argument("--models", nargs="*", default=list(models.TRAINED), choices=models.TRAINED)


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
