"""How long a job goes on that is asked to end: what takes jobs away (Slurm, Kubernetes) sends SIGTERM some time before
SIGKILL, which is time for one more snapshot. Ctrl-C ends a job at once."""

import signal

from topotrain.config.intervals import wants_snapshots
from topotrain.config.job import Job
from topotrain.config.topology import Address, Role
from topotrain.core.events import Saved

_LATER_S = 3.0
LEADER = Address(Role.SERVER, 0, 0)
"""Who is asked for the snapshot, in these words, and answers with Saved or Unsaved."""
WORDS = {"command": "snapshot"}


def grace(job: Job, number: int) -> float:
    """Seconds that a job may take for a last snapshot after this signal; 0: it ends at once."""
    return job.grace_s if wants_snapshots(job) and number == signal.SIGTERM else 0.0


def waits(job: Job) -> float:
    """Seconds for which a process that gets SIGTERM waits for its launcher's word; 0: it ends at once."""
    seconds = grace(job, signal.SIGTERM)
    return seconds + _LATER_S if seconds else 0.0


def hint(saved: Saved | None, workspace: str = "") -> str:
    """How to go on from what is there; "" where there is nothing. workspace: of a job of `topotrain run`."""
    if saved is None:
        return ""
    how = f"`topotrain run --resume {workspace}` goes" if workspace else "with `resume: true` the same job goes"
    return f"snapshot {saved.number} has step {saved.step}: {how} on from there"
