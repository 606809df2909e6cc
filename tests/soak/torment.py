"""One job under `topotrain chaos`, whose result shows what was counted, and what the job leaves behind.

All that a trial starts carries a mark in its environment, so that a process that outlives its job is found, whoever its
parent is. The command that a trial shows repeats what its seed did.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from benchmarks.record import ROOT, environment

PROGRAMS = ROOT / "tests" / "programs"
MARK = "TOPOTRAIN_TORMENT"
_STACK = 6000
ENDS_S = 2.0
"""How long a process may still be there after its job; the kernel takes its time to end one."""

Tensors = dict[str, torch.Tensor]


class Setting(NamedTuple):
    """A job: its cluster block, other fields of its conf, a file of tests/programs and its arguments.

    cells: every cell of the ledger must have this value at the end; 0: all bits must be those of an undisturbed job.
    """

    framework: str
    cluster: str
    extra: str = "reduce: kSum"
    program: str = "ledger.py"
    args: tuple[str, ...] = ("--epochs", "3", "--step-s", "0.02")
    cells: int = 3


@dataclass(frozen=True, slots=True)
class Blows:
    """The options of `topotrain chaos`."""

    every: str = "1s"
    lasting: str = "10s"
    freeze: float = 0.0
    whom: str = ""
    pairs: float = 0.0
    at: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        words = ["--kill-every", self.every, "--for", self.lasting, "--freeze", str(self.freeze)]
        words += ["--pairs", str(self.pairs)] + (["--whom", self.whom] if self.whom else [])
        return words + [word for moment in self.at for word in ("--at", moment)]


@dataclass(slots=True)
class Trial:
    """What came of a job. `wrong`: one sentence for each thing that is not as it must be.

    waits: (role of the lost process, seconds until its successors stepped). left: processes, entries of /dev/shm, and
    descriptors and threads of the forkserver that were not there before.
    """

    setting: Setting
    seed: int
    killed: int = 0
    frozen: int = 0
    waits: list[tuple[str, float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    left: int = 0
    command: str = ""
    said: str = ""


class Ground:
    """A folder for trials, and a forkserver that their jobs share. A context manager."""

    def __init__(self) -> None:
        from topotrain.launch.agent import forkserver

        self._mark = f"{os.getpid()}.{time.monotonic_ns()}"
        self._folder = Path(tempfile.mkdtemp(prefix="tt-chaos-"))
        # A job that hangs is told to say where: every process of it then dies with the stacks of its threads.
        self._environ = {**environment(), MARK: self._mark, "PYTHONFAULTHANDLER": "1"}
        self._running = forkserver.start(self._folder / "forkserver.log", environ=self._environ)
        self._undisturbed: dict[str, Tensors] = {}

    def __enter__(self) -> "Ground":
        """Run a first job: only after it has the forkserver all that it needs."""
        conf, _ = self.conf(Setting("first", "", ""), "first")
        self.topotrain(["run", *self.common, str(conf), str(PROGRAMS / "ledger.py")], 120)
        return self

    def __exit__(self, *error: object) -> None:
        self._running.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def trial(self, setting: Setting, blows: Blows, seed: int, limit_s: float = 180.0) -> Trial:
        """Torment a job once, and look at what it leaves."""
        found = Trial(setting, seed)
        expected = None if setting.cells else self._bits(setting)
        conf, workspace = self.conf(setting, "job")
        words = ["chaos", "--seed", str(seed), *blows.words]
        program = [str(conf), str(PROGRAMS / setting.program), *setting.args]
        found.command = shlex.join(["topotrain", *words, *program]) + f"   # {conf.read_text()!r}"
        before = self._seen()
        code, out, found.said = self.topotrain([*words, "--json", *self.common, *program], limit_s)
        if code is None:
            found.wrong.append(f"hung: it did not end within {limit_s:g} s")
            found.said += stacks(workspace / "logs")
        else:
            found.wrong += [f"exit code {code}"] if code else []
            self._count(found, out)
        if code == 0:
            found.wrong += wrong_values(workspace / "final.safetensors", setting.cells, expected)
        self._look(found, before)
        return found

    @property
    def common(self) -> list[str]:
        """Options of all commands."""
        return ["--quiet", "--forkserver", self._running.path]

    def conf(self, setting: Setting, name: str) -> tuple[Path, Path]:
        """Write a job file; return it, and the workspace, which is empty."""
        conf, workspace = self._folder / f"{name}.conf", self._folder / name
        shutil.rmtree(workspace, ignore_errors=True)
        conf.write_text(f'name: "{name}" {setting.extra} cluster {{ {setting.cluster} workspace: "{workspace}" }}\n')
        return conf, workspace

    def _bits(self, setting: Setting) -> Tensors:
        """The result of the same job, left alone."""
        if setting.framework not in self._undisturbed:
            conf, workspace = self.conf(setting, "undisturbed")
            words = ["run", *self.common, str(conf), str(PROGRAMS / setting.program), *setting.args]
            code, _, said = self.topotrain(words, 180.0)
            if code:
                raise RuntimeError(f"{setting.framework}: the job does not even run undisturbed:\n{said}")
            self._undisturbed[setting.framework] = load_file(workspace / "final.safetensors")
        return self._undisturbed[setting.framework]

    def topotrain(
        self, words: Sequence[str], limit_s: float, look: Callable[[int], None] = lambda pid: None
    ) -> tuple[int | None, str, str]:
        """Run a command; exit code (None: it hung), stdout and stderr. look: is called with its pid once a second."""
        command, pipe = [sys.executable, "-m", "topotrain", *words], subprocess.PIPE
        own: dict[str, Any] = {"cwd": self._folder, "env": self._environ, "start_new_session": True}
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **own)
        try:
            until = time.monotonic() + limit_s
            while (left := until - time.monotonic()) > 0:
                with suppress(subprocess.TimeoutExpired):
                    out, said = process.communicate(timeout=min(1.0, left))
                    return process.returncode, out, said
                look(process.pid)
            for pid in self._living():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                return None, *process.communicate(timeout=20)
            process.kill()
            return None, *process.communicate()
        except BaseException:
            process.terminate()
            process.wait()
            raise

    def _count(self, found: Trial, out: str) -> None:
        try:
            verdict = json.loads(out)
        except ValueError:
            found.wrong.append("no verdict")
            return
        found.killed, found.frozen = verdict["killed"], verdict["frozen"]
        waited = [one for one in verdict["incidents"] if one["waited_s"] is not None]
        found.waits += [(one["who"].partition(" ")[0], one["waited_s"]) for one in waited]

    def _seen(self) -> tuple[set[str], int, int]:
        """Entries of /dev/shm, descriptors and threads of the forkserver."""
        pid = self._running.process.pid
        return set(os.listdir("/dev/shm")), len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))

    def _look(self, found: Trial, before: tuple[set[str], int, int]) -> None:
        until = time.monotonic() + ENDS_S
        while time.monotonic() < until:  # no event tells when the forkserver has closed what the units had opened
            living, (memory, fds, threads) = self._living(), self._seen()
            mine = sorted(name for name in memory - before[0] if "topotrain" in name or name.startswith("tt"))
            fds, threads = max(0, fds - before[1]), max(0, threads - before[2])
            if not (living or mine or fds or threads):
                return
            time.sleep(0.05)
        found.left = len(living) + len(mine) + fds + threads
        found.wrong += [f"process {pid} is left: {words}" for pid, words in living.items()]
        found.wrong += [f"/dev/shm/{name} is left" for name in mine]
        if fds or threads:
            found.wrong.append(f"the forkserver has {fds} descriptors, {threads} threads more")

    def _living(self) -> dict[int, str]:
        """Processes with our mark, without the forkserver."""
        found: dict[int, str] = {}
        mark = f"{MARK}={self._mark}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != self._running.process.pid:
                with suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")[:200]
        return found


def stacks(logs: Path) -> str:
    """Where the processes of a job stood that were told to abort, from their logs."""
    found = []
    for log in sorted(logs.glob("*.log")):
        _, fatal, stack = log.read_text(errors="replace").rpartition("Fatal Python error: Aborted")
        if fatal:
            found.append(f"--- {log.name}\n{stack.strip()[:_STACK]}\n")
    return "".join(found)


def wrong_values(final: Path, cells: int, expected: Tensors | None = None) -> list[str]:
    """A sentence if values are not those of an undisturbed job, or if cells of a ledger have another value."""
    if not final.exists():
        return ["no result"]
    values = load_file(final)
    if expected is not None:
        names = [name for name, value in expected.items() if not torch.equal(values[name], value)]
        return [f"other bits than undisturbed in {', '.join(names)}"] if names else []
    wrong = [value for tensor in values.values() for value in tensor.flatten().tolist() if value != cells]
    counts: dict[Any, int] = {value: wrong.count(value) for value in sorted(set(wrong))}
    return [f"{len(wrong)} cells are not {cells}: {counts}"] if wrong else []
