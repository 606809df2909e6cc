"""What `topotrain run --resume WORKSPACE` and `resume: true` mean: which snapshot, and of which job.

Rule: the job goes on as itself unless another file is given: a snapshot carries the job's text and so the names of its
program and arguments. Another file may lay the job out in another way; what cannot be another is the model and the kind
of optimizer, which the servers compare. Nothing here loads torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from topotrain.config.job import ConfigError, Job
from topotrain.config.job_file import loads
from topotrain.extensions.checkpointing.checkpoint_reader import FOLDER, MANIFEST, Manifest, latest
from topotrain.launch.recovery import resume_point


@dataclass(frozen=True, slots=True)
class ResumeSnapshot:
    """What an earlier start has left: the snapshot's folder, and the job that it is of."""

    path: str
    job: Job


def earlier(workspace: Path, sets: Sequence[str] = ()) -> ResumeSnapshot:
    """The newest snapshot of a workspace, or the one whose folder is named; its job is set up there, with overrides.

    Raises:
        ConfigError: there is none, or none that can be read.
    """
    found: Manifest | None
    if (workspace / MANIFEST).is_file():
        found = Manifest.open(workspace.resolve())
        found.verify()
        workspace = found.path.parent.parent
    else:
        found = latest(workspace, resume_point.warn)
    if found is None:
        accepted = f"has no snapshot in {FOLDER}/: one is written every snapshot_s seconds, from the first step on"
        raise ConfigError("--resume", str(workspace), accepted)
    job = loads(found.conf, f"snapshot {found.number}", sets)
    return ResumeSnapshot(str(found.path), replace(job, cluster=replace(job.cluster, workspace=str(workspace))))


def asked_for(job: Job) -> str:
    """See `lives.asked_for`."""
    return resume_point.asked_for(job, Path(job.workspace))


def refuse_elsewhere(job: Job) -> None:
    """Raise ConfigError where units are started one by one: nobody there could start groups later."""
    if job.start_groups:
        accepted = "needs `topotrain run`, through which groups join"
        raise ConfigError("start_groups", job.start_groups, accepted)
