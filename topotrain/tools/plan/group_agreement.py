"""How the server groups of a job agree, in words."""

from topotrain.config.job import Agreement, Job
from topotrain.config.topology import Topology
from topotrain.extensions.group_averaging.averaging_rules import moving_rate


def agreement_in_words(job: Job, topology: Topology) -> str:
    """Return a sentence about server groups that average; "" where none do."""
    cluster = job.cluster
    if not topology.synced or cluster.agreement is Agreement.kMaster:
        return ""
    every = "every update" if cluster.sync_freq == 1 else f"every {cluster.sync_freq} updates"
    match cluster.agreement:
        case Agreement.kElastic:
            rate = moving_rate(cluster)
            how = (
                f"after {every} a group and the center move towards each other by {rate:.3g} of the distance; "
                "the center is the result"
            )
        case Agreement.kGossip:
            how = (
                f"after {every} a group averages with another one by chance (seed {job.seed}); "
                "the mean of all groups is the result"
            )
        case _:
            how = f"after {every} a group averages with the next one; the mean of all groups is the result"
    return f"{cluster.agreement.value}: {how}"
