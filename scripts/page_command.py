"""A command of topotrain that serves the page of a job, as another process."""

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ADDRESS = re.compile(r"the page is at (\S+)")
_START_S = 90.0
_END_S = 20.0


@dataclass(frozen=True)
class WatchedJob:
    """A job that runs, or a `topotrain watch`, with the address of its page.

    said: a file with all that the command has printed.
    """

    process: "subprocess.Popen[bytes]"
    said: Path
    address: str

    def pid_of(self, workspace: Path, name: str) -> int:
        """Return the process ID of a worker or server of a running job."""
        entries = json.loads((workspace / "processes.json").read_text(encoding="utf-8"))
        return int(next(entry["pid"] for entry in entries if name in entry["roles"]))

    def end(self, seconds: float = 60.0) -> int:
        """Wait for the end; return the exit code."""
        return self.process.wait(timeout=seconds)


def waited_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until a condition is true. Raises AssertionError."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not true within {seconds:g} s"
        time.sleep(0.02)


@contextmanager
def watching(command: Sequence[str], folder: Path, name: str = "said") -> Iterator[WatchedJob]:
    """Run a command in a folder for the length of the block, until its page is served. Then it is interrupted.

    name: of the file in the folder that has its output.
    """
    said = folder / name
    with said.open("wb") as out, subprocess.Popen(list(command), cwd=folder, stdout=out, stderr=out) as process:
        try:
            waited_for(lambda: _ADDRESS.search(said.read_text()) or process.poll() is not None, _START_S)
            found = _ADDRESS.search(said.read_text())
            assert found, said.read_text()
            yield WatchedJob(process, said, found.group(1))
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
