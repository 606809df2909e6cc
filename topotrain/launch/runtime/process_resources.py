"""Memory and processor time of running processes, read from /proc.

A launcher reads them from outside, so that a process which computes, waits or is stopped has them, too.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from topotrain.core.events import Resources

INTERVAL_S = 1.0
"""Seconds between two readings of a process, at least."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_USER, _SYSTEM, _PAGES = 11, 12, 21  # fields behind the name in /proc/PID/stat: utime, stime, rss


class ResourceReader:
    """Reads the resources of some processes, at most once in INTERVAL_S."""

    def __init__(self) -> None:
        self._due = 0.0

    def due(self, now: float) -> bool:
        """Whether it is time for a reading."""
        if now < self._due:
            return False
        self._due = now + INTERVAL_S
        return True

    def read(self, processes: Iterable[tuple[str, int]]) -> Iterator[Resources]:
        """Yield the resources of each of these (name, pid) that still runs."""
        for who, pid in processes:
            found = resources(who, pid)
            if found is not None:
                yield found


def resources(who: str, pid: int) -> Resources | None:
    """Return the resources of a process; None if it is gone."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name is in parentheses, and may have spaces and parentheses itself.
    values = line.rpartition(b")")[2].split()
    # One that has ended and was not reaped has no memory.
    if values[0] == b"Z":
        return None
    cpu_s = (int(values[_USER]) + int(values[_SYSTEM])) / _TICKS_PER_S
    return Resources(who, pid, int(values[_PAGES]) * os.sysconf("SC_PAGE_SIZE"), cpu_s)
