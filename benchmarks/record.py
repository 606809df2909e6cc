"""Where figures go: results/NAME.json, with the command, the commit and the machine that made them.

Rule: nothing that says whose machine it was is written, no host name, no path; only what explains a figure.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.harness import ROUNDS, Row
from benchmarks.processor import MachineLoad

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Table:
    """All rows of one table, and where they come from. `seconds` is what measuring took.

    `others` and `stolen` are as in `processor.Shares`. None: measured before they were recorded.
    """

    name: str
    title: str
    command: str
    commit: str
    machine: str
    seconds: float
    rows: tuple[Row, ...]
    others: float | None = None
    stolen: float | None = None

    @property
    def disturbed(self) -> bool:
        """Whether the machine did so much else that times of this table say nothing."""
        return (self.others or 0.0) + (self.stolen or 0.0) > MOST_DISTURBANCE


def machine() -> str:
    """What the figures depend on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    words = [
        f"{os.cpu_count()} cores ({_processor()})",
        f"{memory:.0f} GiB",
        f"Linux {platform.release().partition('-')[0]}",
        f"Python {platform.python_version()}",
        f"torch {version('torch')}",
        f"TCP {control.read_text().strip() if control.exists() else 'congestion control unknown'}",
    ]
    return ", ".join(words)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


MOST_DISTURBANCE = 0.1
"""Share of the machine's processor time. Sides with more processes lose more of it, so that ratios move, too."""

FIGURES = ("benchmarks/results", "benchmarks/RESULTS.md", "docs/fault-tolerance.md")
"""Where figures stand."""


def commit(checkout: Path = ROOT) -> str:
    """The commit, with "+changes" where the tree holds something else (figures themselves do not count)."""
    head = _git(checkout, "rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    figures = [f":!{path}" for path in FIGURES]
    dirty = _git(checkout, "status", "--porcelain", "--", ".", *figures)
    return head + ("+changes" if dirty else "")


def _git(checkout: Path, *words: str) -> str:
    try:
        return subprocess.run(["git", *words], cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def save(table: Table, folder: Path = RESULTS) -> Path:
    """Write a table to folder/NAME.json."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{table.name}.json"
    path.write_text(json.dumps(asdict(table), indent=1) + "\n", encoding="utf-8")
    return path


def load(path: Path) -> Table:
    """Read what `save` wrote."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Table(**{**data, "rows": tuple(Row(**row) for row in data["rows"])})


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def run_table(
    name: str,
    title: str,
    measure: Callable[[argparse.Namespace], Sequence[Row]],
    add: Callable[[argparse.ArgumentParser], object] = lambda _: None,
    hardware: Callable[[], str] = lambda: "",
    module: str = "",
) -> None:
    """The main function of a table's module: measure, print, save.

    Args:
        add: declares options of the table's own. With one of the name `trial` that is set, nothing is saved.
        hardware: what the figures depend on, besides what `machine` says.
        module: the module that measures it, if it has another name than the table.
    """
    program = f"python -m benchmarks.{module or name}"
    parser = argparse.ArgumentParser(prog=program, description=title)
    add(parser)
    options = parser.parse_args()
    if getattr(options, "rounds", ROUNDS) < ROUNDS:
        parser.error(f"--rounds {options.rounds}: must be at least {ROUNDS}, for the median to mean something")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # processes and networks are then taken away as usual
    state, began, load_of_machine = commit(), time.monotonic(), MachineLoad()
    rows = tuple(measure(options))
    shares = load_of_machine.shares()
    # An absolute path would say whose machine it was.
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    command = " ".join([program, *words])
    seconds = round(time.monotonic() - began, 1)
    on = ", ".join(filter(None, (machine(), hardware())))
    table = Table(name, title, command, state, on, seconds, rows, round(shares.others, 3), round(shares.stolen, 3))
    from benchmarks.markdown import section

    print(section(table))
    if getattr(options, "trial", False):
        say("a trial: nothing is written")
        return
    path = save(table)
    if table.disturbed:
        say(f"{shares.total:.0%} of the machine's processor time went elsewhere: measure again when it is quiet")
    say(f"written to {path.relative_to(ROOT)}")
