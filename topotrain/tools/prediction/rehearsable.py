"""Which jobs can be rehearsed, and what a rehearsal leaves out."""

from dataclasses import replace

from topotrain.config.job import Compression, ConfigError, Job
from topotrain.config.topology import Topology

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


def same_as_one_process(job: Job) -> bool:
    """Whether a job computes the same as one process would.

    Its updates are then synchronous, and nothing is lossy.
    """
    cluster = job.cluster
    local = cluster.outer is not None or cluster.n_push > 1 or cluster.n_fetch > 1
    lossy = cluster.compression is not Compression.kNone
    return cluster.nworker_groups == 1 and not (local or lossy or cluster.backup)
