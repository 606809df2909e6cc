"""All tables in turn, and benchmarks/RESULTS.md: `python -m benchmarks [P5 p6 startup ...] [--tensorflow]`.

Rule: every table runs in a process of its own, leaves its rows in results/NAME.json, and the page is made of these
files. A table that was not run again keeps its old rows, with the commit they belong to.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from benchmarks.markdown import results
from benchmarks.reasons import SOURCES
from benchmarks.record import RESULTS, ROOT, load, say
from benchmarks.sides import environment

PAGE = Path(__file__).parent / "RESULTS.md"
BUDGET_S = 30 * 60.0
ENDING_S = 30.0
"""What a table that is stopped may take for ending its processes."""

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
    "P12": "start-up",
    "P13": "the same bytes as many tensors",
    "P14": "4 workers on each of two hosts, summed before the link",
}

TABLES: Mapping[str, tuple[str, ...]] = {
    "balance": ("P10",),
    "core": ("P11",),
    "startup": ("P12",),
    "exchange": ("P1", "P2", "P3"),
    "tensors": ("P13",),
    "training_step": ("P4", "P5"),
    "downpour": ("P6",),
    "straggler": ("P7",),
    "slow_link": ("P8", "P9"),
    "host_sums": ("P14",),
    "transports": (),
    "compression": (),
    "link_accuracy": (),
    "tls": (),
    "memory": (),
    "reporting": (),
    "compressed": (),
    "splitting": (),
}
"""Module -> the goals that it measures; in this order they run, so that what has no goal and takes long is what a slow
machine leaves out. A module that is not there yet is passed over."""

ALONE = (
    "collectives",
    "growth",
    "snapshots",
    "safety",
    "survivors",
    "asynchrony",
    "agreement",
    "uneven",
    "lanes",
    "slicing",
    "starts",
    "time_split",
    "islands",
    "islands_loss",
    "watch_cost",
    "predictions",
    "predictions_held_out",
    "advised",
)
"""Tables that are run by their own command only, and stand on the page all the same: no room is left in the budget."""

MINUTES: Mapping[str, float] = {
    "balance": 0.1,
    "core": 0.1,
    "startup": 0.5,
    "exchange": 2.0,
    "tensors": 0.9,
    "training_step": 7.7,
    "downpour": 2.1,
    "straggler": 2.0,
    "slow_link": 4.2,
    "host_sums": 3.1,
    "transports": 0.1,
    "compression": 0.2,
    "link_accuracy": 0.4,
    "tls": 0.1,
    "memory": 0.4,
    "reporting": 0.5,
    "compressed": 1.4,
    "splitting": 1.0,
}
"""What each takes on 2 cores that have nothing else to do. A table is not begun if less than that is left."""
TENSORFLOW_MINUTES = 2.0


def chosen(words: Sequence[str]) -> list[str]:
    """Tables for names of tables or goals, in any case; all of them for none. Raises ValueError for another word."""
    wanted: set[str] = set()
    for word in words:
        homes = [name for name, goals in TABLES.items() if word.upper() in goals or word.lower() == name]
        if not homes:
            raise ValueError(f"{word}: must be one of {', '.join((*GOALS, *TABLES))}")
        wanted.update(homes)
    return [name for name in TABLES if not words or name in wanted]


@dataclass(slots=True)
class Outcome:
    """Tables that ended with an error or had to be stopped, and those that were not begun for lack of time."""

    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def run_all(
    names: Sequence[str],
    tensorflow: bool,
    budget_s: float,
    minutes: Mapping[str, float] = MINUTES,
    more: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Outcome:
    """Run tables one after the other, as far as the time goes; all of them have ended when this returns.

    Args:
        minutes: what each takes, as in MINUTES.
        more: options of tables.
    """
    began = time.monotonic()
    outcome = Outcome()
    for number, name in enumerate(names, 1):
        left = budget_s - ENDING_S - (time.monotonic() - began)
        head = f"[{number}/{len(names)}] {name}"
        if find_spec(f"benchmarks.{name}") is None:
            say(f"{head}: is not there yet")
            continue
        needed = minutes[name] + TENSORFLOW_MINUTES * (tensorflow and name == "downpour")
        if left < 60 * needed:
            say(
                f"{head}: left out, it takes {needed:g} min and {max(0.0, left) / 60:.1f} of {budget_s / 60:g} are left"
            )
            outcome.skipped.append(name)
            continue
        say(
            f"{head} ({', '.join(TABLES.get(name, ())) or 'no goal'}), {(time.monotonic() - began) / 60:.1f} min so far"
        )
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        command += ["--tensorflow"] if tensorflow and name == "downpour" else []
        command += more.get(name, ())
        try:
            code = _wait(subprocess.Popen(command, cwd=ROOT, env=environment()), left)
        except subprocess.TimeoutExpired:
            say(f"{head}: stopped, the {budget_s / 60:g} minutes are over")
            outcome.failed.append(name)
            continue
        if code:
            say(f"{head}: failed with exit code {code}")
            outcome.failed.append(name)
    return outcome


def _wait(process: "subprocess.Popen[bytes]", limit_s: float) -> int:
    """The exit code; a process that takes longer is asked to end, for it has others to end. Raises TimeoutExpired."""
    try:
        return process.wait(limit_s)
    except BaseException:
        process.terminate()
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise


def told(tables: int, seconds: float, budget_s: float, outcome: Outcome) -> str:
    """The last line of a run: how long it took, whether that is within the budget, and what was left out."""
    within = "within" if seconds <= budget_s else "NOT within"
    words = [f"{tables - len(outcome.skipped)} tables took {seconds / 60:.1f} min, {within} {budget_s / 60:g} min"]
    if outcome.skipped:
        words.append(f"left out: {', '.join(outcome.skipped)} (python -m benchmarks {' '.join(outcome.skipped)})")
    return "; ".join(words)


def worthless(names: Sequence[str], folder: Path = RESULTS) -> list[str]:
    """Those of these tables that were measured while the machine did much else."""
    there = [folder / f"{name}.json" for name in names]
    # How parameters are divided over servers depends on no time.
    return [path.stem for path in there if path.exists() and path.stem != "balance" and load(path).disturbed]


def render() -> None:
    """Make the page of all results that are there."""
    there = [RESULTS / f"{name}.json" for name in (*TABLES, *ALONE, *SOURCES)]
    tables = [load(path) for path in there if path.exists()]
    homes = {goal: [name for name, goals in TABLES.items() if goal in goals] for goal in GOALS}
    PAGE.write_text(results(tables, GOALS, homes), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure topotrain beside its peers.")
    parser.add_argument("what", nargs="*", metavar="GOAL|TABLE", help="P1 to P14, or tables; all without")
    parser.add_argument("--tensorflow", action="store_true", help="install TensorFlow in a temporary folder, for P6")
    parser.add_argument("--render", action="store_true", help="only make the page anew")
    options = parser.parse_args()
    try:
        names = chosen(options.what)
    except ValueError as error:
        parser.error(str(error))
    if options.render:
        render()
        raise SystemExit(0)
    began = time.monotonic()
    outcome = run_all(names, options.tensorflow, BUDGET_S)
    render()
    say(f"page: {PAGE.relative_to(ROOT)}")
    if disturbed := worthless(names):
        say(f"the machine was busy, so that times and ratios of these say nothing: {', '.join(disturbed)}")
    say(told(len(names), time.monotonic() - began, BUDGET_S, outcome))
    raise SystemExit(f"failed: {', '.join(outcome.failed)}" if outcome.failed else 0)


if __name__ == "__main__":
    main()
