"""Kill late processes, and orphans, which have a job's mark in their environment."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Set
from contextlib import closing, suppress
from pathlib import Path

from topotrain.launch import RUN_VARIABLE

SWEEP_S = 1.0
KILLED_S = 10.0  # from SIGKILL to the end of a process
BLANK_MARK = "0" * 32
"""The mark of a process that belongs to no job, with the length of all marks."""


class ForkserverProcess:
    """A process that may be the child of another one. Raises ProcessLookupError."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """As in subprocess; None where only its parent learns it."""
        self._pidfd = os.pidfd_open(pid)

    def has_ended(self, timeout: float | None) -> bool:
        """Wait for its end; return whether it has ended. It is not reaped."""
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        return bool(ended.poll(None if timeout is None else timeout * 1000))

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end. Raises TimeoutExpired, as in subprocess."""
        if not self.has_ended(timeout):
            raise subprocess.TimeoutExpired("forkserver", timeout or 0.0)
        if self.returncode is None:
            with suppress(ChildProcessError):
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """Send it SIGKILL."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Release the descriptor."""
        os.close(self._pidfd)


def end(process: "subprocess.Popen[bytes] | ForkserverProcess", patience_s: float = 0.0) -> int | None:
    """Wait `patience_s` for the end of a process, then kill it; return its exit code.

    A process that the kernel cannot end is left, and named in a line. The result is None then.
    """
    for seconds in (patience_s, KILLED_S):
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return process.returncode
        process.kill()
    text = f"pid {process.pid} does not end after SIGKILL (is its disk or device hung?)"
    print(f"topotrain: {text}", file=sys.stderr, flush=True)
    return None


def marked(mark: str) -> list[int]:
    """Return the processes with TOPOTRAIN_RUN=`mark` in their environment."""
    # Forks inherit the environment, and so the mark.
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and _is_marked(int(name), mark)]


def _is_marked(pid: int, mark: str) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()  # empty for a zombie, refused for another user's process
    except OSError:
        return False
    # A whole entry is compared: the mark could be a part of another variable.
    return f"{RUN_VARIABLE}={mark}".encode() in environ.split(b"\0")


def sweep(mark: str, spared: Set[int] = frozenset()) -> None:
    """Kill all processes with the mark, except those that are `spared`."""
    # A program may have put processes into groups of their own, which no kill of a group reaches.
    deadline = time.monotonic() + SWEEP_S
    # A process may fork while the list is read, so it is read again until it is empty.
    while (left := set(marked(mark)) - spared) and time.monotonic() < deadline:
        for pid in left:
            _kill_marked(pid, mark)


def _kill_marked(pid: int, mark: str) -> None:
    """Kill a process if it still carries the mark."""
    # A pidfd keeps the pid from being reused between the check and the signal.
    with suppress(ProcessLookupError), closing(ForkserverProcess(pid)) as process:
        if _is_marked(pid, mark):
            process.kill()
            # Its end is awaited: the next reading of the list would find it again.
            process.has_ended(SWEEP_S)
