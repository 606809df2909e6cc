"""Try topotrain in a project outside the repository.

    python scripts/outside_project.py --python python3.13

The script builds wheel and source distribution, makes a project with a package of its own and a virtual environment,
installs the wheel there, tries what topotrain promises, prints a table and removes everything. Without --short the
environment comes from the package registry, where the usual build of torch takes 5 GB. With --short nothing is
downloaded: the libraries are those of the environment that runs this script.

The exit code is 0 if nothing failed, 1 if a check failed, 2 for bad input, 3 if the environment cannot be made.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from outside_checks import CHECKS, Check
from outside_environment import (
    CheckFailed,
    NotRun,
    OutsideProject,
    build_packages,
    make_full_environment,
    make_project,
    make_short_environment,
)

PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    check: str
    result: str
    seconds: float
    text: str


def progress(text: str) -> None:
    """Print a line to stderr, so that stdout has the table alone."""
    print(text, file=sys.stderr, flush=True)


def try_one(check: Check, project: OutsideProject) -> Row:
    """Make a check; processes that it leaves behind make it fail."""
    progress(f"{check.name} …")
    begin = time.monotonic()
    try:
        result, text = PASS, check.function(project)
    except NotRun as reason:
        result, text = NOT_RUN, str(reason)
    except (CheckFailed, subprocess.TimeoutExpired, OSError, ValueError, LookupError) as error:
        result, text = FAIL, f"{'' if isinstance(error, CheckFailed) else type(error).__name__ + ': '}{error}"
    if left := project.leftovers():
        project.end_leftovers()
        result, text = FAIL, f"{text}\nleft running: {', '.join(left.values())}"
    row = Row(check.name, result, round(time.monotonic() - begin, 1), text)
    progress(f"  {row.result} after {row.seconds} s")
    return row


def try_all(project: OutsideProject, names: Sequence[str]) -> list[Row]:
    """Make the checks that are asked for, in their order."""
    chosen = [check for check in CHECKS if check.short or not project.short]
    return [try_one(check, project) for check in chosen if not names or any(name in check.name for name in names)]


def make(folder: Path, python: str, short: bool) -> OutsideProject:
    """Build the packages, and make project and environment. Raises CheckFailed or NotRun."""
    progress("building wheel and source distribution …")
    packages = build_packages(folder / "dist")
    project = folder / "project"
    make_project(project)
    if short:
        progress("making an environment without downloads …")
        interpreter = make_short_environment(folder / "venv", project, packages)
    else:
        progress("making an environment from the registry; torch may take minutes and 5 GB …")
        interpreter = make_full_environment(folder / "venv", project, packages, python)
    return OutsideProject(project, interpreter, packages, short)


def table(rows: Sequence[Row]) -> str:
    """Return one line per check, and the whole text of what failed below."""
    width = max(len(row.check) for row in rows)
    lines = [
        f"{row.check:{width}}  {row.result:7}  {row.seconds:6.1f} s  {row.text.partition(chr(10))[0]}" for row in rows
    ]
    counts = ", ".join(f"{sum(row.result == kind for row in rows)} {kind}" for kind in (PASS, FAIL, NOT_RUN))
    failed = [f"\n{row.check}:\n{row.text}" for row in rows if row.result == FAIL]
    return "\n".join((*lines, counts, *failed))


def main() -> int:
    opening, _, rest = str(__doc__).partition("\n")
    parser = argparse.ArgumentParser(
        description=opening, epilog=rest.strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="interpreter of the environment")
    parser.add_argument("--short", action="store_true", help="a few checks, no download; with this interpreter only")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="checks whose name has the text")
    parser.add_argument("--keep", action="store_true", help="leave project and environment, and print where they are")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    options = parser.parse_args()
    python = shutil.which(options.python)
    if python is None:
        parser.error(f"--python {options.python}: must be a Python interpreter, and there is no such program")
    if options.short and options.python != sys.executable:
        parser.error("--python: must not be given with --short, which uses the libraries of this interpreter")
    if options.only and not any(name in check.name for name in options.only for check in CHECKS):
        parser.error(f"--only {', '.join(options.only)}: must be part of one of: {'; '.join(c.name for c in CHECKS)}")

    # So that SIGTERM removes the folder, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="topotrain-outside-")).resolve()
    project = None
    try:
        project = make(folder, python, options.short)
        rows = try_all(project, options.only)
    except NotRun as reason:
        print(f"the environment cannot be made, so nothing was tried: {reason}", file=sys.stderr)
        return 3
    except CheckFailed as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        if project is not None:
            project.end_leftovers()
        if options.keep:
            progress(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps([asdict(row) for row in rows], indent=2) if options.json else table(rows))
    return int(any(row.result == FAIL for row in rows))


if __name__ == "__main__":
    sys.exit(main())
