"""What a job goes on from when it starts again as a whole: its own newest snapshot, or what it has started from."""

from collections.abc import Callable
from pathlib import Path

from topotrain.checkpoint import FOLDER, latest


class Origin:
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


def _identity(folder: Path) -> tuple[int, int] | None:
    """By which a folder is known, whatever its name; None for one that does not exist."""
    try:
        info = folder.stat()
    except OSError:
        return None
    return info.st_dev, info.st_ino
