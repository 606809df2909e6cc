"""Advice about the store of a job that is to survive the loss of a host."""

from topotrain.comm.store import StoreError
from topotrain.comm.store.store_url import parse
from topotrain.config.job import ConfigError, Job, OnFailure
from topotrain.config.topology import Topology

SURVIVES = "redis://HOST or file:///SHARED/FOLDER"
"""The URLs with which another unit takes over for unit 0."""


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
