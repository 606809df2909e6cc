"""Thousands of short epochs: whether memory, descriptors, threads, logs and the workspace stay as they are.

    python -m tests.soak.endurance [--epochs 3000] [--kill-every 10] [--only Downpour Hogwild]

Jobs read a ledger of few samples again and again while workers are killed. Every process is looked at once a second:
what it holds in the last quarter of its life is compared with what it held in the second one. A process that lived for
too short a time is not counted. The cells of the ledger and the report's `samples` are exact, however many died.
"""

import argparse
import itertools
import json
import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.record import say
from tests.soak.torment import PROGRAMS, Ground, Setting, wrong_values

SAMPLES = 48
APART = "server_worker_separate: true"
LAYOUTS = {
    "Downpour": f"nworker_groups: 2 {APART}",
    "Hogwild": "nworker_groups: 2 nserver_groups: 2",
    "Sandblaster": f"nworkers_per_group: 2 nservers_per_group: 2 {APART}",
}
SNAPSHOTS = {"without snapshots": "snapshot_s: 0", "with snapshots": "snapshot_s: 2"}
LEAST = 24
"""Looks at a process of which something can be said; there is one each second."""
MEMORY = 500_000
"""Bytes by which the memory of a process may grow between two quarters of its life.

The launcher keeps up to 230 kB of points for the report, and CPython up to 2000 freed tuples of each length. A longer
run finds a smaller leak: one of 4000 epochs finds 250 bytes in each epoch.
"""
FILES = 200_000
"""The same of the workspace and its logs: a line for each death."""


class Look(NamedTuple):
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
        parts = self.looks[size : 2 * size], self.looks[-size:]
        then, now = (Look(*(int(median(values)) for values in zip(*part))) for part in parts)
        return then, now


@dataclass(slots=True)
class Found:
    """What came of one job. wrong: one sentence for each thing that is not as it must be."""

    name: str
    histories: dict[int, ProcessHistory] = field(default_factory=dict)
    sizes: dict[str, list[int]] = field(default_factory=lambda: {"the workspace": [], "the logs": []})
    killed: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def look(pid: int) -> Look | None:
    """A process now; None: it is gone.

    Its memory, in bytes, is what it has besides files, with pages that it shares with the forkserver: a copy of such a
    page is no growth.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
        memory = sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(("RssAnon:", "RssShmem:")))
        return Look(memory * 1024, *(len(os.listdir(f"/proc/{pid}/{kind}")) for kind in ("fd", "task")))
    except (OSError, IndexError, ValueError):
        return None


def size(folder: Path) -> int:
    """Bytes of all files below a folder, also while the job deletes some of them."""
    found = 0
    for inner, _, files in os.walk(folder):
        for file in files:
            with suppress(OSError):
                found += os.lstat(os.path.join(inner, file)).st_size
    return found


class Watch:
    """Looks at all processes of a job, and kills a worker now and then."""

    def __init__(self, found: Found, workspace: Path, kill_every: float, seed: int) -> None:
        self._found, self._workspace = found, workspace
        self._every, self._dice, self._due = kill_every, random.Random(seed), time.monotonic() + kill_every

    def __call__(self, launcher: int) -> None:
        """Once a second. launcher: its pid."""
        workers: list[int] = []
        for pid, role in {launcher: "launcher", **self._processes(launcher)}.items():
            now = look(pid)
            if now is not None:
                self._found.histories.setdefault(pid, ProcessHistory(role)).looks.append(now)
                workers += [pid] * (role.startswith("worker") and "server" not in role)
        self._found.sizes["the workspace"].append(size(self._workspace))
        self._found.sizes["the logs"].append(size(self._workspace / "logs"))
        if self._every and workers and time.monotonic() > self._due:
            self._due = time.monotonic() + self._every
            with suppress(ProcessLookupError):
                os.kill(self._dice.choice(workers), signal.SIGKILL)
                self._found.killed += 1

    def _processes(self, launcher: int) -> dict[int, str]:
        try:
            entries = json.loads((self._workspace / "processes.json").read_text())
        except (OSError, ValueError):
            return {}
        living = [entry for entry in entries if entry["exit"] is None and entry["pid"] != launcher]
        return {entry["pid"]: ", ".join(entry["roles"]) for entry in living}


def endure(ground: Ground, setting: Setting, kill_every: float, seed: int, limit_s: float) -> Found:
    """Run one job, and look at it. cells: of its setting, the epochs."""
    found, began, epochs = Found(setting.framework), time.monotonic(), setting.cells
    conf, workspace = ground.conf(setting, "job")
    report = conf.with_name("report.json")
    words = ["run", *ground.common, "--report", str(report), str(conf), str(PROGRAMS / setting.program), *setting.args]
    code, _, said = ground.topotrain(words, limit_s, Watch(found, workspace, kill_every, seed))
    found.seconds = time.monotonic() - began
    if code is None:
        found.wrong.append(f"did not end within {limit_s:g} s")
    elif code:
        found.wrong.append(f"exit code {code}: {said[-500:]}")
    else:
        found.wrong += wrong_values(workspace / "final.safetensors", epochs)
        samples = json.loads(report.read_text())["samples"]
        wrong = samples != epochs * SAMPLES
        found.wrong += [f"{samples} samples instead of {epochs * SAMPLES}"] if wrong else []
    found.wrong += grown(found)
    return found


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
    for what, sizes in found.sizes.items():
        quarter = len(sizes) // 4
        if len(sizes) >= LEAST and median(sizes[-quarter:]) - median(sizes[quarter : 2 * quarter]) > FILES:
            wrong.append(f"{what} grew from {sizes[quarter]} to {sizes[-1]} bytes")
    return wrong


def told(found: Found) -> str:
    """The job in one line, with the most that a process has grown."""
    long = [history for history in found.histories.values() if len(history.looks) >= LEAST]
    pairs = [(history.quarters(), history.role) for history in long]
    rise, role = max(((now.memory - then.memory, role) for (then, now), role in pairs), default=(0, "none lived long"))
    most = f"memory of {len(pairs)} processes at most {rise / 1e3:+.0f} kB ({role})"
    return f"{found.name}: {found.seconds:.0f} s, {found.killed} killed; {most}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.endurance", description="Many epochs, nothing grows.")
    parser.add_argument("--epochs", type=int, default=3000)
    parser.add_argument("--kill-every", type=float, default=15.0, help="seconds between two deaths; 0: none")
    parser.add_argument("--only", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=900.0, help="of one job")
    given = parser.parse_args()
    bad = jobs = killed = 0
    with Ground() as ground:
        for name, (snapshots, extra) in itertools.product(given.only, SNAPSHOTS.items()):
            args = ("--epochs", str(given.epochs), "--samples", str(SAMPLES))
            extra = f"reduce: kSum restarts: 1000000 {extra}"
            setting = Setting(f"{name} {snapshots}", LAYOUTS[name], extra, args=args, cells=given.epochs)
            found = endure(ground, setting, given.kill_every, given.seed + jobs, given.limit_s)
            jobs, killed, bad = jobs + 1, killed + found.killed, bad + bool(found.wrong)
            say(f"  {told(found)}: {'; '.join(found.wrong) or 'ok'}")
    print(f"{jobs} jobs of {given.epochs} epochs, {killed} kills, {bad} of them wrong or grown; seed {given.seed}")
    raise SystemExit(bad > 0)


if __name__ == "__main__":
    main()
