"""One run that the page shows: its recording, followed and folded.

Several threads may use it.
"""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topotrain.tools.dashboard.page_json import page_json
from topotrain.tools.recording.job_history import JobHistory
from topotrain.tools.recording.recorded_lines import RecordingError
from topotrain.tools.recording.recorded_workspace import read_on
from topotrain.tools.recording.recording_file import FILE, RecordingFollower


@dataclass(frozen=True, slots=True)
class RunUpdate:
    """An answer to a page. text: JSON. is_last: the job has ended."""

    text: str
    is_last: bool


class WatchedRun:
    """Follows the recording of a workspace.

    Args:
        workspace: of the job. Its recording may not be there yet.
        runs: the number of runs that the page shows, which it is told with the view.
    """

    def __init__(self, workspace: Path, runs: int = 1) -> None:
        self.workspace, self._runs = workspace, runs
        self._follower, self._history = RecordingFollower(workspace / FILE), JobHistory()
        self._lock = threading.Lock()
        self.problem = ""
        """Why the recording cannot be read any further, as one line."""

    def poll(self) -> None:
        """Read what was recorded since the last call."""
        with self._lock:
            if self.problem:
                return
            try:
                read_on(self.workspace, self._follower, self._history)
            except (OSError, RecordingError) as error:
                self.problem = f"{self.workspace / FILE}: {error}"

    def since(self, cursor: int | None) -> RunUpdate:
        """Return what is new behind a cursor; None: the whole view.

        It is the whole view, too, where another job has begun in the workspace meanwhile.
        """
        data = self._history.view() if cursor is None else self._history.since(cursor)
        return RunUpdate(page_json(data | {"runs": self._runs}), data["job"]["ended"] is not None)

    def summary(self) -> dict[str, Any]:
        """Return the present state of the job."""
        return self._history.summary()

    def process(self, name: str) -> dict[str, Any] | None:
        """Return the entry of a process in the view, or None."""
        return self._history.process(name)

    def close(self) -> None:
        """Close the recording."""
        with self._lock:
            self._follower.close()
