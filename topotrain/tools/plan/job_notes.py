"""A plan in words: how server groups agree, and which store survives a host."""

from topotrain.comm.store import StoreError
from topotrain.comm.store.store_url import parse
from topotrain.config.job import Agreement, ConfigError, Job, OnFailure
from topotrain.config.topology import Topology
from topotrain.extensions.group_averaging.averaging_rules import moving_rate

SURVIVES = "redis://HOST or file:///SHARED/FOLDER"
"""The URLs with which another unit takes over for unit 0."""


def agreement_in_words(job: Job, topology: Topology) -> str:
    """Return a sentence about server groups that average; "" where none do."""
    cluster, mean = job.cluster, "the mean of all groups is the result"
    if not topology.synced or cluster.agreement is Agreement.kMaster:
        return ""
    every = "every update" if cluster.sync_freq == 1 else f"every {cluster.sync_freq} updates"
    match cluster.agreement:
        case Agreement.kElastic:
            share = f"{moving_rate(cluster):.3g} of the distance; the center is the result"
            how = f"a group and the center move towards each other by {share}"
        case Agreement.kGossip:
            how = f"a group averages with another one by chance (seed {job.seed}); {mean}"
        case _:
            how = f"a group averages with the next one; {mean}"
    return f"{cluster.agreement.value}: after {every} {how}"


def store_advice(job: Job, topology: Topology) -> str:
    """Return advice about the store of a job; "" where another one changes nothing.

    Raises ConfigError for an invalid `rendezvous`.
    """
    # With one unit there is no other host, and with kStop the loss of any unit ends the job.
    if len(topology.units) < 2 or job.on_failure is not OnFailure.kContinue:
        return ""
    if not job.rendezvous:
        return (
            f"on several hosts the job survives the loss of any of them with --rendezvous {SURVIVES}; "
            "with a tcp:// store that unit 0 serves it ends with unit 0"
        )
    try:
        address = parse(job.rendezvous)
    except StoreError as error:
        raise ConfigError("rendezvous", None, str(error)) from None
    if address.scheme not in ("tcp", "env"):
        return ""
    return (
        f"rendezvous {address.text}: if unit 0 serves this store, the job ends when the host of unit 0 is lost; "
        f"with {SURVIVES} another unit takes over"
    )
