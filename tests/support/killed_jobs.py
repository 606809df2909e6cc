"""Jobs whose processes are killed or asked to end, and that go on from a snapshot.

The programs print `holding` or `there` at a step, see programs/resuming.py.
"""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from job_runner import Ended, JobRunner
from shells import alive

from topotrain.extensions.checkpointing.checkpoint_reader import latest


def begun(command: Sequence[str], folder: Path, word: str) -> tuple["subprocess.Popen[str]", str]:
    """Start a job in a session of its own; returns when it has said this word, with all that it has said."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=folder, start_new_session=True, **pipes)
    patience = threading.Timer(100, process.kill)  # a job that hangs must not hang the suite
    patience.start()
    heard = ""
    assert process.stdout is not None
    try:
        for line in process.stdout:
            heard += line
            if line.strip() == word:
                return process, heard
        raise AssertionError(f"the job ended early:\n{heard}")
    finally:
        patience.cancel()


def entries(workspace: Path) -> list[dict[str, Any]]:
    """The processes of a job, by `topotrain run`."""
    found: list[dict[str, Any]] = json.loads((workspace / "processes.json").read_text())
    return found


def killed(
    runner: JobRunner,
    cluster: str,
    kind: str,
    extra: str = "snapshot_s: 0.1",
    at: int = 30,
    program: str = "resuming.py",
) -> Path:
    """The workspace of a job whose processes were all killed when its main worker had taken so many steps."""
    hold = runner.folder / "hold"
    hold.touch()
    command = runner.command(cluster, program, kind, "--hold", str(hold), "--at", str(at), extra=extra)
    process, _ = begun(command, runner.folder, "holding")
    workspace = runner.folder / "job"
    # On a loaded machine the processes take more time for a snapshot than the program for its steps.
    until = time.monotonic() + 20
    while "snapshot_s: 0." in extra and latest(workspace) is None and time.monotonic() < until:
        time.sleep(0.02)
    pids = [entry["pid"] for entry in entries(workspace)]
    # All at one moment: where one is dead, the launcher ends the others.
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=300)
    hold.unlink()
    return workspace


def terminated(
    runner: JobRunner, cluster: str, *program: str, extra: str, all: bool = False, number: int = signal.SIGTERM
) -> tuple[int, str, Path]:
    """A job that gets a signal behind step 30: exit code, what it said, its workspace; no process of it is left.

    all: each of its processes gets it, the launcher last.
    """
    command = runner.command(cluster, *program, extra=extra)
    return _terminated(runner, command, runner.folder / "job", all, number)


def terminated_again(runner: JobRunner, workspace: Path, *more: str) -> tuple[int, str, Path]:
    """The same of a job that goes on from its snapshot."""
    words = ["-m", "topotrain", "run", "--resume", str(workspace), "--forkserver", runner.served_at, *more]
    return _terminated(runner, [*runner.python, *words], workspace, False, signal.SIGTERM)


def _terminated(
    runner: JobRunner, command: Sequence[str], workspace: Path, all: bool, number: int
) -> tuple[int, str, Path]:
    process, heard = begun(command, runner.folder, "there")
    pids = {entry["roles"][0]: entry["pid"] for entry in entries(workspace)}
    for pid in reversed(pids.values()) if all else [pids["launcher"]]:
        os.kill(pid, number)
    said, _ = process.communicate(timeout=300)
    assert not [who for who, pid in pids.items() if alive([pid])]
    return process.returncode, heard + said, workspace


def resumed(runner: JobRunner, workspace: Path, *more: str) -> Ended:
    words = ["run", "--resume", str(workspace), "--forkserver", runner.served_at, *more]
    command = [*runner.python, "-m", "topotrain", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=runner.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    at = workspace if (workspace / "final.safetensors").exists() else workspace.parent.parent
    return Ended(done.returncode, done.stdout, done.stderr, at, {})
