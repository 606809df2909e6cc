"""How much of the copying between host and GPU runs while the GPU computes, from a trace of torch's profiler.

Worker (0,0) of a job traces some of its steps. A worker copies gradients to pinned host memory on a stream of its own
from the moment at which they are complete, so most of that should run beside the rest of the backward. The traces stay
in workspace/bench-gpu, for chrome://tracing or Perfetto.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import models
from benchmarks.gpu_training import HIDDEN, MODES, PATIENCE_S, Clock, Target, hardware
from benchmarks.gpus import Gpus, probe
from benchmarks.harness import ROUNDS, Row, Samples, absent, row
from benchmarks.record import ROOT, run_table, say
from benchmarks.sides import Side, Sides, cluster
from benchmarks.traces import TO_DEVICE, TO_HOST, Copies, copies_of

NAME, TITLE = "gpu_overlap", "Copies beside the computing of a GPU"

TRACES = ROOT / "workspace" / "bench-gpu"
STEPS = 6
TOPS = ("", HIDDEN)
WAYS = {TO_HOST: "gradients to the host", TO_DEVICE: "values and means to the GPU"}
UNIT = "% of their time beside the backward"


def measure_model(model: str, target: Target, rounds: int, clock: Clock, folder: Path) -> list[Row]:
    """The rows of one model."""
    rows: list[Row] = []
    arguments = ("--device", target.device, "--times", str(target.times(len(TOPS))))
    for top in TOPS:
        try:
            clock.check()
            with Sides(arguments, PATIENCE_S) as sides:
                side = sides.job(f"{model} {top}", cluster(target.workers, top=top), target.workers, model)
                kept = folder / f"{model}-{MODES[top].replace(', ', '-')}.json"
                traces = [_traced(side, kept.with_stem(f"{kept.stem}-{number}")) for number in range(rounds)]
            rows += [_row(model, target.workers, top, way, traces) for way in WAYS]
        except Exception as error:  # a trace of another version may hold anything
            say(f"  {model}, {MODES[top]}: {error}")
            rows += [absent("", _what(model, target.workers, way), UNIT, str(error), mode=MODES[top]) for way in WAYS]
    return rows


def _traced(side: Side, file: Path) -> Path:
    side.run(2)
    side.ask(trace=str(file), count=STEPS)
    return file


def _what(model: str, workers: int, way: str) -> str:
    return f"{model.upper()}, {workers} workers, Sandblaster: {WAYS[way]}"


def _row(model: str, workers: int, top: str, way: str, traces: Sequence[Path]) -> Row:
    found = [copies_of(trace, way) for trace in traces]
    what, mode = _what(model, workers, way), MODES[top]
    shares = tuple(100 * copies.share for copies in found if copies.share is not None)
    if not any(copies.count for copies in found):
        return absent("", what, UNIT, "the trace has no copies between host and GPU", mode=mode)
    if not shares:
        return absent("", what, UNIT, f"none during a backward; {_note(found[-1])}", mode=mode)
    return row("", what, Samples(shares).figure, UNIT, note=_note(found[-1]), mode=mode)


def _note(copies: Copies) -> str:
    count, megabytes = copies.count / STEPS, copies.megabytes / STEPS
    return (
        f"in a step {count:.1f} copies with {megabytes:.1f} MB, {copies.pinned / copies.count:.0%} of them pinned, "
        f"{copies.launched / STEPS:.1f} during the backward with {copies.spent / STEPS:.3f} ms of copying"
    )


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="*", default=["mlp", "gpt"], choices=[*models.TRAINED, "small"])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="traces of each job")
    parser.add_argument("--workers", type=int, default=0, help="0: one for each GPU, at least 2")
    parser.add_argument("--seconds", type=float, default=150.0, help="jobs that are not begun by then are left out")
    parser.add_argument("--trial", action="store_true", help="on the CPU, where nothing is copied; writes no figures")
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="FOLDER", help="where traces are kept")


def absent_rows(reason: str) -> list[Row]:
    """All that is measured, with the reason why it is not."""
    return [absent("", f"Sandblaster: {what}", UNIT, reason, mode=MODES[top]) for top in TOPS for what in WAYS.values()]


def measure(options: argparse.Namespace) -> Sequence[Row]:
    gpus = Gpus() if options.trial else probe()
    if gpus.reason:
        say(f"  {gpus.reason}")
        return absent_rows(gpus.reason)
    target, clock = Target("cpu" if options.trial else "cuda", gpus, options.workers), Clock(options.seconds)
    options.traces.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for model in options.models:
        say(f"  {model}")
        rows += measure_model(model, target, options.rounds, clock, options.traces.resolve())
    return rows


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare, hardware)
