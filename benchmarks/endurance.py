"""Thousands of short epochs: whether memory, descriptors, threads, logs and the workspace stay as they are.

    python -m benchmarks.endurance [--epochs 3000] [--kill-every 10] [--only Downpour Hogwild]

A job of each asynchronous framework and of Sandblaster, with and without snapshots, reads a ledger of few samples again
and again while workers are killed. Every process is looked at once a second: what it holds in the last quarter of its
life is compared with what it held in the second one, in which everything that is made once has been made.

Rule: a process that lived for too short a time says nothing, and is not counted. The cells of the ledger and the
report's `samples` are exact, however many workers died.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.record import ROOT, say
from benchmarks.sides import environment

PROGRAM = ROOT / "tests" / "programs" / "ledger.py"
SAMPLES = 48
APART = "server_worker_separate: true"
LAYOUTS = {
    "Downpour": f"nworker_groups: 2 {APART}",
    "Hogwild": "nworker_groups: 2 nserver_groups: 2",
    "Sandblaster": f"nworkers_per_group: 2 nservers_per_group: 2 {APART}",
}
SNAPSHOTS = {"without snapshots": "snapshot_s: 0", "with snapshots": "snapshot_s: 2"}
LOOK_S = 1.0
LEAST = 24
"""Looks at a process of which something can be said."""
MEMORY = 500_000
"""Bytes by which the memory of a process may grow between two quarters of its life.

For the report the launcher keeps up to 2048 points of each worker's loss, which are 230 kB, and less than 1 kB for each
death. CPython keeps up to 2000 freed tuples of each length. The limit is the same for all lengths of a run, so a longer
run finds a smaller leak: one of 4000 epochs finds 250 bytes in each epoch.
"""
FILES = 200_000
"""The same of the workspace and its logs: a line for each death."""


@dataclass(frozen=True, slots=True)
class Look:
    """A process at one moment."""

    memory: int
    fds: int
    threads: int


@dataclass(slots=True)
class ProcessHistory:
    """The measurements of one process."""

    role: str
    looks: list[Look] = field(default_factory=list)

    def quarters(self) -> tuple[Look, Look]:
        """The median of the second quarter of its life, and of the last."""
        size = len(self.looks) // 4
        return _median(self.looks[size : 2 * size]), _median(self.looks[-size:])


@dataclass(slots=True)
class Found:
    """What came of one job; wrong: in words what is not as it must be."""

    name: str
    histories: dict[int, ProcessHistory] = field(default_factory=dict)
    workspace: list[int] = field(default_factory=list)
    logs: list[int] = field(default_factory=list)
    killed: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def _median(looks: Sequence[Look]) -> Look:
    return Look(*(int(median(values)) for values in zip(*((x.memory, x.fds, x.threads) for x in looks), strict=True)))


def look(pid: int) -> Look | None:
    """A process now; None: it is gone.

    Its memory, in bytes, is what it has besides files. Pages that a child process shares with the forkserver are
    included. Such a page is copied when one of the two writes to it, so the pages that belong to one process alone
    become more over time, at most by all that the forkserver has loaded. This sum does not: it grows only by new pages.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
        memory = sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(("RssAnon:", "RssShmem:")))
        return Look(memory * 1024, *(len(os.listdir(f"/proc/{pid}/{kind}")) for kind in ("fd", "task")))
    except (OSError, IndexError, ValueError):
        return None


def size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    found = 0
    # Not rglob: it raises for a folder that the job deletes meanwhile, such as an old snapshot.
    for inner, _, files in os.walk(folder):
        for file in files:
            with suppress(OSError):
                found += os.lstat(os.path.join(inner, file)).st_size
    return found


class Watch:
    """Looks at all processes of a job, and kills a worker now and then."""

    def __init__(self, found: Found, workspace: Path, launcher: int, kill_every: float, seed: int) -> None:
        self._found, self._workspace, self._launcher = found, workspace, launcher
        self._every, self._dice = kill_every, random.Random(seed)
        self._due = time.monotonic() + kill_every

    def __call__(self) -> None:
        """Once a second."""
        workers: list[int] = []
        for role, pid in (("launcher", self._launcher), *self._processes()):
            now = look(pid)
            if now is not None:
                self._found.histories.setdefault(pid, ProcessHistory(role)).looks.append(now)
                workers += [pid] * (role.startswith("worker") and "server" not in role)
        self._found.workspace.append(size(self._workspace))
        self._found.logs.append(size(self._workspace / "logs"))
        if self._every and workers and time.monotonic() > self._due:
            self._due = time.monotonic() + self._every
            with suppress(ProcessLookupError):
                os.kill(self._dice.choice(workers), signal.SIGKILL)
                self._found.killed += 1

    def _processes(self) -> Iterator[tuple[str, int]]:
        try:
            entries = json.loads((self._workspace / "processes.json").read_text())
        except (OSError, ValueError):
            return
        for entry in entries:
            if entry["exit"] is None and entry["pid"] != self._launcher:
                yield ", ".join(entry["roles"]), entry["pid"]


def endure(name: str, cluster: str, extra: str, epochs: int, kill_every: float, seed: int, limit_s: float) -> Found:
    """Run one job, and look at it."""
    found, folder = Found(name), Path(tempfile.mkdtemp(prefix="tt-endurance-"))
    conf, workspace, report = folder / "job.conf", folder / "job", folder / "report.json"
    conf.write_text(
        f'name: "job" reduce: kSum restarts: 1000000 {extra} cluster {{ {cluster} workspace: "{workspace}" }}\n'
    )
    words = ["--epochs", str(epochs), "--samples", str(SAMPLES)]
    command = [sys.executable, "-m", "topotrain", "run", "--quiet", "--report", str(report), str(conf), str(PROGRAM)]
    began = time.monotonic()
    with (folder / "said").open("w+") as said:
        job = subprocess.Popen([*command, *words], cwd=folder, env=environment(), stdout=said, stderr=said)
        watch = Watch(found, workspace, job.pid, kill_every, seed)
        try:
            while time.monotonic() - began < limit_s:
                with suppress(subprocess.TimeoutExpired):
                    job.wait(LOOK_S)
                    break
                watch()
            else:
                found.wrong.append(f"did not end within {limit_s:g} s")
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait()
        said.seek(0)
        found.seconds = time.monotonic() - began
        if job.returncode:
            found.wrong.append(f"exit code {job.returncode}: {said.read()[-500:]}")
    if not job.returncode:
        found.wrong += _miscounted(workspace, report, epochs)
    found.wrong += grown(found)
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _miscounted(workspace: Path, report: Path, epochs: int) -> list[str]:
    from safetensors.torch import load_file

    cells = load_file(workspace / "final.safetensors")["cells"].tolist()
    samples = json.loads(report.read_text())["samples"]
    wrong = [f"cells of {sorted(set(cells))} instead of {epochs}"] if set(cells) != {float(epochs)} else []
    return wrong + ([f"{samples} samples instead of {epochs * SAMPLES}"] if samples != epochs * SAMPLES else [])


def grown(found: Found) -> list[str]:
    """What is larger at the end than it was."""
    wrong = []
    for history in found.histories.values():
        if len(history.looks) >= LEAST:
            then, now = history.quarters()
            if now.memory - then.memory > MEMORY:
                wrong.append(f"{history.role} grew by {(now.memory - then.memory) / 1e6:.1f} MB")
            if now.fds > then.fds + 2 or now.threads > then.threads + 2:
                wrong.append(f"{history.role} has {now.fds} descriptors, {now.threads} threads after {then}")
    for what, sizes in (("the workspace", found.workspace), ("the logs", found.logs)):
        quarter = len(sizes) // 4
        if len(sizes) >= LEAST and median(sizes[-quarter:]) - median(sizes[quarter : 2 * quarter]) > FILES:
            wrong.append(f"{what} grew from {sizes[quarter]} to {sizes[-1]} bytes")
    return wrong


def told(found: Found) -> str:
    """The job in one line, with the most that a process has grown."""
    long = [history for history in found.histories.values() if len(history.looks) >= LEAST]
    rises = sorted(
        ((later.memory - then.memory, history.role) for history in long for then, later in [history.quarters()])
    )
    most = f"at most {rises[-1][0] / 1e3:+.0f} kB ({rises[-1][1]})" if rises else "no process lived long enough"
    return f"{found.name}: {found.seconds:.0f} s, {found.killed} killed; memory of {len(rises)} processes {most}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endurance", description="Many epochs, nothing grows.")
    parser.add_argument("--epochs", type=int, default=3000)
    parser.add_argument("--kill-every", type=float, default=15.0, help="seconds between two deaths; 0: nobody dies")
    parser.add_argument("--only", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=900.0, help="of one job")
    given = parser.parse_args()
    bad = jobs = killed = 0
    for name in given.only:
        for snapshots, extra in SNAPSHOTS.items():
            words = (f"{name} {snapshots}", LAYOUTS[name], extra, given.epochs, given.kill_every)
            found = endure(*words, given.seed + jobs, given.limit_s)
            jobs, killed, bad = jobs + 1, killed + found.killed, bad + bool(found.wrong)
            say(f"  {told(found)}: {'; '.join(found.wrong) or 'ok'}")
    print(f"{jobs} jobs of {given.epochs} epochs, {killed} kills, {bad} of them wrong or grown; seed {given.seed}")
    raise SystemExit(bad > 0)


if __name__ == "__main__":
    main()
