"""An export of a job's curves, and the thread that calls it."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Event as Flag
from threading import Thread
from time import monotonic
from typing import Any, Protocol

from topotrain.core.events import Notice
from topotrain.tools.recording.job_history import HistorySource, HistoryStart, JobHistory

EVERY_S = 0.5
"""Seconds between two looks at the history."""
END_S = 30.0
"""Seconds that the end of a job waits for its exports to write what is left."""
_LONGEST = 300  # characters of an error


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A value of a curve.

    time: seconds since 1970. step: of a worker; for a server, the version of its values. process: a worker, a server
    or a group, or "job". name: such as "loss" or "log:accuracy". value: NaN for any number that is not finite.
    """

    time: float
    step: int
    process: str
    name: str
    value: float

    @property
    def has_worker_step(self) -> bool:
        """Whether `step` counts steps of workers, and not versions of a server."""
        return not self.process.startswith("server ")

    @property
    def tag(self) -> str:
        """The name of the curve, such as "loss/group 0"."""
        # Tools show names with equal beginnings together.
        return f"{self.name.replace(':', '/')}/{self.process}"


class CurveExport(Protocol):
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

    def __init__(self, name: str, export: CurveExport, source: HistorySource, notices: deque[Notice]) -> None:
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
            self._follow()
        except Exception as error:
            # Errors of trackers may be pages long.
            why = next(iter(str(error).splitlines()), "")[:_LONGEST]
            self._notify(f"has failed: {type(error).__name__}: {why}; the job continues without it")

    def _follow(self) -> None:
        ended, cursor = False, None
        while not ended:
            ended = self._ended.wait(EVERY_S)
            history = self._source.read()
            if not history.has_job:
                continue
            if cursor is None:
                # The curves of earlier starts are written already.
                cursor = history.start.cursor
                self._export.start(history)
            delta = history.since(cursor)
            cursor = delta["cursor"]
            self._export.write(sorted(_points(delta, history.start), key=lambda point: point.time))
        if cursor is not None:
            self._export.end(self._code)

    def _notify(self, text: str) -> None:
        self._notices.append(Notice("launcher", f"{self._name} {text}"))


def _points(delta: dict[str, Any], start: HistoryStart) -> Iterator[CurvePoint]:
    for series in delta["series"]:
        for at, step, value in series["points"]:
            number = math.nan if value is None else float(value)
            yield CurvePoint(start.time + at - start.at, int(step), series["of"], series["metric"], number)
