"""Peak resident memory of each process (VmHWM), beside DDP's: MLP of 10.5 M parameters, 42 MB, 2 workers.

Pages that several processes map count fully in each one's peak. "Share" divides them among their users, and is what
adding a process really takes from the machine at the end of a run. The shares of all processes of a side, with a model
of 134 M parameters, SGD and momentum, are counted in sizes of the model: torch and Python are in them.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.harness import Row, absent, row
from benchmarks.models import build, parameters
from benchmarks.programs.stepper import memory
from benchmarks.record import run_table
from benchmarks.sides import Refused, Side, Sides, cluster
from topotrain.launch.agent.workspace import PROCESSES_FILE

STEPS = 10
WIDE_STEPS = 3
_MB = 1e6


def servers(side: Side) -> list[int]:
    """Process ids of a job's servers, from the file in its workspace that names its processes."""
    entries = json.loads((side.folder / "work" / PROCESSES_FILE).read_text())
    return [entry["pid"] for entry in entries if entry["servers"]]


def starts(sides: Sides, model: str) -> Mapping[str, Callable[[], Side]]:
    return {
        "alone": lambda: sides.peer("alone", "alone", 2, model),
        "DDP": lambda: sides.peer("DDP", "ddp", 2, model),
        "Sandblaster, shared memory": lambda: sides.job("shm", cluster(), 2, model, "kShm", cold=True),
        "Sandblaster, TCP": lambda: sides.job("tcp", cluster(), 2, model, "kTcp", cold=True),
        "AllReduce": lambda: sides.job("ar", cluster(servers=2, separate=False), 2, model, cold=True),
    }


def whole_sides() -> Iterator[Row]:
    """The memory of all processes of each side, in sizes of the model."""
    size = 4 * parameters(build("wide", 0).model)
    with Sides() as sides:
        for name, begin in starts(sides, "wide").items():
            what = f"{name}: all processes, {size / 4e6:.0f} M parameters"
            try:
                side = begin()
                side.run(WIDE_STEPS)
                yield row(what, sum(memory(pid)["share"] for pid in side.pids()) / size, "× the model")
                side.end()
                del sides.living[side.name]
            except Refused as reason:
                yield absent(what, "× the model", str(reason))


def measure(options: argparse.Namespace) -> Sequence[Row]:
    rows: list[Row] = []
    with Sides() as sides:
        base = 0.0
        for name, begin in starts(sides, "mlp").items():
            try:
                side = begin()
            except Refused as reason:
                rows.append(absent(f"{name}: a worker", "MB", str(reason)))
                continue
            side.run(STEPS)
            used = side.ask(check=True)
            base = base or max(answer["peak"] for answer in used) / _MB
            more = max(answer["peak"] for answer in used) / _MB
            share = sum(answer["share"] for answer in used) / len(used) / _MB
            note = f"share {share:.0f} MB; {more - base:+.0f} MB over a process alone"
            rows.append(row(f"{name}: a worker, {STEPS} steps", more, "MB", note))
            if name not in ("alone", "DDP"):
                found = [memory(pid) for pid in servers(side)]
                note = f"share {sum(f['share'] for f in found) / len(found) / _MB:.0f} MB"
                rows.append(row(f"{name}: a server", max(f["peak"] for f in found) / _MB, "MB", note))
            side.end()
            del sides.living[side.name]
    return [*rows, *whole_sides()]


if __name__ == "__main__":
    run_table("memory", "Peak resident memory", measure)
