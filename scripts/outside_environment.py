"""A project outside the repository, with a virtual environment of its own and the built wheel in it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[1]
SAMPLE = Path(__file__).with_name("sample_project")
TIMEOUT_S = 900
SETTLE_S = 15
"""For how long the processes of a job that has ended may still be ending."""


class CheckFailed(Exception):
    """A promise that was not kept."""


class NotRun(Exception):
    """A check that cannot be made here, and why."""


@dataclass(frozen=True)
class OutsideProject:
    """The project's folder, its interpreter, and the source distribution and wheel that were built for it."""

    folder: Path
    python: Path
    sdist: Path
    wheel: Path
    short: bool

    def run(self, *words: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
        """Run a command in the project's folder; raises CheckFailed if it ends with another code."""
        done = subprocess.run(
            words, cwd=self.folder, env=self.environ(), timeout=TIMEOUT_S, capture_output=True, text=True, check=False
        )
        if done.returncode != code:
            said = "\n".join((done.stdout + done.stderr).rstrip().splitlines()[-15:])
            raise CheckFailed(f"`{' '.join(words)}` ended with code {done.returncode}, must be {code}:\n{said}")
        return done

    def job(self, *words: str) -> dict[str, Any]:
        """Train with `topotrain run`, and return the report."""
        self.run("topotrain", "run", "--report", "report.json", *words)
        return self.report()

    def report(self) -> dict[str, Any]:
        """The report of the last job."""
        return dict(json.loads((self.folder / "report.json").read_text(encoding="utf-8")))

    @contextmanager
    def training(self, *words: str) -> Iterator["subprocess.Popen[str]"]:
        """A `topotrain run` in the background; it is killed if it has not ended by the end of the block."""
        command, pipe = ["topotrain", "run", "--report", "report.json", *words], subprocess.PIPE
        with subprocess.Popen(
            command, cwd=self.folder, env=self.environ(), stdout=pipe, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def environ(self) -> dict[str, str]:
        """Return the variables of a shell in which the environment is active, and nothing of the repository is set."""
        ours = ("TOPOTRAIN_", "PYTHON", "COV_", "PYTEST_", "VIRTUAL_ENV")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return {**kept, "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"}

    def leftovers(self) -> dict[int, str]:
        """Return the processes of this environment that still run, after time to end: command line by process id."""
        deadline = time.monotonic() + SETTLE_S
        while (found := dict(self._processes())) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _processes(self) -> Iterator[tuple[int, str]]:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                # A process may end meanwhile, or belong to another user.
                with suppress(OSError):
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    there = os.readlink(entry / "cwd")
                    if str(self.folder) in words or Path(there).is_relative_to(self.folder):
                        yield int(entry.name), words.strip()

    def end_leftovers(self) -> None:
        """Kill every process of this environment."""
        for pid, _ in self._processes():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def build_packages(folder: Path, source: Path = REPOSITORY) -> tuple[Path, Path]:
    """Build source distribution and wheel of the repository with hatchling."""
    if find_spec("hatchling") is None:
        raise NotRun(f"hatchling is not installed beside {sys.executable}: pip install hatchling")
    words = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(words, cwd=source, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    if done.returncode:
        raise CheckFailed(f"`{' '.join(words[1:])}` ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def make_project(folder: Path) -> None:
    """Copy the sample project."""
    shutil.copytree(SAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__", "workspace"))


def make_short_environment(folder: Path, project: Path, wheel: Path) -> Path:
    """Make an environment of this interpreter that downloads nothing, and return its interpreter.

    The libraries that the wheel requires, and theirs, are linked from the environment of this process. Packages of
    extras are not there.
    """
    try:
        libraries = sorted(_required(wheel))
    except PackageNotFoundError as error:
        raise NotRun(f"the package {error.name} is not installed beside {sys.executable}") from None
    venv.create(folder, with_pip=False, symlinks=True)
    python, site = folder / "bin" / "python", next(folder.glob("lib/python*/site-packages"))
    for name in libraries:
        for part in {Path(file).parts[0] for file in distribution(name).files or ()} - {"..", "__pycache__"}:
            if not (site / part).exists():
                (site / part).symlink_to(Path(str(distribution(name).locate_file(part))))
    # An editable installation of the project does the same.
    (site / "orchard.pth").write_text(f"{project / 'src'}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    _install([*pip, "--disable-pip-version-check", str(wheel)])
    return python


def make_full_environment(folder: Path, project: Path, wheel: Path, base: str) -> Path:
    """Make an environment of the interpreter `base` as a user would, and return its interpreter."""
    _install([base, "-m", "venv", str(folder)])
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "-c", str(REPOSITORY / "constraints.txt")]
    _install([*pip, str(wheel)])
    _install([*pip, "--editable", str(project)])
    return python


def _install(words: Sequence[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise NotRun(f"`{' '.join([Path(words[0]).name, *words[1:]])}`: {last}")


def _required(wheel: Path) -> set[str]:
    """Return the names of all distributions that the wheel requires without extras, directly or not."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [archive.read(name) for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    found: set[str] = set()
    waiting = re.findall(r"^Requires-Dist: (.+)$", metadata.decode(), re.MULTILINE)
    while waiting:
        requirement = Requirement(waiting.pop())
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(name)
            waiting += distribution(name).requires or ()
    return found
