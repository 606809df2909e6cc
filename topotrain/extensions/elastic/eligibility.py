"""Which worker groups can be started again alone, and which may leave a job that runs and come to it later.

Rule: whoever decides about it before anything runs (launcher, simulator) and the servers ask here; what only the
servers know, such as tables that the script has opened, they add themselves.
"""

from topotrain.config.job import Apply, ConfigError, Job, OnFailure, Shard
from topotrain.config.topology import Topology

TABLES = "the job has tables, and what a group has said of them is not taken back"
"""Why no group can be started again alone, as only servers and scripts know."""


def refusal(job: Job, topology: Topology, group: int) -> str:
    """Why the workers of a group cannot be started again while everybody else stays; empty: they can."""
    if not topology.regroups(group):
        return (
            "its workers add up their gradients among themselves, or share a process with a server, "
            "so they cannot be started again without the others"
        )
    if job.apply is Apply.kOnArrival:
        return "with apply: kOnArrival parts of its last step are applied, which nobody could take back"
    return ""


def singly(job: Job) -> bool:
    """Whether a worker that is lost starts again without the others of its group, which meanwhile go on without it.

    So with backup workers: a step is the mean over those whom it names, and each worker's batches count by themselves.
    """
    return job.cluster.backup > 0


def absent_groups(job: Job, topology: Topology) -> frozenset[int]:
    """The groups that are not there at the start (`start_groups`). Raises ConfigError where that cannot be."""
    if not job.start_groups:
        return frozenset()
    if job.start_groups > topology.worker_groups:
        accepted = f"must be at most {topology.worker_groups}, the cluster's nworker_groups; 0: all of them"
        raise ConfigError("start_groups", job.start_groups, accepted)
    absent = frozenset(range(job.start_groups, topology.worker_groups))
    for group in sorted(absent):
        why = leave_refusal(job, topology, group)
        if why:
            raise ConfigError("start_groups", job.start_groups, f"must be 0: group {group} cannot come later: {why}")
    return absent


def leave_refusal(job: Job, topology: Topology, group: int) -> str:
    """Why a group cannot leave the job and come to it while it runs; empty: it can, as far as is known beforehand."""
    if topology.worker_groups == 1:
        return (
            "the job has one worker group; workers leave and join it in numbers, as in "
            "`topotrain leave WORKSPACE --workers 1`"
        )
    if job.on_failure is not OnFailure.kContinue:
        return f"with on_failure: {job.on_failure.value} whoever is lost ends the job; kContinue is needed"
    why = refusal(job, topology, group)
    if why:
        return why
    if topology.server_groups != 1:
        return "it has servers of its own, which agree with those of the others up to the end"
    if job.shard is Shard.kStatic:
        return "with shard: kStatic each group has its part of an epoch, which no other one reads"
    if group == 0:
        return "its first worker gives the model and brings the result home, so it stays to the end"
    return ""
