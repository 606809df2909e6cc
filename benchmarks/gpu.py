"""All that is measured on GPUs, and benchmarks/RESULTS-GPU.md: `python -m benchmarks.gpu [TABLE ...]`.

Rule: each table runs in a process of its own, in less than 10 minutes together. What could not be measured is a row
with the reason, and ends nothing. Without a GPU the page says so, the exit code is 0, and figures that were measured
before are kept.
"""

import argparse
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.__main__ import run_all, told, worthless
from benchmarks.gpus import Gpus, probe
from benchmarks.markdown import runs, section
from benchmarks.record import RESULTS, ROOT, Table, commit, load, machine, save, say

PAGE = Path(__file__).parent / "RESULTS-GPU.md"
BUDGET_S = 9.5 * 60.0
TABLES = ("gpu_overlap", "gpu_training")
"""The short one first: the long one takes what time is left."""
MINUTES = {"gpu_overlap": 1.5, "gpu_training": 3.0}
"""The least time in which a table is begun."""
LIMITS_S = {"gpu_overlap": 120.0, "gpu_training": 330.0}
"""Sides that are not begun by then are left out."""

_INTRODUCTION = """# Results on GPUs

Written by `make bench-gpu`; do not edit. A figure is a ratio of medians from one run in which all sides took turns, in
another order in each round, with the lowest and highest ratio of a round behind it. Float32, with torch's own settings.
[The other figures](RESULTS.md) are from machines without a GPU, and [GPUs](../docs/gpu.md) says what is copied when.
"""


def page(tables: Sequence[Table], reason: str = "") -> str:
    """The whole page. `reason` says why the last attempt measured nothing; empty if it did."""
    measured = [table for table in tables if any(row.figure is not None for row in table.rows)]
    parts = [_INTRODUCTION]
    if not measured:
        parts.append(f"**Not measured**: {reason or 'make bench-gpu was not run on a machine with an NVIDIA GPU'}.\n")
    if tables:
        parts += ["## The runs\n", runs(tables), ""]
    return "\n".join(parts + [section(table) for table in tables])


def render(folder: Path = RESULTS, to: Path = PAGE, reason: str = "") -> None:
    """Make the page of all results that are there."""
    there = [folder / f"{name}.json" for name in TABLES]
    to.write_text(page([load(path) for path in there if path.exists()], reason), encoding="utf-8")


def has_figures(name: str, folder: Path = RESULTS) -> bool:
    """Whether figures of an earlier run of this table are there."""
    path = folder / f"{name}.json"
    return path.exists() and any(row.figure is not None for row in load(path).rows)


def note_absence(name: str, reason: str, gpus: Gpus, folder: Path = RESULTS) -> None:
    """Leave the reason where a table has no figures, not even older ones."""
    if has_figures(name, folder):
        return
    module = import_module(f"benchmarks.{name}")
    on = ", ".join((machine(), str(gpus)))
    rows = tuple(module.absent_rows(reason))
    save(Table(name, module.TITLE, f"python -m benchmarks.{name}", commit(), on, 0.0, rows), folder)


def measure_all(names: Sequence[str], gpus: Gpus) -> list[str]:
    """Measure these tables; returns those that failed."""
    began = time.monotonic()
    more = {name: ("--seconds", f"{LIMITS_S[name]:g}") for name in names}
    outcome = run_all(names, False, BUDGET_S, MINUTES, more)
    for name in outcome.failed:
        note_absence(name, "its process was stopped or failed; what it said is on the terminal", gpus)
    for name in outcome.skipped:
        note_absence(name, f"left out: too little was left of {BUDGET_S / 60:g} minutes", gpus)
    if disturbed := worthless([name for name in names if name not in (*outcome.failed, *outcome.skipped)]):
        say(f"the machine was busy, so that times and ratios of these say nothing: {', '.join(disturbed)}")
    say(told(len(names), time.monotonic() - began, BUDGET_S, outcome))
    return outcome.failed


def report(names: Sequence[str], gpus: Gpus, folder: Path = RESULTS, to: Path = PAGE) -> list[str]:
    """Measure these tables if there is a GPU, and make the page; returns those that failed."""
    failed: list[str] = []
    if gpus.reason:
        say(f"not measured: {gpus.reason}")
        for name in names:
            note_absence(name, gpus.reason, gpus, folder)
    else:
        say(str(gpus))
        failed = measure_all(names, gpus)
    render(folder, to, gpus.reason)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Measure topotrain on NVIDIA GPUs.")
    parser.add_argument("what", nargs="*", metavar="TABLE", help=f"{' or '.join(TABLES)}; both without")
    parser.add_argument("--render", action="store_true", help="only make the page anew")
    options = parser.parse_args()
    if unknown := [word for word in options.what if word not in TABLES]:
        parser.error(f"{unknown[0]}: must be one of {', '.join(TABLES)}")
    if options.render:
        render()
        raise SystemExit(0)
    names = [name for name in TABLES if not options.what or name in options.what]
    failed = report(names, probe())
    say(f"page: {PAGE.relative_to(ROOT)}")
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
