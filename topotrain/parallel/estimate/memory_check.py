"""Check before the start of a job that its processes fit in memory.

Limits of one process are RLIMIT_DATA, which counts private writable memory, and RLIMIT_AS, which counts all mapped
memory. The limit of all processes of a host together is a fraction of the host's memory, or of the limit of its control
group.
"""

import resource
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from topotrain.config.job import ConfigError

if TYPE_CHECKING:  # its module imports torch, and `topotrain doctor` reports where that is missing
    from topotrain.parallel.estimate.process_memory import ProcessNeed

SAFE = 0.85
"""Fraction of a host's memory that a job may plan to use."""

ITSELF = 285_000_000
"""Approximate bytes of Python and torch themselves in a process that trains.

They are the memory at the fork and the pages of libraries that are read later."""

LIMITED = 210_000_000
"""Bytes of ITSELF that certainly count for the limits of a process.

Jobs have run where 75 MB more would not have fit, and a job that may fit is not refused."""

COMMON = 240_000_000
"""Bytes of ITSELF that the processes of a unit share, since all are forks of one process."""

CODE = 1_100_000_000
"""Bytes that RLIMIT_AS counts in addition: the address space of torch's libraries."""

_THREADS = 3
_STACK = 8 << 20
_MACHINE = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Memory limits in bytes; None if a limit is not known.

    Attributes:
        data: private writable memory of one process.
        addresses: mapped memory of one process.
        machine: memory of this host for all processes of the job.
        words: the origin of `machine`.
    """

    data: int | None = None
    addresses: int | None = None
    machine: int | None = None
    words: str = ""

    def least(self) -> int | None:
        """Return the smallest limit."""
        return min((bound for bound in (self.data, self.addresses, self.machine) if bound is not None), default=None)


def memory_limits() -> MemoryLimits:
    """Return the limits of this process, which its children inherit, and of this host."""
    data, addresses = (_limit(kind) for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    # MemTotal, not MemAvailable: memory that is in use at the moment changes all the time.
    bounds = [(_numbers(_MACHINE).get("MemTotal"), "memory"), (_group(), "control group")]
    known = [(int(SAFE * bound), f"{SAFE:.0%} of its {what}") for bound, what in bounds if bound is not None]
    machine, words = min(known, default=(None, ""))
    return MemoryLimits(data, addresses, machine, words)


def stacks(peers: int) -> int:
    """Return the bytes that the threads of a process reserve for stacks."""
    # Both limits of a process count them, though hardly any of it is used.
    return (_THREADS + 2 * peers) * (_limit(resource.RLIMIT_STACK) or _STACK)


def on_host(processes: "Sequence[ProcessNeed]", each: int) -> int:
    """Return the bytes that the processes of one host take together."""
    own = sum(each if need.workers else ITSELF for need in processes)
    units = len({need.unit for need in processes})
    # Processes of a unit are forks of one process, so their common memory counts once per unit.
    return sum(need.total for need in processes) + own - COMMON * (len(processes) - units)


@dataclass(frozen=True, slots=True)
class MemoryExcess:
    """Bytes by which one process, or all processes of a host, exceed a limit."""

    needs: "tuple[ProcessNeed, ...]"
    nbytes: int
    who: str
    words: str

    def error(self) -> ConfigError:
        """Return the error that reports this excess."""
        return ConfigError("memory", self.who, f"does not fit: {self.words}. {_advice(self.needs)}")


def excesses(
    needs: "Iterable[ProcessNeed]", here: MemoryLimits, host: int = 0, each: int = ITSELF
) -> list[MemoryExcess]:
    """Return all excesses over the limits of a host; [] if everything fits.

    Args:
        needs: of all processes of the job. Those on `host` are checked.
        here: the limits of the host.
        host: its number in the topology.
        each: bytes that Python and torch take in the process of a worker.
    """
    mine = tuple(need for need in needs if need.host == host)
    found = [excess for need in mine for excess in _of_process(need, here, each if need.workers else ITSELF)]
    wanted = on_host(mine, each)
    if here.machine is not None and wanted > here.machine:
        most = max(mine, key=lambda need: need.total)
        wanted_text = f"{_mb(wanted)} MB ({_parts(mine)}; the largest is {most.who} with {_mb(most.total)} MB)"
        words = f"its {len(mine)} processes would need {wanted_text}, {here.words} is {_mb(here.machine)} MB"
        found.append(MemoryExcess(mine, wanted - here.machine, f"host {host}", words))
    return found


def _of_process(need: "ProcessNeed", here: MemoryLimits, itself: int) -> Iterator[MemoryExcess]:
    own = itself - ITSELF + LIMITED + stacks(need.peers)
    bounds = (
        ("RLIMIT_DATA", own, need.private, here.data),
        ("RLIMIT_AS", own + CODE, need.resident, here.addresses),
    )
    for name, own, wanted, bound in bounds:
        if bound is not None and own + wanted > bound:
            wanted_text = f"{_mb(own + wanted)} MB ({_mb(own)} for itself and its threads, {_parts([need])})"
            words = f"it would need {wanted_text}, {name} allows {_mb(bound)} MB"
            yield MemoryExcess((need,), own + wanted - bound, need.who, words)


def check(needs: "Iterable[ProcessNeed]", here: MemoryLimits, host: int = 0, each: int = ITSELF) -> None:
    """Raise ConfigError for a job that cannot fit. Arguments are those of `excesses`."""
    for excess in excesses(needs, here, host, each):
        raise excess.error()


def _sizes(needs: "Sequence[ProcessNeed]") -> dict[str, int]:
    return {
        "parameters": sum(need.values for need in needs),
        "gradients": sum(need.gradients for need in needs),
        "on its way": sum(need.exchange for need in needs),
        "optimizer state": sum(need.state for need in needs),
        "activations": sum(need.activations for need in needs),
        "the copy for a snapshot": sum(need.snapshot for need in needs),
    }


def _parts(needs: "Sequence[ProcessNeed]") -> str:
    sizes = ", ".join(f"{what} {_mb(size)}" for what, size in _sizes(needs).items() if size)
    shared, views = sum(need.shared for need in needs), sum(need.views for need in needs)
    more = f", and {_mb(views)} of that mapped once more" if views else ""
    return sizes + (f"; {_mb(shared)} of it shared{more}" if shared else "")


def _advice(needs: "Sequence[ProcessNeed]") -> str:
    """Return what would help against the largest part of the memory."""
    sizes = _sizes(needs)
    most = max(sizes, key=sizes.__getitem__)
    if most == "activations":
        return "A smaller batch, more workers per group, or microbatches with schedule: k1F1B would help"
    if most == "the copy for a snapshot":
        return "snapshot_s: 0 without checkpoint_freq, or more servers on other hosts, would help"
    if most == "optimizer state":
        return "More servers on other hosts, or an optimizer with less state, would help"
    return "More workers per group and more servers, on more hosts, or other partition blocks would help"


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _numbers(file: Path) -> dict[str, int]:
    """Return the lines "Name:  123 kB" of a file under /proc, in bytes; {} without it."""
    try:
        lines = file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    rows = (line.replace(":", " ").split() for line in lines)
    return {row[0]: 1024 * int(row[1]) for row in rows if len(row) == 3 and row[2] == "kB"}


def _group() -> int | None:
    """Return the memory limit of the control group, version 2."""
    try:
        # In a container, its own control group is at the root.
        most = _GROUP.read_text(encoding="ascii").strip()
        return None if most == "max" else int(most)
    except (OSError, ValueError):
        return None


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f}"
