"""The recording of a workspace: its place, its content, and whether it goes on."""

import time
from pathlib import Path
from typing import Any

from topotrain.config.job import ConfigError
from topotrain.launch.agent.file_locks import is_held
from topotrain.tools.recording.job_history import JobHistory
from topotrain.tools.recording.recorded_lines import RecordingError
from topotrain.tools.recording.recording_file import FILE, NEWEST, RecordingFollower

QUIET_S = 15.0
"""Seconds without a line after which a job without a launcher on this host is lost."""


def has_writer(workspace: Path) -> bool:
    """Return whether a job may be recorded here now.

    This is so if its launcher holds the workspace, or has just written.
    """
    written = _written_at(workspace / FILE)
    if written is None:
        return False
    quiet_s = time.time() - max(written, _written_at(workspace / NEWEST) or 0.0)
    # The locks of another host are not seen here.
    return quiet_s < QUIET_S or is_held(workspace / "lock")


def _written_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def read_on(workspace: Path, follower: RecordingFollower, history: JobHistory) -> bool:
    """Add the new lines of a recording to its history.

    Return whether the history may have changed. A job that has ended without a word is lost. Raises RecordingError or
    OSError.
    """
    # Before the lines are read: a launcher that has ended by now has written all of them.
    written = history.has_ended or has_writer(workspace)
    found = follower.poll()
    for timed in found:
        history.add(timed)
    lost = not written and history.lose()
    return bool(found) or lost


class RecordedWorkspace:
    """Reads the recording of a workspace, again and again.

    Args:
        workspace: the folder of a job that runs or has ended.
        field: the name of the folder in errors.

    Raises:
        ConfigError: there is no such folder, or no recording in it that can be read.
    """

    def __init__(self, workspace: Path, field: str = "WORKSPACE") -> None:
        self.path = workspace / FILE
        self._workspace, self._field = workspace, field
        self._follower, self.history = RecordingFollower(self.path), JobHistory()
        if not workspace.is_dir():
            raise self._refused("there is no such folder; it must be the workspace of a job")
        self.poll()
        if not self.history.has_job:
            raise self._refused(f"has no recording ({FILE}): a job writes one from its start on")

    def poll(self) -> bool:
        """Read what has come; return whether there was something. Raises ConfigError."""
        try:
            return read_on(self._workspace, self._follower, self.history)
        except RecordingError as error:
            raise self._refused(f"its recording {error}") from None
        except OSError as error:
            raise self._refused(f"its recording cannot be read ({error.strerror})") from None

    def summary(self) -> dict[str, Any]:
        """Return the present state of the job."""
        return self.history.summary()

    def close(self) -> None:
        """Close the file."""
        self._follower.close()

    def _refused(self, accepted: str) -> ConfigError:
        self.close()
        return ConfigError(self._field, str(self._workspace), accepted)
