"""Time to a loss: runs of programs/learner.py from start to end, and when they first came that far."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.sides import Refused, Sides, job_command, spawn

LEARNER = Path(__file__).parent / "programs" / "learner.py"
LIMIT_S = 180


@dataclass(frozen=True, slots=True)
class Point:
    """Seconds since the first step (without looking), steps, loss over the training data, held-out accuracy."""

    seconds: float
    step: int
    loss: float
    accuracy: float


def job(sides: Sides, name: str, conf: str, *args: str) -> list[Point]:
    """Run a job to its end. Raises Refused."""
    digits = sides.room("digits").parent / "digits.pt"
    return _points(run_program(sides, name, conf, LEARNER, "--digits", str(digits), *args))


def run_program(sides: Sides, name: str, conf: str, program: Path, *args: str, limit_s: float = LIMIT_S) -> Path:
    """Run a program as a job to its end; returns the file that it was given as `--out`. Raises Refused.

    Beside that file the job leaves report.json, and `work`, its workspace.
    """
    folder = sides.room(name)
    words = ("run", "--quiet", "--forkserver", sides.serve(), "--report", str(folder / "report.json"))
    command = [*job_command(folder, conf, *words), str(program), "--out", str(folder / "points"), *args]
    _run(folder, [command], [{}], limit_s)
    return folder / "points"


def ddp(sides: Sides, name: str, size: int, *args: str) -> list[Point]:
    """Run DDP to its end. Raises Refused."""
    folder = sides.room(name)
    # All runs of the same sides keep their digits in one file.
    files = ("--out", str(folder / "points"), "--digits", str(folder.parent / "digits.pt"))
    command = [sys.executable, str(LEARNER), "--peer", "ddp", *files, *args]
    _run(folder, [command] * size, sides.meeting(size))
    return _points(folder / "points")


def _run(
    folder: Path,
    commands: Sequence[Sequence[str]],
    variables: Sequence[dict[str, str]],
    limit_s: float = LIMIT_S,
) -> None:
    started = [
        spawn(folder / f"{number}.err", command, more)
        for number, (command, more) in enumerate(zip(commands, variables, strict=True))
    ]
    try:
        codes = [process.wait(limit_s) for process in started]
    except subprocess.TimeoutExpired:
        raise Refused(f"did not end within {limit_s:g} s") from None
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if any(codes):
        lines = [line for file in sorted(folder.glob("*.err")) for line in file.read_text().splitlines() if line]
        raise Refused(next((line for line in lines if "rror" in line), f"exit codes {codes}"))


def _points(file: Path) -> list[Point]:
    return [Point(*json.loads(line)) for line in file.read_text().splitlines()]


def first(points: Sequence[Point], loss: float | None = None, accuracy: float | None = None) -> Point:
    """The first point that is as good as that. Raises Refused if none is."""
    for point in points:
        if (loss is None or point.loss <= loss) and (accuracy is None or point.accuracy >= accuracy):
            return point
    last = points[-1] if points else Point(0.0, 0, float("nan"), float("nan"))
    raise Refused(f"ended with loss {last.loss:.3f} and accuracy {last.accuracy:.3f} after {last.step} steps")
