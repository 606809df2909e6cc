"""One run that the page shows: its recording, followed and folded.

Only the thread of the server's event loop uses it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topotrain.tools.dashboard.page_json import page_json
from topotrain.tools.recording.job_history import JobHistory
from topotrain.tools.recording.recorded_lines import RecordingError
from topotrain.tools.recording.recorded_workspace import read_on
from topotrain.tools.recording.recording_file import FILE, RecordingFollower

_MOST_DELTAS = 16


@dataclass(frozen=True, slots=True)
class RunUpdate:
    """An update of a page: a whole view, or the changes behind a cursor.

    cursor: of the next update. event: "view" or "delta". text: JSON.
    """

    cursor: int
    event: str
    text: str


class WatchedRun:
    """Follows the recording of a workspace.

    Args:
        workspace: of the job. Its recording may not be there yet.
        runs: the number of runs that the page shows, which it is told with the view.
    """

    def __init__(self, workspace: Path, runs: int = 1) -> None:
        self.workspace, self._runs = workspace, runs
        self._follower, self._history = RecordingFollower(workspace / FILE), JobHistory()
        self._deltas: dict[int, RunUpdate] = {}
        self.problem = ""
        """Why the recording cannot be read any further, as one line."""

    def poll(self) -> None:
        """Read what was recorded since the last call."""
        if self.problem:
            return
        try:
            if read_on(self.workspace, self._follower, self._history):
                self._deltas.clear()
        except (OSError, RecordingError) as error:
            self.problem = f"{self.workspace / FILE}: {error}"

    def view(self) -> RunUpdate:
        """Return the whole view."""
        return self._update("view", self._history.view())

    def delta(self, cursor: int) -> RunUpdate:
        """Return what is new behind a cursor, or the whole view of another job.

        There is another one where a job has begun in the workspace meanwhile.
        """
        # Readers that keep up have the same cursor, so most deltas are made once.
        found = self._deltas.get(cursor)
        if found is None:
            data = self._history.since(cursor)
            found = self._update("view" if data.get("whole") else "delta", data)
            if len(self._deltas) < _MOST_DELTAS:
                self._deltas[cursor] = found
        return found

    def _update(self, event: str, data: dict[str, Any]) -> RunUpdate:
        return RunUpdate(int(data["cursor"]), event, page_json(data | {"runs": self._runs}))

    def summary(self) -> dict[str, Any]:
        """Return the present state of the job."""
        return self._history.summary()

    def process(self, name: str) -> dict[str, Any] | None:
        """Return the entry of a process in the view, or None."""
        processes: list[dict[str, Any]] = self._history.view()["processes"]
        return next((process for process in processes if process["name"] == name), None)

    def close(self) -> None:
        """Close the recording."""
        self._follower.close()
