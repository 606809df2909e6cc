"""Which worker groups can restart alone, or leave a running job and join it.

The launcher and the simulator ask here before any process runs, and so do the servers. Reasons that only the servers
know, such as tables that the script has opened, are added by their extensions.
"""

from topotrain.config.job import Apply, Compression, ConfigError, Job, OnFailure, Pull, Shard
from topotrain.config.topology import Topology

TABLES = "the job has tables, and what a group has said of them is not taken back"
"""Why no group can restart alone. Only servers and scripts know it."""


def refusal(job: Job, topology: Topology, group: int) -> str:
    """Why the workers of a group cannot restart while all others continue.

    Empty: they can.
    """
    if not topology.regroups(group):
        return (
            "its workers add up their gradients among themselves, or share a process with a server, "
            "so they cannot be started again without the others"
        )
    if job.apply is Apply.kOnArrival:
        return "with apply: kOnArrival parts of its last step are applied, which cannot be taken back"
    return ""


def in_place_refusal(job: Job, topology: Topology, group: int) -> str:
    """Why the survivors of a group cannot go on while a dead worker of it is replaced.

    Empty: they can, as far as is known before the script runs. Then its group is restarted only on the launcher's word.
    """
    why = refusal(job, topology, group)
    if why:
        return why
    cluster = job.cluster
    shares = topology.sharing(topology.unit_of(topology.workers(group)[0]))
    conditions = {
        "a group of one worker has no survivors": topology.workers_per_group == 1,
        "with cluster.backup the group goes on by itself": cluster.backup > 0,
        "with several server groups their coordinators follow the restart": topology.server_groups > 1,
        "with on_failure: kStop a death ends the job": job.on_failure is not OnFailure.kContinue,
        "with pull: kLazy the outcome of a step is known only in the next one": job.pull is not Pull.kStep,
        "compressed gradients carry the error of the steps before": cluster.compression is not Compression.kNone,
        "with max_staleness the workers of a group ask for values together": cluster.max_staleness is not None,
        "with warmup_steps the groups do not start together": job.warmup_steps > 0,
        "with replicas: 2 the state of a step is in two processes": cluster.replicas > 1,
        "its model is split over the workers": job.splits,
        "with cluster.outer its steps since the last round are in its workers alone": cluster.outer is not None,
        "its values are shared with other groups": any(set(topology.workers(group)) & set(each) for each in shares),
    }
    return next((text for text, holds in conditions.items() if holds), "")


def singly(job: Job) -> bool:
    """Whether a lost worker restarts alone while the rest of its group continues."""
    # With backup workers a step is the mean over the workers that it names, and each worker has batches of its own.
    return job.cluster.backup > 0


def absent_groups(job: Job, topology: Topology) -> frozenset[int]:
    """The groups that are absent at the start (`start_groups`).

    Raises ConfigError if they cannot be.
    """
    if not job.start_groups:
        return frozenset()
    if job.start_groups > topology.worker_groups:
        accepted = f"must be at most {topology.worker_groups}, the cluster's nworker_groups; 0: all of them"
        raise ConfigError("start_groups", job.start_groups, accepted)
    absent = frozenset(range(job.start_groups, topology.worker_groups))
    # A group that comes later joins as one that has left returns, so the same conditions apply.
    for group in sorted(absent):
        why = leave_refusal(job, topology, group)
        if why:
            raise ConfigError("start_groups", job.start_groups, f"must be 0: group {group} cannot come later: {why}")
    return absent


def leave_refusal(job: Job, topology: Topology, group: int) -> str:
    """Why a group cannot leave and join a running job.

    Empty: it can, as far as is known beforehand.
    """
    if topology.worker_groups == 1:
        return (
            "the job has one worker group; workers leave and join it in numbers, as in "
            "`topotrain jobs leave WORKSPACE --workers 1`"
        )
    if job.on_failure is not OnFailure.kContinue:
        return f"with on_failure: {job.on_failure.value} a lost worker ends the job; kContinue is needed"
    why = refusal(job, topology, group)
    if why:
        return why
    if topology.server_groups != 1:
        return "it has servers of its own, which agree with those of the others up to the end"
    if job.fixed_shares:
        default = "" if job.shard is Shard.kStatic else ", the default with cluster.outer,"
        return f"with shard: kStatic{default} each group has its part of an epoch, which no other group reads"
    if group == 0:
        return "its first worker gives the model and writes the result, so it stays to the end"
    return ""
