"""The recording of a workspace: its place, its content, and whether it goes on."""

import time
from pathlib import Path
from threading import Lock

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


class RecordedWorkspace:
    """Reads the recording of a workspace, again and again, for several threads.

    Args:
        workspace: the folder of a job that runs or has ended.
        field: the name of the folder in errors.

    Raises:
        ConfigError: there is no such folder, or no recording in it that can be read.
    """

    def __init__(self, workspace: Path, field: str = "WORKSPACE") -> None:
        self._workspace, self._field = workspace, field
        self._follower, self.history = RecordingFollower(workspace / FILE), JobHistory()
        self._lock = Lock()
        self._problem = ""
        """Why it cannot be read any further."""
        if not workspace.is_dir():
            self._problem = "there is no such folder; it must be the workspace of a job"
        self.read()
        if not self.history.has_job:
            self._problem = f"has no recording ({FILE}): a job writes one from its start on"
            self.read()

    def read(self) -> JobHistory:
        """Return the history up to now. A job that has ended without a word is lost.

        Raises ConfigError.
        """
        with self._lock:
            if not self._problem:
                self._read_on()
            if self._problem:
                self.close()
                raise ConfigError(self._field, str(self._workspace), self._problem)
            return self.history

    def close(self) -> None:
        self._follower.close()

    def _read_on(self) -> None:
        # Before the lines are read: a launcher that has ended by now has written all of them.
        written = self.history.has_ended or has_writer(self._workspace)
        try:
            for timed in self._follower.poll():
                self.history.add(timed)
        except RecordingError as error:
            self._problem = f"its recording {error}"
        except OSError as error:
            self._problem = f"its recording cannot be read ({error.strerror})"
        if not written:
            self.history.lose()
