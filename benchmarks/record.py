"""The record of figures: results/MACHINE.json has all tables of a machine, each with its command and commit.

Nothing that says whose machine it was is written, no host name and no path, only what explains a figure.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.harness import ROUNDS, Row
from benchmarks.processor import MachineLoad

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
MOST_DISTURBANCE = 0.1
"""Share of the machine's processor time. Sides with more processes lose more of it, so that ratios move, too."""
FIGURES = ("benchmarks/results", "benchmarks/RESULTS.md", "tests/soak/*.json")
"""Files that measurements write."""


@dataclass(frozen=True, slots=True)
class Table:
    """All rows of one table, and where they come from. `seconds` is what measuring took.

    `others` and `stolen` are as in `processor.Shares`. None: measured before they were recorded.
    """

    title: str
    command: str
    commit: str
    machine: str
    seconds: float
    rows: tuple[Row, ...]
    others: float | None = None
    stolen: float | None = None


def environment() -> dict[str, str]:
    """The environment of processes that are measured: one thread each, and this checkout."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **threads, "PYTHONPATH": str(ROOT)}


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


def commit(checkout: Path = ROOT) -> str:
    """The commit, with "+changes" where the tree holds something else (figures themselves do not count)."""
    head = _git(checkout, "rev-parse", "--short=12", "HEAD")
    dirty = _git(checkout, "status", "--porcelain", "--", ".", *(f":!{path}" for path in FIGURES))
    return (head or "unknown") + ("+changes" if head and dirty else "")


def _git(checkout: Path, *words: str) -> str:
    try:
        return subprocess.run(["git", *words], cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def file_of(machine: str, folder: Path = RESULTS) -> Path:
    """The file of the machine, by its number of cores and its processor."""
    cores, _, rest = machine.partition(" cores (")
    kind = re.sub(r"\((R|TM)\)|\bProcessor\b|\bCPU\b", "", rest.partition("), ")[0])
    return folder / f"{cores}-cores-{'-'.join(re.findall(r'[a-z0-9]+', kind.lower()))}.json"


def load(path: Path) -> dict[str, Table]:
    """All tables of a machine, by name."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: Table(**{**each, "rows": tuple(Row(**one) for one in each["rows"])}) for name, each in found.items()}


def save(name: str, table: Table, folder: Path = RESULTS) -> Path:
    """Put a table into the file of its machine, where the others stay."""
    path = file_of(table.machine, folder)
    path.write_text(written({**load(path), name: table}), encoding="utf-8")
    return path


def written(tables: Mapping[str, Table]) -> str:
    """Tables as JSON with a line for each row, without empty fields."""
    parts = []
    for name, table in sorted(tables.items()):
        head = {key: value for key, value in asdict(table).items() if key != "rows"}
        rows = [{key: value for key, value in asdict(row).items() if value not in (None, "")} for row in table.rows]
        rows = [{"figure": None, **row} for row in rows]
        lines = ",\n   ".join(json.dumps(row, ensure_ascii=False) for row in rows)
        start = json.dumps(head, indent=2, ensure_ascii=False)[:-2]
        parts.append(f' {json.dumps(name)}: {start},\n  "rows": [\n   {lines}\n  ]}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def number(value: float | None) -> str:
    """Three digits that count; "–" for none."""
    if value is None:
        return "–"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


def figure(row: Row) -> str:
    """The median, its unit, and the range over the rounds."""
    if row.figure is None:
        return "–"
    spread = f" ({number(row.low)}–{number(row.high)})" if row.low is not None else ""
    return f"{number(row.figure)} {row.unit}{spread}"


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
        add: declares options of the table's own. If one of the name `trial` or `only` is set, nothing is saved.
        hardware: what the figures depend on, besides what `machine` says.
        module: the module that measures it, if it has another name than the table.
    """
    program = f"python -m benchmarks.{module or name}"
    parser = argparse.ArgumentParser(prog=program, description=title)
    parser.add_argument("--trial", action="store_true", help="save nothing")
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
    seconds, on = round(time.monotonic() - began, 1), ", ".join(filter(None, (machine(), hardware())))
    spent = (round(shares.others, 3), round(shares.stolen, 3))
    for one in rows:
        print(f"{one.what}{one.mode and f' ({one.mode})'}: {figure(one)}. {one.note}".rstrip(". "))
    if shares.total > MOST_DISTURBANCE:
        say(f"{shares.total:.0%} of the machine's processor time went elsewhere: measure again when it is quiet")
    if options.trial or getattr(options, "only", None):
        say("nothing is written")
        return
    path = save(name, Table(title, " ".join([program, *words]), state, on, seconds, rows, *spent))
    say(f"written to {path.relative_to(ROOT)}")
