"""Processor time: of the processes of one side, and of all that a machine runs beside them.

Wall time on a machine with few cores shows waits for other processes. Processor time shows what a step costs, and
hardly changes with the load.
"""

import os
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_CORES = os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a side: seconds by the clock, and processor seconds of all its processes."""

    wall: float
    processor: float


def processor_seconds(pids: Iterable[int]) -> float:
    """User and system time of these processes with all their threads. One that has ended counts nothing."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        # The name of the program stands in parentheses, and may have spaces and parentheses of its own.
        fields = text.rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total * _TICK_S


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of a machine's processor time, from 0 to 1, that a measurement did not have.

    `others` went to processes that it did not start. `stolen` the host gave to other machines.
    """

    others: float
    stolen: float

    @property
    def total(self) -> float:
        return self.others + self.stolen


class MachineLoad:
    """What else a machine does while this process, and those that it starts, measure."""

    def __init__(self) -> None:
        self._began, self._busy, self._stolen, self._own = time.monotonic(), *_machine(), _own()

    def shares(self) -> Shares:
        """Since the beginning. Processes that this one started must have ended."""
        busy, stolen = _machine()
        own = _own() - self._own
        all_of_it = (time.monotonic() - self._began) * _CORES
        # Ticks are counted per process and per core, so the difference may be a little below 0.
        return Shares(max(0.0, busy - self._busy - own) / all_of_it, max(0.0, stolen - self._stolen) / all_of_it)


def _machine() -> tuple[float, float]:
    """Busy and stolen processor seconds of all cores since the machine started."""
    line = Path("/proc/stat").read_text().partition("\n")[0]
    user, nice, system, _idle, _wait, irq, softirq, steal, *_ = map(int, line.split()[1:])
    return (user + nice + system + irq + softirq) * _TICK_S, steal * _TICK_S


def _own() -> float:
    """Processor seconds of this process and of those that have ended below it."""
    mine = resource.getrusage(resource.RUSAGE_SELF)
    return mine.ru_utime + mine.ru_stime + spent_below()


def spent_below() -> float:
    """Processor seconds of all processes that have ended below this one."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
