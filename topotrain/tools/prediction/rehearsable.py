"""Which jobs can be rehearsed, their memory, and whether they change updates."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from topotrain.config.job import Agreement, Compression, ConfigError, Job
from topotrain.config.topology import Topology
from topotrain.tools.plan.layout_plan import PlannedSchema, plan
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.prediction import ProcessMemory
from topotrain.tools.probe.probe_file import Probe

MOST_PROCESSES = 64
"""Workers and servers that are rehearsed each for itself."""


def processes_of(topology: Topology) -> int:
    """Return how many workers and servers a layout has."""
    return topology.worker_groups * topology.workers_per_group + topology.server_groups * topology.shards


def steady(job: Job) -> Job:
    """Return the job as it is after its start.

    All groups are there, and have warmed up.
    """
    return replace(job, warmup_steps=0, start_groups=0)


def check(job: Job, topology: Topology) -> None:
    """Raise ConfigError for what cannot be rehearsed; it names the field."""
    cluster = job.cluster
    if job.splits:
        raise ConfigError("partition", None, "must be left out: a model that is split over workers cannot be predicted")
    if topology.torch_collective:
        engine = cluster.engine.value
        raise ConfigError("cluster.engine", engine, "must be kAuto or kOwn: torch.distributed cannot be predicted")
    if cluster.replicas > 1:
        raise ConfigError("cluster.replicas", cluster.replicas, "must be 1: replicated servers cannot be predicted")
    if cluster.outer is not None and topology.workers_per_group > 1:
        workers = topology.workers_per_group
        accepted = "must be 1 with cluster.outer: a group that shares a replica cannot be predicted"
        raise ConfigError("cluster.nworkers_per_group", workers, accepted)
    if topology.worker_groups > 1 and topology.implicit:
        accepted = "must be 1 or more: groups without servers have nothing in common"
        raise ConfigError("cluster.nserver_groups", cluster.nserver_groups, accepted)


def planned_memory(job: Job, probe: Probe, machines: Machines, topology: Topology) -> Sequence[ProcessMemory]:
    """Return the training state of each process.

    Raises:
        ConfigError: a host would need more than it has.
    """
    optimizer = probe.optimizer
    planned = plan(job, PlannedSchema(probe.schema(), optimizer.state_factor, optimizer.momentum, (optimizer.name,)))
    if machines.memory_bytes is not None:
        on_host: dict[int, int] = defaultdict(int)
        for process in planned.memory:
            on_host[topology.host_of(process.resident)] += process.total
        host, most = max(on_host.items(), key=lambda each: each[1])
        if most > machines.memory_bytes:
            needed = f"host {host} needs {most / 1e9:,.3g} GB of training state, without activations"
            raise ConfigError("--memory", f"{machines.memory_bytes / 1e9:,.3g} GB", f"is too little: {needed}")
    return tuple(ProcessMemory(str(process.resident), process.total) for process in planned.memory)


def changes(job: Job) -> tuple[str, ...]:
    """Return the reasons why the updates of a job differ from those of one process.

    Empty: they do not differ.
    """
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
