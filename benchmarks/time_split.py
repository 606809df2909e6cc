"""Where the time of a TCP step goes: kernel, Python, sums, update, by process, from a profiler.

Rule: `perf` samples all processes of a job while it makes the steps of P2, and each sample counts for what its topmost
function belongs to. The same for a plain program that moves the same bytes with the same kernels: what is beyond it is
the price of the protocol. `--before FOLDER` profiles the job of an older checkout in the same run, too. Needs `perf`
(Linux tools) and the right to use it; without them the rows say so.
"""

import argparse
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.exchange import HIDDEN, PLAIN, PROGRAM, PUSHER, difference
from benchmarks.harness import Row, Samples, absent, interleave, row
from benchmarks.record import ROOT, commit, run_table, say
from benchmarks.sides import Refused, Side, Sides, cluster

NAME, TITLE, GOALS = "time_split", "Where the time of a TCP step goes", ()

FREQUENCY = 997  # samples per second; not a divisor of the timer's
STEPS = 100
JOB = "2 workers 1 server over TCP"
PARTS: Mapping[str, str] = {
    "kernel: copies": r"\[kernel\].*(copy_(to|from|user)|copyin|copyout|rep_movs|memcpy)",
    "kernel: the rest of the network and the scheduler": r"\[kernel\]",
    "update": r"libtorch_cpu.*fused_(sgd|adam)",
    "check for values that are not finite": r"libtorch_cpu.*dot",
    "sums": r"libtorch_cpu.*(add|mul|div|copy)_kernel",
    "calls into torch": r"libtorch|libc10|libgomp|_multiarray",
    "Python": r"libpython|python3|\.cpython-",
}
"""What a sample counts for: the first pattern that its library and function match."""
OTHER = "other libraries"
ALL = "all"

_LINE = re.compile(r"^\s*[\d.]+%\s+(?P<samples>\d+)\s+(?P<where>\S+)\s+\[.\]\s+(?P<symbol>.+?)\s*$")


@dataclass(frozen=True, slots=True)
class Split:
    """Milliseconds of processor time of a step, by part."""

    parts: Mapping[str, float]

    def of(self, part: str) -> float:
        """The milliseconds of one part, or of ALL."""
        return sum(self.parts.values()) if part == ALL else self.parts[part]


def part_of(library: str, symbol: str) -> str:
    """What a sample in this function counts for."""
    text = f"{'[kernel]' if library.startswith('[') else library} {symbol}"
    return next((part for part, pattern in PARTS.items() if re.search(pattern, text)), OTHER)


def split(report: str, steps: int) -> Split:
    """Read the lines of `perf report --sort dso,symbol -n`."""
    parts = dict.fromkeys((*PARTS, OTHER), 0.0)
    for line in report.splitlines():
        found = _LINE.match(line)
        if found is not None:
            samples = int(found["samples"])
            parts[part_of(found["where"], found["symbol"])] += samples / FREQUENCY * 1e3 / steps
    return Split(parts)


def profile(side: Side, folder: Path) -> Split:
    """Sample the processes of a side during STEPS steps. Raises Refused."""
    data = folder / f"{len(list(folder.iterdir()))}.data"
    pids = ",".join(map(str, side.pids()))
    command = ["perf", "record", "-e", "cpu-clock", "-F", str(FREQUENCY), "-o", str(data), "-p", pids]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as recorder:
        while not data.exists() and recorder.poll() is None:  # it creates the file when it has begun
            side.run(1)
        side.run(STEPS)
        recorder.send_signal(signal.SIGINT)
        _, errors = recorder.communicate()
    if not data.exists():
        raise Refused(f"perf: {errors.decode(errors='replace').strip().splitlines()[-1:] or 'no data'}")
    command = ["perf", "report", "-i", str(data), "--no-children", "--stdio", "--sort", "dso,symbol", "-n"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return split(text, STEPS)


def options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this table."""
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="an older checkout, for before and after")


def measure(options: argparse.Namespace) -> Sequence[Row]:
    """All rows."""
    if shutil.which("perf") is None:
        return [absent("", JOB, "CPU ms", "perf is not installed")]
    with tempfile.TemporaryDirectory() as folder, Sides() as sides:
        try:
            living = {JOB: _job(sides, JOB, ROOT), PROGRAM: sides.plain(PROGRAM, PLAIN, "plain", 3)}
            if options.before:
                living[f"before ({commit(options.before)})"] = _job(sides, "before", options.before.resolve())
            for side in living.values():
                side.run(STEPS // 10)
            found: dict[str, list[Split]] = {name: [] for name in living}

            def turn(name: str) -> float:
                found[name].append(profile(living[name], Path(folder)))
                return found[name][-1].of(ALL)

            interleave({name: partial(turn, name) for name in living}, spare=0)
        except Refused as reason:
            return [absent("", JOB, "CPU ms", str(reason))]
        wrong = [text for side in living.values() if (text := difference(side))]
    if wrong:
        return [absent("", JOB, "CPU ms", wrong[0])]
    return [_row(part, found) for part in (*PARTS, OTHER, ALL)]


def _job(sides: Sides, name: str, checkout: Path) -> Side:
    say(f"  {JOB}: {name}")
    return sides.job(name, cluster(workers=2, top=HIDDEN), 2, "step", "kTcp", script=PUSHER, checkout=checkout)


def _row(part: str, found: Mapping[str, Sequence[Split]]) -> Row:
    figures = {name: Samples(tuple(each.of(part) for each in splits)).figure for name, splits in found.items()}
    others = [f"{name}: {figure.value:.1f}" for name, figure in figures.items() if name != JOB]
    return row("", f"{JOB}: {part}", figures[JOB], "CPU ms", note="; ".join(others), mode="kHidden, kAtStep")


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, options)
