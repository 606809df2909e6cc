"""All tables in turn, and benchmarks/RESULTS.md: `python -m benchmarks [P5 p6 startup ...] [--tensorflow]`.

Rule: every table runs in a process of its own, leaves its rows in results/NAME.json, and the page is made of these
files. A table that was not run again keeps its old rows, with the commit they belong to.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.markdown import results
from benchmarks.record import RESULTS, ROOT, load, say
from benchmarks.sides import environment

PAGE = Path(__file__).parent / "RESULTS.md"
BUDGET_S = 30 * 60.0

GOALS: Mapping[str, str] = {
    "P1": "push + update + pull 40 MB, shared memory",
    "P2": "the same over loopback TCP",
    "P3": "40 MB all-reduce on one host, 2 to 4 ranks",
    "P4": "AllReduce topology, a training step of 2 workers",
    "P5": "Sandblaster, a training step of 2 workers",
    "P6": "Downpour, 2 groups, samples per second",
    "P7": "one worker of four slowed four times",
    "P8": "two hosts at 100 Mbit/s",
    "P9": "4 workers on a slow link: servers against the ring",
    "P10": "balance of the servers",
    "P11": "handling of messages in the pure core",
    "P12": "start-up of `topotrain run`",
}

TABLES: Mapping[str, tuple[str, ...]] = {
    "balance": ("P10",),
    "core": ("P11",),
    "startup": ("P12",),
    "exchange": ("P1", "P2", "P3"),
    "collectives": (),
    "training_step": ("P4", "P5"),
    "downpour": ("P6",),
    "straggler": ("P7",),
    "slow_link": ("P8", "P9"),
    "compressed": (),
    "slicing": (),
    "road": (),
    "tls": (),
    "link_accuracy": (),
    "compression": (),
    "growth": (),
    "memory": (),
    "reporting": (),
}
"""Module -> the goals that it measures; in this order they run. A module that is not there yet is passed over."""


def chosen(words: Sequence[str]) -> list[str]:
    """Tables for names of tables or goals, in any case; all of them for none. Raises ValueError for another word."""
    wanted: set[str] = set()
    for word in words:
        homes = [name for name, goals in TABLES.items() if word.upper() in goals or word.lower() == name]
        if not homes:
            raise ValueError(f"{word}: must be one of {', '.join((*GOALS, *TABLES))}")
        wanted.update(homes)
    return [name for name in TABLES if not words or name in wanted]


def run_all(names: Sequence[str], tensorflow: bool, budget_s: float) -> list[str]:
    """Run tables one after the other; returns the names of those that failed or were left out for lack of time."""
    began = time.monotonic()
    failed: list[str] = []
    for number, name in enumerate(names, 1):
        left = budget_s - (time.monotonic() - began)
        head = f"[{number}/{len(names)}] {name}"
        if find_spec(f"benchmarks.{name}") is None:
            say(f"{head}: is not there yet")
            continue
        if left <= 0:
            say(f"{head}: no time is left of the {budget_s / 60:g} minutes")
            failed.append(name)
            continue
        say(f"{head} ({', '.join(TABLES[name]) or 'no goal'}), {(time.monotonic() - began) / 60:.1f} min so far")
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        command += ["--tensorflow"] if tensorflow and name == "downpour" else []
        try:
            code = _wait(subprocess.Popen(command, cwd=ROOT, env=environment()), left)
        except subprocess.TimeoutExpired:
            say(f"{head}: stopped, the {budget_s / 60:g} minutes are over")
            failed.append(name)
            continue
        if code:
            say(f"{head}: failed with exit code {code}")
            failed.append(name)
    return failed


def _wait(process: "subprocess.Popen[bytes]", limit_s: float) -> int:
    """The exit code; a process that takes longer is asked to end, for it has others to end. Raises TimeoutExpired."""
    try:
        return process.wait(limit_s)
    except BaseException:
        process.terminate()
        process.wait()
        raise


def render() -> None:
    """Make the page of all results that are there."""
    there = [RESULTS / f"{name}.json" for name in TABLES]
    tables = [load(path) for path in there if path.exists()]
    homes = {goal: [name for name, goals in TABLES.items() if goal in goals] for goal in GOALS}
    PAGE.write_text(results(tables, GOALS, homes), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure topotrain beside its peers.")
    parser.add_argument("what", nargs="*", metavar="GOAL|TABLE", help="P1 to P12, or tables; all without")
    parser.add_argument("--tensorflow", action="store_true", help="install TensorFlow in a temporary folder, for P6")
    parser.add_argument("--render", action="store_true", help="only make the page anew")
    options = parser.parse_args()
    try:
        names = chosen(options.what)
    except ValueError as error:
        parser.error(str(error))
    failed = [] if options.render else run_all(names, options.tensorflow, BUDGET_S)
    render()
    say(f"page: {PAGE.relative_to(ROOT)}")
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
