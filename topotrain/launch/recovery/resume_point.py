"""What a job goes on from when it starts again as a whole: its own newest snapshot, or what it has started from.

Rule: over several units one of them chooses, and each looks whether it sees the same.
"""

import hashlib
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from topotrain.config.job import ConfigError, Job
from topotrain.config.private_files import read_bytes
from topotrain.extensions.checkpointing.checkpoint_reader import FOLDER, MANIFEST, latest

SHARED = "units on several hosts need one workspace that all of them see"


class ResumeSource:
    """See above; to be made before the job starts.

    Args:
        workspace: the job's.
        resume: the snapshot that the job goes on from; "": the beginning.
    """

    def __init__(self, workspace: Path, resume: str = "") -> None:
        self._workspace, self._resume = workspace, resume
        self._former = _identity(workspace / FOLDER)  # of an earlier job, unless that is continued

    def newest(self, tell: Callable[[str], None]) -> str:
        """The snapshot to go on from; "": the beginning. Raises ConfigError for snapshots that are all damaged."""
        folder, resume = self._workspace / FOLDER, self._resume
        if _identity(folder) != self._former or Path(resume).parent == folder:
            found = latest(self._workspace, tell)
            resume = resume if found is None else str(found.path)
        tell(f"the whole job starts again from {resume or 'its beginning'}")
        return resume


def warn(text: str) -> None:
    """Before a job has windows in which it could tell anything."""
    print(f"topotrain: warning: {text}", file=sys.stderr)


def asked_for(job: Job, workspace: Path) -> str:
    """With `resume: true`, the newest snapshot of the job's workspace; "": the beginning.

    Raises ConfigError for snapshots that are all damaged, and not where there is none: the same line starts a job and
    goes on with it.
    """
    if not job.resume:
        return ""
    found = latest(workspace, warn)
    if found is None:
        warn(f"resume: true: {job.workspace} has no snapshot yet, so the job starts at the beginning")
    return "" if found is None else str(found.path)


def seal(path: str) -> str:
    """By which a snapshot is known; "" where there is none."""
    with suppress(OSError):
        return hashlib.sha256(read_bytes(Path(path) / MANIFEST)).hexdigest() if path else ""
    return ""


def seen(workspace: Path, name: str, sealed: str) -> str:
    """The snapshot of this name that another unit has chosen; "" for "". Raises ConfigError where it is another one."""
    path = str(workspace / FOLDER / name) if name else ""
    if seal(path) != sealed:
        accepted = f"has no snapshot {name} as unit 0 sees it, from which the job is to go on: {SHARED}"
        raise ConfigError("cluster.workspace", str(workspace), accepted)
    return path


def _identity(folder: Path) -> tuple[int, int] | None:
    """By which a folder is known, whatever its name; None for one that does not exist."""
    try:
        info = folder.stat()
    except OSError:
        return None
    return info.st_dev, info.st_ino
