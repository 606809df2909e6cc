"""Whether what a worker will hold fits into what it may have: asked before it starts, and answered with numbers.

Three bounds are read: the process's own (RLIMIT_DATA, which counts private memory that can be written, and RLIMIT_AS,
which counts everything), the control group's, and the machine's free memory, shared by all processes of the job here.
"""

import resource
from dataclasses import dataclass
from pathlib import Path

from topotrain.job import ConfigError

SAFE = 0.85
"""How much of a machine's free memory a job may plan to use."""

COPIES = 3
"""Bytes that a worker needs per byte of its parameters: the value, its gradient, and what is on its way."""

ITSELF = 256_000_000
"""About what Python and torch take themselves before a model is made."""

_SELF = Path("/proc/self/status")
_MACHINE = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Need:
    """What a worker will hold, in bytes. `parameters`: with gradients and what is on its way; `activations`: all
    that lives at once in a forward and stays for the backward. `shared`: the parameters lie in memory that processes
    of a host share, which RLIMIT_DATA does not count.
    """

    parameters: int
    activations: int = 0
    shared: bool = False

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.activations

    @property
    def private(self) -> int:
        """What counts as this process's data."""
        return self.activations + (0 if self.shared else self.parameters)


@dataclass(frozen=True, slots=True)
class Room:
    """What a process may still take, in bytes: as data, as addresses, and of the machine. None: no bound is known."""

    data: int | None = None
    addresses: int | None = None
    machine: int | None = None

    def least(self) -> int | None:
        """The smallest bound."""
        return min((bound for bound in (self.data, self.addresses, self.machine) if bound is not None), default=None)


def limit() -> int | None:
    """What a worker may hold of a model by this process's own bounds, which processes inherit; None: none is set.

    The same on all workers that are started alike: what happens to be in use is not asked.
    """
    bounds = [bound for bound in map(_limit, (resource.RLIMIT_DATA, resource.RLIMIT_AS)) if bound is not None]
    return max(0, min(bounds) - ITSELF) if bounds else None


def room(processes: int = 1) -> Room:
    """What this process may take, if `processes` of its job start on this machine at once."""
    data, addresses = (_limit(kind) for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    used = _numbers(_SELF)
    free = _numbers(_MACHINE).get("MemAvailable")
    group = _group()
    bounds = [bound for bound in (free, group) if bound is not None]
    return Room(
        None if data is None else max(0, data - used.get("VmData", 0)),
        None if addresses is None else max(0, addresses - used.get("VmSize", 0)),
        int(SAFE * min(bounds)) // processes if bounds else None,
    )


def check(need: Need, here: Room, who: str, freed: int = 0) -> None:
    """Refuse what cannot fit.

    Args:
        need: what will be held.
        here: what there is.
        who: "worker 1", say.
        freed: bytes that will be given back first, the parts of other workers.

    Raises:
        ConfigError: with what is needed and what there is.
    """
    bounds = (
        ("RLIMIT_DATA leaves", need.private, here.data),
        ("RLIMIT_AS leaves", need.total, here.addresses),
        ("its part of the machine's free memory is", need.total, here.machine),
    )
    for words, wanted, bound in bounds:
        if bound is not None and wanted > bound + freed:
            accepted = (
                f"does not fit: it needs {_mb(wanted)} MB (parameters with gradients and what is on its way "
                f"{_mb(need.parameters)}{' in shared memory' if need.shared else ''}, activations "
                f"{_mb(need.activations)}), {words} {_mb(bound + freed)} MB. More workers per group, a smaller batch "
                f"or other partition blocks may help"
            )
            raise ConfigError("memory", who, accepted)


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _numbers(file: Path) -> dict[str, int]:
    """The lines "Name:  123 kB" of a file under /proc, in bytes; nothing where there is none."""
    try:
        lines = file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    rows = (line.replace(":", " ").split() for line in lines)
    return {row[0]: 1024 * int(row[1]) for row in rows if len(row) == 3 and row[2] == "kB"}


def _group() -> int | None:
    """What the control group leaves (version 2; in a container its own is at the root)."""
    try:
        most = (_GROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_GROUP / "memory.current").read_text(encoding="ascii"))
        cached = dict(line.split() for line in (_GROUP / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return None
    return None if most == "max" else max(0, int(most) - used + int(cached.get("inactive_file", 0)))


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f}"
