"""Time that a job gets for a last snapshot after SIGTERM or SIGHUP.

Schedulers such as Slurm and Kubernetes send SIGTERM some time before SIGKILL. A terminal that is closed sends SIGHUP.
"""

import signal

from topotrain.config.intervals import wants_snapshots
from topotrain.config.job import Job
from topotrain.config.topology import Address, Role
from topotrain.core.events import Saved

_LATER_S = 3.0
LEADER = Address(Role.SERVER, 0, 0)
"""The server that is sent the command `WORDS`, and replies with Saved or Unsaved."""
WORDS = {"command": "snapshot"}


def grace(job: Job, number: int) -> float:
    """Return the seconds for a last snapshot after this signal; 0: an end at once."""
    # Ctrl-C ends a job at once: its user waits.
    return job.grace_s if wants_snapshots(job) and number != signal.SIGINT else 0.0


def waits(job: Job) -> float:
    """Return the seconds that a process waits for its launcher after SIGTERM; 0: none."""
    seconds = grace(job, signal.SIGTERM)
    # Longer than the launcher, which ends the process in order when the time is over.
    return seconds + _LATER_S if seconds else 0.0


def hint(saved: Saved | None, workspace: str = "") -> str:
    """Return a text about how to resume the job, or "" without a snapshot.

    workspace: the workspace of a job of `topotrain run`; "" for other jobs.
    """
    if saved is None:
        return ""
    how = f"`topotrain run --resume {workspace}` goes" if workspace else "with `resume: true` the same job goes"
    return f"snapshot {saved.number} has step {saved.step}: {how} on from there"
