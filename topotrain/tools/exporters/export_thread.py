"""The threads of exports: one for their history, and one for each export."""

from collections import deque
from collections.abc import Mapping
from threading import Event as Flag
from threading import Thread
from time import monotonic
from typing import Protocol

from topotrain.core.events import Notice, Output
from topotrain.tools.recording.job_history import JobHistory
from topotrain.tools.recording.recorded_lines import Recorded, RecordingEnd, RecordingHeader, TimedEvent

EVERY_S = 0.5
"""Seconds between two looks at the history."""
MOST_WAITING = 20_000
"""Events that wait to be added to the history. Of more the oldest ones are dropped: counters are cumulative."""
END_S = 30.0
"""Seconds that the end of a job waits for its exports to write what is left."""
_LONGEST = 300  # characters of an error


class Export(Protocol):
    """Passes the history of a job on to another tool, on a thread of its own."""

    def start(self, history: JobHistory, resumed: bool) -> None:
        """Begin; the history has the job already.

        resumed: the job goes on from a snapshot.
        """
        ...

    def update(self, history: JobHistory) -> None:
        """Pass on what is new."""
        ...

    def end(self, code: int) -> None:
        """End; the job has this exit code."""
        ...


class ExportThreads:
    """Keeps one history of a job for all its exports.

    An export that is slow finds fewer points of the older parts of curves, and delays neither the job nor the others.

    Args:
        exports: by their names in notices.
        header: of the job.
    """

    def __init__(self, exports: Mapping[str, Export], header: RecordingHeader) -> None:
        self._began, self._history = monotonic(), JobHistory()
        self._history.add(TimedEvent(0.0, header))
        self._waiting: deque[TimedEvent] = deque(maxlen=MOST_WAITING)
        self._closing, self._notices = Flag(), deque[Notice]()
        self._threads = [
            _ExportThread(name, export, self._history, header.resumed, self._notices)
            for name, export in exports.items()
        ]
        self._thread = Thread(target=self._run, name="history of exports", daemon=True)
        self._thread.start()

    def put(self, event: Recorded) -> None:
        """Take an event; never waits."""
        if not isinstance(event, Output):
            self._waiting.append(TimedEvent(monotonic() - self._began, event))

    def notices(self) -> list[Notice]:
        """Return what the user should know, once."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def end(self, code: int) -> None:
        """Let the exports write what is left; wait for them, but not for ever."""
        until = monotonic() + END_S
        # The end lets the history give the last points of its curves.
        self.put(RecordingEnd(code))
        self._closing.set()
        self._thread.join()
        for thread in self._threads:
            thread.end(code)
        for thread in self._threads:
            thread.join(until)

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(EVERY_S / 2)
            while self._waiting:
                self._history.add(self._waiting.popleft())


class _ExportThread:
    """Calls one export. An exception of the export ends it, and not the job.

    notices: gets what the user should know.
    """

    def __init__(self, name: str, export: Export, history: JobHistory, resumed: bool, notices: deque[Notice]) -> None:
        self._name, self._export, self._history, self._resumed = name, export, history, resumed
        self._notices = notices
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
            self._export.start(self._history, self._resumed)
            ended = False
            while not ended:
                ended = self._ended.wait(EVERY_S)
                self._export.update(self._history)
            self._export.end(self._code)
        except Exception as error:
            # Errors of trackers may be pages long.
            why = next(iter(str(error).splitlines()), "")[:_LONGEST]
            self._notify(f"has failed: {type(error).__name__}: {why}; the job continues without it")

    def _notify(self, text: str) -> None:
        self._notices.append(Notice("launcher", f"{self._name} {text}"))
