"""Which jobs can be rehearsed, their memory, whether they change updates, and the error to expect.

`python -m benchmarks.predictions --held-out` predicts forty jobs on which nothing in the product was tuned, runs them,
and compares the time of a step. All have two workers, on the probed machine. docs/prediction.md has the summary.
"""

from collections import Counter
from collections.abc import Sequence

from topotrain.config.job import Agreement, Compression, ConfigError, Job, TransportChoice
from topotrain.config.topology import Topology
from topotrain.tools.plan.layout_plan import PlannedSchema, plan
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.prediction import ProcessMemory
from topotrain.tools.probe.probe_file import Probe

MOST_PROCESSES = 64
"""Workers and servers that are rehearsed each for itself."""
MEASURED_WORKERS = 2
SHARED_MEMORY, TCP, LINK, STRAGGLER = 0.37, 0.24, 0.21, 0.43
"""The error within which nine of ten of the held-out jobs are, by what is between their processes."""


def processes_of(topology: Topology) -> int:
    """Return how many workers and servers a layout has."""
    return topology.worker_groups * topology.workers_per_group + topology.server_groups * topology.shards


def check(job: Job, topology: Topology) -> None:
    """Raise ConfigError for what cannot be rehearsed; it names the field."""
    cluster, workers = job.cluster, topology.workers_per_group
    if job.splits:
        raise ConfigError("partition", None, "must be left out: a model that is split over workers cannot be predicted")
    if topology.torch_collective:
        accepted = "must be kAuto or kOwn: torch.distributed cannot be predicted"
        raise ConfigError("cluster.engine", cluster.engine.value, accepted)
    if cluster.replicas > 1:
        raise ConfigError("cluster.replicas", cluster.replicas, "must be 1: replicated servers cannot be predicted")
    if cluster.outer is not None and workers > 1:
        accepted = "must be 1 with cluster.outer: a group that shares a replica cannot be predicted"
        raise ConfigError("cluster.nworkers_per_group", workers, accepted)
    if topology.worker_groups > 1 and topology.implicit:
        accepted = "must be 1 or more: groups without servers have nothing in common"
        raise ConfigError("cluster.nserver_groups", cluster.nserver_groups, accepted)


def planned_memory(job: Job, probe: Probe, machines: Machines, topology: Topology) -> Sequence[ProcessMemory]:
    """Return the training state of each process. Raises ConfigError where a host needs more than it has."""
    optimizer = probe.optimizer
    planned = plan(job, PlannedSchema(probe.schema(), optimizer.state_factor, optimizer.momentum, (optimizer.name,)))
    if machines.memory_bytes is not None:
        on_host = Counter[int]()
        for process in planned.memory:
            on_host[topology.host_of(process.resident)] += process.total
        ((host, most),) = on_host.most_common(1)
        if most > machines.memory_bytes:
            needed = f"host {host} needs {most / 1e9:,.3g} GB of training state, without activations"
            raise ConfigError("--memory", f"{machines.memory_bytes / 1e9:,.3g} GB", f"is too little: {needed}")
    return tuple(ProcessMemory(str(process.resident), process.total) for process in planned.memory)


def changes(job: Job) -> tuple[str, ...]:
    """Return why the updates of a job differ from those of one process; empty: they do not."""
    cluster = job.cluster
    several, implicit = cluster.nworker_groups > 1, cluster.nserver_groups == 0
    conditions = {
        "groups never meet": several and implicit,
        "asynchronous": several and not implicit and (cluster.outer is None or cluster.quorum > 0),
        "local steps": cluster.outer is not None or max(cluster.n_push, cluster.n_fetch) > 1,
        "averages": cluster.nserver_groups > 1 and cluster.agreement is not Agreement.kMaster,
        "lossy compression": cluster.compression is not Compression.kNone,
        "drops late gradients": cluster.backup > 0,
    }
    return tuple(text for text, holds in conditions.items() if holds)


def expected_error(job: Job, machines: Machines, topology: Topology, probed_cores: int) -> float | None:
    """Return the relative error to expect of a step; None: it was not measured.

    0.2 is a fifth more or less.
    """
    workers = topology.worker_groups * topology.workers_per_group
    if workers != MEASURED_WORKERS or machines.cores not in (None, probed_cores):
        return None
    if any(times > 1 for times in machines.stragglers.values()):
        return STRAGGLER
    if machines.hosts > 1 or machines.link is not None:
        return LINK
    return TCP if job.cluster.transport is TransportChoice.kTcp else SHARED_MEMORY
