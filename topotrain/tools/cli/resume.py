"""Find the snapshot and the job for `topotrain run --resume` and `resume: true`.

The job continues unchanged unless another file is given: a snapshot contains the job's text, and so the names of its
program and arguments. Another file may have another layout. The model and the kind of optimizer must be the same, and
the servers compare them. Nothing here loads torch.
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
    """A snapshot of an earlier start: its folder, and its job."""

    path: str
    job: Job


def earlier(workspace: Path, sets: Sequence[str] = ()) -> ResumeSnapshot:
    """Return the newest snapshot of a workspace, or the one with the named folder.

    Its job gets this workspace, and the overrides.

    Raises:
        ConfigError: there is no snapshot that can be read.
    """
    found: Manifest | None
    if (workspace / MANIFEST).is_file():
        found = Manifest.open(workspace.resolve())
        # The named snapshot or none: only `latest` may fall back to an older one.
        found.verify()
        # A snapshot lies in a folder of its own below the workspace.
        workspace = found.path.parent.parent
    else:
        found = latest(workspace, resume_point.WarningPrinter())
    if found is None:
        accepted = f"has no snapshot in {FOLDER}/: one is written every snapshot_s seconds, from the first step on"
        raise ConfigError("--resume", str(workspace), accepted)
    job = loads(found.conf, f"snapshot {found.number}", sets)
    return ResumeSnapshot(str(found.path), replace(job, cluster=replace(job.cluster, workspace=str(workspace))))


def asked_for(job: Job) -> str:
    """See `resume_point.asked_for`."""
    return resume_point.asked_for(job, Path(job.workspace))
