"""Orphans of a job: processes with its mark in their environment, to be killed."""

import os
import selectors
import signal
import time
from collections.abc import Set
from pathlib import Path

from topotrain.launch import RUN_VARIABLE

SWEEP_S = 1.0
BLANK_MARK = "0" * 32
"""The mark of a process that belongs to no job, with the length of all marks."""


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
    try:
        # A pidfd keeps the pid from being reused between the check and the signal.
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _is_marked(pid, mark):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            with selectors.DefaultSelector() as selector:
                # Its end is awaited: the next reading of the list would find it again.
                selector.register(pidfd, selectors.EVENT_READ)
                selector.select(SWEEP_S)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)
