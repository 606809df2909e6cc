"""Try topotrain in a project outside the repository.

    python scripts/outside_project.py --python python3.13

The script builds wheel and source distribution, makes a project with a package of its own and a virtual environment,
installs the wheel there, tries what topotrain promises, prints a table and removes everything. Without --short the
environment comes from the package registry, where the usual build of torch takes 5 GB. With --short nothing is
downloaded: the libraries are those of the environment that runs this script.

The exit code is 0 if nothing failed, 1 if a check failed, 2 for bad input, 3 if the environment cannot be made.
"""

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
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

    def __str__(self) -> str:
        return f"{self.result:7}  {self.seconds:6.1f} s  {self.check}: {self.text}"


def try_one(check: Check, project: OutsideProject) -> Row:
    """Make a check; processes that it leaves behind make it fail."""
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
    return Row(check.name, result, round(time.monotonic() - begin, 1), text)


def make(folder: Path, python: str, short: bool) -> OutsideProject:
    """Build the packages, and make project and environment. Raises CheckFailed or NotRun."""
    sdist, wheel = build_packages(folder / "dist")
    project = folder / "project"
    make_project(project)
    if short:
        interpreter = make_short_environment(folder / "venv", project, wheel)
    else:
        print("making an environment from the registry; torch may take minutes and 5 GB …", file=sys.stderr)
        interpreter = make_full_environment(folder / "venv", project, wheel, python)
    return OutsideProject(project, interpreter, sdist, wheel, short)


def try_all(project: OutsideProject, only: str) -> Iterator[Row]:
    """Make the checks that are asked for, in their order."""
    for check in CHECKS:
        if (check.short or not project.short) and only in check.name:
            yield try_one(check, project)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="interpreter of the environment")
    parser.add_argument("--short", action="store_true", help="a few checks, no download; with this interpreter only")
    parser.add_argument("--only", default="", metavar="TEXT", help="checks whose name has the text")
    options = parser.parse_args()
    python = shutil.which(options.python)
    if python is None:
        parser.error(f"--python {options.python}: must be a Python interpreter, and there is no such program")
    if options.short and options.python != sys.executable:
        parser.error("--python: must not be given with --short, which uses the libraries of this interpreter")
    if not any(options.only in check.name for check in CHECKS):
        parser.error(f"--only {options.only}: must be part of one of: {'; '.join(c.name for c in CHECKS)}")
    # So that SIGTERM removes the folder, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="topotrain-outside-")).resolve()
    project = None
    try:
        project = make(folder, python, options.short)
        failed = False
        for row in try_all(project, options.only):
            print(row, flush=True)
            failed = failed or row.result == FAIL
        return int(failed)
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
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
