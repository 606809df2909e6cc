"""Processes as users start them by hand, each as in a shell of its own, and what became of them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = sys.executable
PATIENCE_S = 110.0

Shell = subprocess.Popen[str]


class Shells:
    """Shells in one folder, with one token."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        token = {"TOPOTRAIN_TOKEN": "ab" * 32, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.environ = {**os.environ, **token}
        self.all: list[Shell] = []

    def start(self, *words: str) -> Shell:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        shell = subprocess.Popen(words, cwd=self.folder, env=self.environ, start_new_session=True, **pipes)
        self.all.append(shell)
        return shell

    def python(self, *words: str) -> Shell:
        return self.start(PYTHON, *words)


@contextmanager
def open_shells(folder: Path) -> Iterator[Shells]:
    """Whoever still runs at the end is killed, with its group."""
    opened = Shells(folder)
    try:
        yield opened
    finally:
        for shell in opened.all:
            assert shell.stdout is not None
            shell.stdout.close()
            try:
                os.killpg(shell.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            finally:
                shell.wait()


def ended(shells: Sequence[Shell], codes: Sequence[int]) -> list[str]:
    """What the shells said, once all have ended with these codes."""
    said = [shell.communicate(timeout=PATIENCE_S)[0] for shell in shells]
    assert [shell.returncode for shell in shells] == list(codes), "\n---\n".join(said)
    return said
