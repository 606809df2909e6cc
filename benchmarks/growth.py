"""How a step grows: with parameters (1 to 400 MB), workers (1 to 8) and servers (1 to 4), beside the theory's curve.

The model is memory alone: computing a gradient is one pass over it. In shared memory the yardstick is two copies and
one fused update of as many bytes on one core, measured in the same run: all that `workers` workers and `servers`
servers have to move, w × two copies + one update, divided by the cores that they can keep busy. Over a slow link it is
BytePS's bound for dedicated servers (Jiang et al., 2020): max(M / B, w M / (s B)).
"""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness import ROUNDS, Figure, Row, Samples, absent, interleave, row
from benchmarks.record import ROOT, run_table, say
from benchmarks.sides import Side, Sides, attempt, cluster

NAME, TITLE, GOALS = "growth", "How a step grows", ()

MB = 1_000_000
LOCAL = [(size, 1, 1) for size in (1, 4, 16, 40, 100, 400)] + [(40, w, 1) for w in (2, 4, 8)] + [(40, 2, 2), (40, 2, 4)]
LINKED = [(2, w, s) for w, s in ((1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (8, 2), (4, 4), (8, 4))]
MBIT = 100
HIDDEN = "grads: kHidden"
PICTURE = ROOT / "workspace" / "bench" / "growth.png"

Case = tuple[int, int, int]


class Yardstick:
    """Two copies and a fused update of 40 MB on one core."""

    SIZE = 40

    def __init__(self) -> None:
        self._value, self._gradient, self._other = (torch.zeros(self.SIZE * MB // 4) for _ in range(3))
        self._value.grad = self._gradient
        self._optimizer = torch.optim.SGD([self._value], lr=0.01, momentum=0.9, fused=True)

    def copies(self) -> float:
        """Seconds of two copies."""
        began = time.perf_counter()
        self._other.copy_(self._gradient)
        self._other.copy_(self._value)
        return time.perf_counter() - began

    def update(self) -> float:
        """Seconds of one update."""
        began = time.perf_counter()
        self._optimizer.step()
        return time.perf_counter() - began


def _names(case: Case) -> str:
    size, workers, servers = case
    return f"{size} MB, {workers} workers, {servers} servers"


def _steps(size: int) -> int:
    return max(1, min(10, 100 // size))


def local(rounds: int) -> list[tuple[Case, Figure | str, float]]:
    """Cases in shared memory: (case, seconds or why not, the theory's seconds)."""
    torch.set_num_threads(1)
    stick = Yardstick()
    found, missing = _measure(LOCAL, rounds, "", {"copies": stick.copies, "update": stick.update})
    cores = os.cpu_count() or 1
    copies, update = (found[name].median / stick.SIZE for name in ("copies", "update"))

    def theory(case: Case) -> float:
        size, workers, servers = case
        work = size * (workers * copies + update)
        return max(work / min(cores, workers + servers), size * (copies + update) / min(servers, cores))

    return [(case, _figure(case, found, missing), theory(case)) for case in LOCAL]


def linked(rounds: int) -> list[tuple[Case, Figure | str, float]]:
    """Cases over the slow link."""
    found, missing = _measure(LINKED, rounds, f"link {{ bandwidth: {MBIT} }}", {})
    second = MBIT * 1e6 / 8 / MB
    return [
        (case, _figure(case, found, missing), max(case[0] / second, case[1] * case[0] / case[2] / second))
        for case in LINKED
    ]


def _measure(cases, rounds, inside, more):  # type: ignore[no-untyped-def]
    missing: dict[str, str] = {}
    turns = dict(more)
    with Sides() as sides:
        for case in cases:
            size, workers, servers = case
            conf = cluster(workers, servers, inside=inside, top=HIDDEN)
            side = attempt(sides.job, _names(case), conf, workers, f"memory:{size * MB}")
            if isinstance(side, Side):
                steps = 1 if inside else _steps(size)
                turns[_names(case)] = lambda side=side, steps=steps: side.run(steps)
            else:
                missing[_names(case)] = side
                say(f"  {_names(case)}: {side}")
        return (interleave(turns, rounds) if turns else {}), missing


def _figure(case: Case, found: dict[str, Samples], missing: dict[str, str]) -> Figure | str:
    name = _names(case)
    return found[name].figure if name in found else missing[name]


def draw(curves: dict[str, list[tuple[Case, Figure | str, float]]]) -> Path | None:
    """Both curves as a picture in the workspace; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(6 * len(curves), 5))
    for axis, (title, cases) in zip(axes, curves.items()):
        there = [(case, value, theory) for case, value, theory in cases if isinstance(value, Figure)]
        labels = [f"{size} MB\n{w}w {s}s" for (size, w, s), _, _ in there]
        axis.plot(labels, [value.value * 1e3 for _, value, _ in there], "o-", label="measured")
        axis.plot(labels, [theory * 1e3 for _, _, theory in there], "--", label="theory")
        axis.set(title=title, ylabel="ms per step", yscale="log")
        axis.legend()
    figure.autofmt_xdate()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=110)
    return PICTURE


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS)


def measure(options: argparse.Namespace) -> Sequence[Row]:
    curves = {"shared memory": local(options.rounds), f"{MBIT} Mbit/s": linked(options.rounds)}
    rows: list[Row] = []
    for title, cases in curves.items():
        for case, value, theory in cases:
            what = f"{title}: {_names(case)}"
            if isinstance(value, Figure):
                note = f"theory {theory * 1e3:.3g} ms, measured {value.value / theory:.2f} × as much"
                rows.append(row("", what, value.times(1e3), "ms", "", note, "kHidden, kAtStep"))
            else:
                rows.append(absent("", what, "ms", value, "", "kHidden, kAtStep"))
    if draw(curves) is not None:
        say(f"  picture: {PICTURE.relative_to(ROOT)}")
    return rows


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
