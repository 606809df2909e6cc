"""Each way to start a job against plain `python` with the same script, to the first step of the last worker.

The sides are measured in turn, in an order of their own in each round. The processor seconds are those of all processes
from the command line to the end of a job of few steps. Nothing of a job runs before it; the files, and the compiled
modules, are in the kernel's cache.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness import ROUNDS, Row, interleave, ratio, row
from benchmarks.processor import Turn, spent_below
from benchmarks.record import environment, run_table
from benchmarks.sides import Refused, Sides, cluster, job_command

SCRIPT = Path(__file__).parent / "programs" / "first_step.py"
PATIENCE_S = 240.0
_PR_SET_CHILD_SUBREAPER = 36
# Without limits that Open MPI has on its own: it refuses root and more processes than cores.
_MPIRUN = ("--pass=--allow-run-as-root", "--pass=--oversubscribe")

PLAIN = "plain python"
WAYS: Mapping[str, str] = {
    "run 1": "topotrain run, 1 worker and 1 server",
    "run 2": "topotrain run, 2 workers and 1 server",
    "run 4": "topotrain run, 4 workers and 2 servers",
    "unit": "topotrain unit, 2 units started by hand at once",
    "torchrun": "topotrain launch torchrun, 2 units",
    "mpirun": "topotrain launch mpirun, 2 units",
    "torchrun alone": "for comparison: torchrun, 2 processes of the same script, each by itself",
}


def commands(way: str, folder: Path) -> list[list[str]]:
    """The command lines of a way to start, which come up together."""
    marks = ["--marks", str(folder / "marks")]
    python, script = [sys.executable], [str(SCRIPT), *marks]
    if way == PLAIN:
        return [[*python, *script]]
    if way == "torchrun alone":
        return [[*python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *script]]
    sizes = {"run 1": (1, 1, 1), "run 2": (2, 1, 1), "run 4": (2, 2, 2)}
    if way in sizes:
        return [[*job_command(folder, cluster(*sizes[way]), "run", "--quiet"), *script]]
    # Each of two units has a worker, and a server in the same process.
    conf = cluster(2, 2, separate=False)
    if way == "unit":
        words = ("unit", "--quiet", "--rendezvous", (folder / "meet").as_uri(), "--nprocs", "2", "--rank")
        return [[*job_command(folder, conf, *words, str(rank)), *script] for rank in range(2)]
    return [[*job_command(folder, conf, "launch", way, *(_MPIRUN if way == "mpirun" else ())), *script]]


def start(sides: Sides, way: str) -> Turn:
    """Start a job and wait for its end: the seconds to the first step of the last worker. Raises Refused."""
    folder = sides.room(way)
    (folder / "marks").mkdir()
    words = commands(way, folder)
    env = environment()
    # As for a user: the modules are compiled once, by the round that does not count.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    before, began = spent_below(), time.time()
    running = []
    for number, line in enumerate(words):
        with (folder / f"{number}.err").open("wb") as errors:
            running.append(subprocess.Popen(line, env=env, cwd=folder, stdout=errors, stderr=errors))
    codes = [process.wait(PATIENCE_S) for process in running]
    _reap()
    marks = [float(mark.read_text()) for mark in (folder / "marks").iterdir()]
    if any(codes) or not marks:
        said = (folder / "0.err").read_text(errors="replace").strip().splitlines()
        raise Refused(said[-1] if said else f"exit codes {codes}")
    turn = Turn(max(marks) - began, spent_below() - before)
    shutil.rmtree(folder)
    return turn


def _reap() -> None:
    """Wait for processes that have outlived their parents, which are children of this one then."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
        except ChildProcessError:
            return


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS)


def measure(options: argparse.Namespace) -> Sequence[Row]:
    """The rows of all ways to start a job that this machine has."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    missing = {} if shutil.which("mpirun") else {"mpirun": "mpirun is not installed"}
    with Sides() as sides:
        calls: dict[str, Callable[[], Turn]] = {
            way: partial(start, sides, way) for way in (PLAIN, *WAYS) if way not in missing
        }
        found = interleave(calls, options.rounds)
    plain = found[PLAIN]
    note = "the processor time is that of the whole run"
    rows = [row("python, the same script alone", plain.figure, "s", note).costing(plain)]
    for way, what in WAYS.items():
        line = ratio(what, found, missing, way, PLAIN, "x python")
        rows.append(line if way in missing else line.costing(found[way]))
    return rows


if __name__ == "__main__":
    run_table("starts", "Starts against plain python", measure, declare)
