"""The thread of one export."""

from collections import deque
from threading import Event as Flag
from threading import Thread
from time import monotonic
from typing import Protocol

from topotrain.core.events import Notice
from topotrain.tools.recording.job_history import JobHistory

EVERY_S = 0.5
"""Seconds between two looks at the history."""
END_S = 30.0
"""Seconds that the end of a job waits for its exports to write what is left."""
_LONGEST = 300  # characters of an error


class Export(Protocol):
    """Passes the history of a job on to another tool, on a thread of its own."""

    def start(self, history: JobHistory) -> None:
        """Begin; the history has the job already."""
        ...

    def update(self, history: JobHistory) -> None:
        """Pass on what is new."""
        ...

    def end(self, code: int) -> None:
        """End; the job has this exit code."""
        ...


class KeptHistory(Protocol):
    """Keeps the history of a job, which has no job before the first event."""

    @property
    def history(self) -> JobHistory: ...


class ExportThread:
    """Calls one export. An exception of the export ends it, and not the job.

    Args:
        name: in notices.
        export: is called from the first event of the job on.
        kept: the history.
        notices: gets what the user should know.
    """

    def __init__(self, name: str, export: Export, kept: KeptHistory, notices: deque[Notice]) -> None:
        self._name, self._export, self._kept, self._notices = name, export, kept, notices
        self._ended, self._code = Flag(), 0
        self._thread = Thread(target=self._run, name=f"export {name}", daemon=True)
        self._thread.start()

    def end(self, code: int) -> None:
        """Let the export end; the history is complete."""
        self._code = code
        self._ended.set()

    def join(self, until: float) -> None:
        """Wait for the end of the export, but not longer than that."""
        self._thread.join(max(0.0, until - monotonic()))
        if self._thread.is_alive():
            self._notify(f"has not ended {END_S:.0f} s after the job, and is left behind")

    def _run(self) -> None:
        try:
            ended = has_begun = False
            while not ended:
                ended = self._ended.wait(EVERY_S)
                history = self._kept.history
                if history.has_job:
                    if not has_begun:
                        self._export.start(history)
                        has_begun = True
                    self._export.update(history)
            if has_begun:
                self._export.end(self._code)
        except Exception as error:
            # Errors of trackers may be pages long.
            why = next(iter(str(error).splitlines()), "")[:_LONGEST]
            self._notify(f"has failed: {type(error).__name__}: {why}; the job continues without it")

    def _notify(self, text: str) -> None:
        self._notices.append(Notice("launcher", f"{self._name} {text}"))
