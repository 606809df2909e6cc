"""A project outside the repository, and what is tried in it. A new check is a function with the decorator `check`.

A check gets the project and returns what it has seen, in a few words. It raises CheckFailed where a promise is not
kept, and NotRun where it cannot be made.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
TIMEOUT_S = 900
SETTLE_S = 15
"""For how long the processes of a job that has ended may still be ending."""
EXTRAS = ("matplotlib", "yaml", "redis", "cryptography", "submitit", "transformers", "pytorch_lightning", "ray")
"""Modules that only the extras bring along."""
SAMPLES = 480
"""Of an epoch of the sample project."""


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
        """Return the processes of this project that still run, after time to end: command line by process id."""
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
        """Kill every process of this project."""
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


@dataclass(frozen=True)
class Check:
    """One thing that is tried: its name, and whether the short form tries it, too."""

    name: str
    short: bool
    function: Callable[[OutsideProject], str]


CHECKS: list[Check] = []


def check(name: str, short: bool = False) -> Callable[[Callable[[OutsideProject], str]], Callable[..., str]]:
    """Add a function to the checks, which are made in the order of this file."""

    def add(function: Callable[[OutsideProject], str]) -> Callable[..., str]:
        CHECKS.append(Check(name, short, function))
        return function

    return add


def must(holds: object, text: str) -> None:
    """Raise CheckFailed with the text unless the condition holds."""
    if not holds:
        raise CheckFailed(text)


@check("the wheel has what it needs, and no more", short=True)
def wheel_contents(project: OutsideProject) -> str:
    with zipfile.ZipFile(project.wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")]
    there = [path.relative_to(REPOSITORY) for path in REPOSITORY.glob("topotrain/**/*") if path.is_file()]
    expected = {path.as_posix() for path in there if "__pycache__" not in path.parts}
    must({"topotrain/config/job.proto", "topotrain/config/job.binpb", "topotrain/py.typed"} <= expected, "no job.proto")
    page = {f"topotrain/tools/dashboard/page/{name}" for name in ("index.html", "main.js", "style.css")}
    must(page <= expected, f"not all of {', '.join(sorted(page))}")
    inside = {name for name in names if ".dist-info/" not in name}
    must(inside == expected, f"the wheel and topotrain/ differ in {sorted(inside ^ expected)[:5]}")
    must("Requires-Python: >=3.11" in metadata, "no Requires-Python")
    must(re.search(r"^License-Expression: Apache-2.0$", metadata, re.MULTILINE), "no License-Expression")
    must("Classifier: License" not in metadata, "a classifier of the license beside its expression")
    return f"{len(names)} files, {project.wheel.stat().st_size / 1e6:.1f} MB"


@check("the source distribution builds the same wheel", short=True)
def same_wheel(project: OutsideProject) -> str:
    unpacked = project.sdist.parent / "unpacked"
    with tarfile.open(project.sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    missing = [name for name in ("tests", "docs", "examples", "benchmarks", "scripts", "Makefile", "LICENSE")
               if not (source / name).exists()]  # fmt: skip
    must(not missing, f"the source distribution has no {', '.join(missing)}")
    _, again = build_packages(unpacked / "dist", source)
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in (project.wheel, again)}
    must(len(digests) == 1, "the wheel that is built from the source distribution has other bytes")
    return f"sha256 {digests.pop()[:12]}"


IMPORTS = """
import json, sys
from importlib.metadata import version
from importlib.util import find_spec
import topotrain as tt
extras = [name for name in sys.argv[1:] if find_spec(name)]
home = tt.__file__
for name in tt.__all__:
    getattr(tt, name)
print(json.dumps({"extras": extras, "file": home, "version": version("topotrain"), "own": tt.__version__}))
"""


@check("installed without extras, every public name is there", short=True)
def names_without_extras(project: OutsideProject) -> str:
    found = json.loads(project.run("python", "-c", IMPORTS, *EXTRAS).stdout)
    must(not found["extras"], f"the environment has {', '.join(found['extras'])}")
    must(Path(found["file"]).is_relative_to(project.python.parents[1]), f"imported from {found['file']}")
    must(found["version"] == found["own"], f"the wheel is {found['version']}, topotrain.__version__ {found['own']}")
    return f"topotrain {found['version']}"


@check("topotrain run JOB.conf -m package.module, relative imports")
def run_module(project: OutsideProject) -> str:
    report = project.job("conf/downpour.conf", "-m", "orchard.train", "--epochs", "4")
    must(report["samples"] == 4 * SAMPLES, f"{report['samples']} samples, must be {4 * SAMPLES}")
    must(report["metrics"]["accuracy"] > 0.9, f"accuracy {report['metrics']['accuracy']}")
    must((project.folder / "workspace/downpour/final.safetensors").exists(), "no final.safetensors")
    return f"{report['framework']}, accuracy {report['metrics']['accuracy']:.1%}"


@check("topotrain compare without matplotlib: the table", short=True)
def compare_without_matplotlib(project: OutsideProject) -> str:
    jobs = ["conf/downpour.conf"] if project.short else ["conf/allreduce.conf", "conf/downpour.conf"]
    done = project.run("topotrain", "compare", *jobs, "-m", "orchard.train", "--", "--epochs", "4")
    must("framework" in done.stdout and "Downpour" in done.stdout, f"no table: {done.stdout!r}")
    told = [line for line in done.stderr.splitlines() if "topotrain[plot]" in line]
    must(len(told) == 1, f"{len(told)} lines name topotrain[plot]")
    results = project.folder / "workspace" / "compare"
    must(not (results / "frameworks.png").exists(), "there is a picture")
    rows = json.loads((results / "compare.json").read_text(encoding="utf-8"))["jobs"]
    must([row["samples"] for row in rows] == [4 * SAMPLES] * len(jobs), "not every sample was trained")
    return told[0]


@check("topotrain watch --html: the page of a job in one file, from what the wheel has", short=True)
def page_of_job(project: OutsideProject) -> str:
    # The job of the check before.
    workspace = "workspace/compare/downpour"
    project.run("topotrain", "watch", workspace, "--html", "page.html")
    text = (project.folder / "page.html").read_text(encoding="utf-8")
    modules = list((REPOSITORY / "topotrain/tools/dashboard/page").glob("*.js"))
    missing = [path.name for path in modules if path.read_text(encoding="utf-8").splitlines()[0] not in text]
    must(not missing, f"the page has no {missing}")
    state = json.loads(project.run("topotrain", "watch", workspace, "--once", "--json").stdout)["state"]
    must(state == "ended", f"the state is {state}")
    return f"{len(text) / 1e6:.1f} MB, {len(modules)} modules"


@check("topotrain doctor and plan", short=True)
def asking_commands(project: OutsideProject) -> str:
    env = json.loads(project.run("topotrain", "doctor", "--json").stdout)
    must(Path(env["topotrain"]["folder"]).is_relative_to(project.python.parents[1]), str(env["topotrain"]))
    checks = json.loads(project.run("topotrain", "doctor", "conf/downpour.conf", "--json").stdout)["checks"]
    bad = [one["text"] for one in checks if one["state"] == "failed"]
    must(not bad, "; ".join(bad))
    plan = json.loads(project.run("topotrain", "plan", "conf/downpour.conf", "--json").stdout)
    must(plan["nprocs"] == 3, f"{plan['nprocs']} processes, must be 3")
    return f"Python {env['python']['version']}, torch {env['torch']['version']}"


def read_until(process: "subprocess.Popen[str]", text: str) -> None:
    """Read the output of a job until a line has the text."""
    heard = []
    assert process.stdout is not None
    for line in process.stdout:
        heard.append(line)
        if text in line:
            return
    raise CheckFailed(f"the job ended before it printed {text!r}:\n{''.join(heard[-10:])}")


@check("a worker is killed: the job goes on, every sample counts once", short=True)
def killed_worker(project: OutsideProject) -> str:
    epochs = 100
    words = ["conf/downpour.conf", "-m", "orchard.train", "--epochs", str(epochs)]
    with project.training(*words) as process:
        read_until(process, "epoch 5 of")
        entries = json.loads((project.folder / "workspace/downpour/processes.json").read_text(encoding="utf-8"))
        os.kill(next(entry["pid"] for entry in entries if "worker 1/0" in entry["roles"]), signal.SIGKILL)
        said = process.communicate(timeout=300)[0]
        must(process.returncode == 0, f"exit code {process.returncode}:\n{said[-1000:]}")
    report = project.report()
    must(report["incidents"], "the kill came too late")
    must(report["samples"] == epochs * SAMPLES, f"{report['samples']} samples, must be {epochs * SAMPLES}")
    return f"{report['incidents'][0]['action']}; {report['samples']:,} samples"


MISSPELLED = "import topotrain as tt\n\ntt.prepair()\n"


@check("mypy --strict on the project; a misspelled name is found")
def types(project: OutsideProject) -> str:
    install(project, "mypy")
    said = project.run("python", "-m", "mypy").stdout.strip()
    (project.folder / "misspelled.py").write_text(MISSPELLED, encoding="utf-8")
    out = project.run("python", "-m", "mypy", "--strict", "misspelled.py", code=1).stdout
    must('"prepair"' in out, out)
    return said


def install(project: OutsideProject, *names: str) -> None:
    """Install packages from the registry, in the versions of constraints.txt."""
    pip = ("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    try:
        project.run(*pip, "-c", str(REPOSITORY / "constraints.txt"), *names)
    except CheckFailed as error:
        raise NotRun(str(error).splitlines()[-1]) from None


@check("topotrain[examples]: the commands of the README")
def first_steps(project: OutsideProject) -> str:
    install(project, f"{project.wheel}[examples]")
    ignored = shutil.ignore_patterns("__pycache__", "workspace")
    shutil.copytree(REPOSITORY / "examples", project.folder / "examples", ignore=ignored)
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    shown = "\n".join(re.findall(r"^```sh\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE))
    lines = re.findall(r"^((?:python|topotrain) .*?)(?:\s+#.*)?$", shown, re.MULTILINE)
    must(len(lines) >= 2, f"the README has {len(lines)} commands")
    for line in lines:
        project.run(*line.split())
    return "; ".join(lines)
