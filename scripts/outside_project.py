"""Try topotrain in a project outside the repository.

    python scripts/outside_project.py --python python3.13

The script builds wheel and source distribution, makes a project with a package of its own and a virtual environment,
installs the wheel there, tries what topotrain promises (outside_checks.py), prints a table and removes everything.
Without --short the environment comes from the package registry, where the usual build of torch takes 5 GB. With --short
nothing is downloaded: the libraries are those of the environment that runs this script, without those of extras.

The exit code is 0 if nothing failed, 1 if a check failed, 2 for bad input, 3 if the environment cannot be made.
"""

import argparse
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from outside_checks import CHECKS, REPOSITORY, TIMEOUT_S, Check, CheckFailed, NotRun, OutsideProject, build_packages
from packaging.requirements import Requirement

SAMPLE = Path(__file__).with_name("sample_project")


def try_one(check: Check, project: OutsideProject) -> tuple[str, str]:
    """Make a check: PASS, FAIL or NOT RUN, and what it said. Processes that it leaves behind make it fail."""
    try:
        result, text = "PASS", check.function(project)
    except NotRun as reason:
        result, text = "NOT RUN", str(reason)
    except (CheckFailed, subprocess.TimeoutExpired, OSError, ValueError, LookupError) as error:
        result, text = "FAIL", f"{'' if isinstance(error, CheckFailed) else type(error).__name__ + ': '}{error}"
    if left := project.leftovers():
        project.end_leftovers()
        result, text = "FAIL", f"{text}\nleft running: {', '.join(left.values())}"
    return result, text


def make(folder: Path, python: str, short: bool) -> OutsideProject:
    """Build the packages, and make project and environment. Raises CheckFailed or NotRun."""
    sdist, wheel = build_packages(folder / "dist")
    project, environment = folder / "project", folder / "venv"
    shutil.copytree(SAMPLE, project, ignore=shutil.ignore_patterns("__pycache__", "workspace"))
    interpreter = environment / "bin" / "python"
    if short:
        venv.create(environment, with_pip=False, symlinks=True)
        _link_libraries(next(environment.glob("lib/python*/site-packages")), wheel)
        pip = [sys.executable, "-m", "pip", "--python", str(interpreter), "install", "--no-deps", "--no-index"]
        _install([*pip, str(wheel)])
        # An editable installation of the project does the same.
        (pth,) = (site / "orchard.pth" for site in environment.glob("lib/python*/site-packages"))
        pth.write_text(f"{project / 'src'}\n", encoding="utf-8")
    else:
        print("making an environment from the registry; torch may take minutes and 5 GB …", file=sys.stderr)
        _install([python, "-m", "venv", str(environment)])
        pip = [str(interpreter), "-m", "pip", "install", "--quiet", "-c", str(REPOSITORY / "constraints.txt")]
        _install([*pip, str(wheel)])
        _install([*pip, "--editable", str(project)])
    return OutsideProject(project, interpreter, sdist, wheel, short)


def _link_libraries(site: Path, wheel: Path) -> None:
    """Link the libraries that a wheel requires, and theirs, from the environment of this process."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [archive.read(name) for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    waiting = re.findall(r"^Requires-Dist: (.+)$", metadata.decode(), re.MULTILINE)
    found: set[str] = set()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in found or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        try:
            library = distribution(name)
        except PackageNotFoundError:
            raise NotRun(f"the package {name} is not installed beside {sys.executable}") from None
        waiting += library.requires or ()
        for part in {Path(file).parts[0] for file in library.files or ()} - {"..", "__pycache__"}:
            if not (site / part).exists():
                (site / part).symlink_to(Path(str(library.locate_file(part))))


def _install(words: Sequence[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise NotRun(f"`{' '.join([Path(words[0]).name, *words[1:]])}`: {last}")


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
    chosen = [check for check in CHECKS if options.only in check.name]
    if not chosen:
        parser.error(f"--only {options.only}: must be part of one of: {'; '.join(c.name for c in CHECKS)}")
    # So that SIGTERM removes the folder, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="topotrain-outside-")).resolve()
    project = None
    failed = False
    try:
        project = make(folder, python, options.short)
        for check in chosen:
            if check.short or not options.short:
                began = time.monotonic()
                result, text = try_one(check, project)
                print(f"{result:7}  {time.monotonic() - began:6.1f} s  {check.name}: {text}", flush=True)
                failed = failed or result == "FAIL"
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
