"""The number of threads with which a worker computes."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

from topotrain.config.job import Job
from topotrain.config.topology import Topology

OMP = "OMP_NUM_THREADS"
_CGROUPS = Path("/sys/fs/cgroup")


def worker_threads(job: Job, topology: Topology, unit: int, environ: Mapping[str, str], cores: int) -> int:
    """Return the number of threads of each worker in a unit.

    0: as the environment says.

    `threads` of the job comes first, then OMP_NUM_THREADS. Without both, the cores are divided among the workers.

    Args:
        unit: the rank of the unit.
        environ: the environment of the unit.
        cores: the cores that this process may use.
    """
    if job.threads or OMP in environ:
        return job.threads
    # A scheduler gives each unit cores of its own. Without one, the units of a host share all of its cores.
    hosts = topology.hosts
    own = bool(hosts) and cores < (os.cpu_count() or 1)
    units = [u for u in topology.units if u.rank == unit or (not own and (not hosts or hosts[u.rank] == hosts[unit]))]
    return max(1, cores // max(1, sum(len(u.workers) for u in units)))


def allowed_cores() -> int:
    """Return the number of cores that this process may use.

    The limits are its affinity and the quota of its control group.
    """
    allowed = len(os.sched_getaffinity(0))
    return max(1, math.ceil(min(allowed, _quota())))


def _quota() -> float:
    """Return the cores of this process's control group; infinity: no limit."""
    try:
        group = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
        # A container sees its own group as the root.
        found = next(path for path in (_CGROUPS / group / "cpu.max", _CGROUPS / "cpu.max") if path.exists())
        limit, period = found.read_text().split()
        return math.inf if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError, StopIteration):
        return math.inf
