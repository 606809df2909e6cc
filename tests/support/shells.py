"""Processes as users start them by hand, each as in a shell of its own, and what became of them."""

import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from process_pool import Forked as Shell

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300.0


class Shells:
    """Shells in one folder, with one token. Python runs in them, forked by who listens at `warm_at` (warm.py)."""

    def __init__(self, folder: Path, warm_at: str) -> None:
        self.folder, self.warm_at = folder, warm_at
        token = {"TOPOTRAIN_TOKEN": "ab" * 32, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.environ = {**os.environ, **token}
        self.all: list[Shell] = []

    def python(self, *words: str, **environ: str) -> Shell:
        shell = Shell(self.warm_at, words, self.folder, {**self.environ, **environ})
        self.all.append(shell)
        return shell


@contextmanager
def open_shells(folder: Path, warm_at: str) -> Iterator[Shells]:
    """Whoever still runs at the end is killed, with its group."""
    opened = Shells(folder, warm_at)
    try:
        yield opened
    finally:
        for shell in opened.all:
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


def alive(pids: Iterable[int]) -> list[int]:
    """Those of these processes that have not ended; one that nothing has waited for yet has."""

    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    return [pid for pid in pids if runs(pid)]
