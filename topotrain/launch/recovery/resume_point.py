"""The snapshot from which a whole job restarts.

It is the newest one of the job itself, or else the one that the job started from. Over several units one unit chooses,
and each unit checks that it sees the same snapshot.
"""

import hashlib
import sys
from contextlib import suppress
from pathlib import Path

from topotrain.config.job import ConfigError, Job
from topotrain.config.private_files import read_bytes
from topotrain.core.events import Notifier
from topotrain.extensions.checkpointing.checkpoint_reader import FOLDER, MANIFEST, latest

SHARED = "units on several hosts need one workspace that all of them see"


class ResumeSource:
    """The source of snapshots for restarts. Create it before the job starts.

    Args:
        workspace: the job's workspace.
        resume: the snapshot that the job resumed from; "": it started at step 0.
    """

    def __init__(self, workspace: Path, resume: str = "") -> None:
        self._workspace, self._resume = workspace, resume
        self._former = _identity(workspace / FOLDER)  # of an earlier job, unless this job resumes it

    def newest(self, notifier: Notifier) -> str:
        """Return the snapshot to resume from; "": the job starts at step 0.

        Raises ConfigError if all snapshots are damaged.
        """
        folder, resume = self._workspace / FOLDER, self._resume
        # Snapshots that an earlier job has left in the workspace must not be resumed by this one.
        if _identity(folder) != self._former or Path(resume).parent == folder:
            found = latest(self._workspace, notifier)
            resume = resume if found is None else str(found.path)
        notifier.notify(f"the whole job starts again from {resume or 'its beginning'}")
        return resume


class WarningPrinter(Notifier):
    """Prints texts as warnings, before the job has displays."""

    def notify(self, text: str) -> None:
        print(f"topotrain: warning: {text}", file=sys.stderr)


def asked_for(job: Job, workspace: Path) -> str:
    """Return the newest snapshot of the workspace for `resume: true`; "": none.

    Raises ConfigError if all snapshots are damaged.
    """
    if not job.resume:
        return ""
    warnings = WarningPrinter()
    found = latest(workspace, warnings)
    # No error: the same command starts and resumes a job.
    if found is None:
        warnings.notify(f"resume: true: {job.workspace} has no snapshot yet, so the job starts at the beginning")
    return "" if found is None else str(found.path)


def seal(path: str) -> str:
    """Return a hash that identifies a snapshot; "" where there is none."""
    # A unit that cannot read the manifest gets "", which differs from the seal of unit 0.
    with suppress(OSError):
        return hashlib.sha256(read_bytes(Path(path) / MANIFEST)).hexdigest() if path else ""
    return ""


def seen(workspace: Path, name: str, sealed: str) -> str:
    """Return the path of the snapshot that another unit has chosen; "" for "".

    Raises ConfigError where this unit sees another snapshot.
    """
    path = str(workspace / FOLDER / name) if name else ""
    # Equal names are not enough: a workspace that is not shared may have another snapshot of that number.
    if seal(path) != sealed:
        accepted = f"has no snapshot {name} as the leader sees it, from which the job is to go on: {SHARED}"
        raise ConfigError("cluster.workspace", str(workspace), accepted)
    return path


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return the identity of a folder, with any name; None if it does not exist."""
    try:
        info = folder.stat()
    except OSError:
        return None
    # A name is not enough: a new folder may have the name of a former job's.
    return info.st_dev, info.st_ino
