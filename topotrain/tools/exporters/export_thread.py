"""The thread of one export."""

from collections import deque
from collections.abc import Sequence
from threading import Event as Flag
from threading import Thread
from time import monotonic
from typing import Protocol

from topotrain.core.events import Notice
from topotrain.tools.exporters.curve_points import CurvePoint, CurveReader
from topotrain.tools.recording.job_history import HistorySource, JobHistory

EVERY_S = 0.5
"""Seconds between two looks at the history."""
END_S = 30.0
"""Seconds that the end of a job waits for its exports to write what is left."""
_LONGEST = 300  # characters of an error


class Export(Protocol):
    """Writes the curves of a job for another tool, on a thread of its own."""

    def start(self, history: JobHistory) -> None:
        """Begin; the history has the job already."""
        ...

    def write(self, points: Sequence[CurvePoint]) -> None:
        """Write what is new, in the order of time."""
        ...

    def end(self, code: int) -> None:
        """End; the job has this exit code."""
        ...


class ExportThread:
    """Calls one export. An exception of the export ends it, and not the job.

    Args:
        name: in notices.
        export: is called from the first event of the job on.
        source: of the history.
        notices: gets what the user should know.
    """

    def __init__(self, name: str, export: Export, source: HistorySource, notices: deque[Notice]) -> None:
        self._name, self._export, self._source, self._notices = name, export, source, notices
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
            ended, reader = False, None
            while not ended:
                ended = self._ended.wait(EVERY_S)
                history = self._source.read()
                if not history.has_job:
                    continue
                if reader is None:
                    reader = CurveReader()
                    self._export.start(history)
                self._export.write(reader.read(history))
            if reader is not None:
                self._export.end(self._code)
        except Exception as error:
            # Errors of trackers may be pages long.
            why = next(iter(str(error).splitlines()), "")[:_LONGEST]
            self._notify(f"has failed: {type(error).__name__}: {why}; the job continues without it")

    def _notify(self, text: str) -> None:
        self._notices.append(Notice("launcher", f"{self._name} {text}"))
