"""The thread of an export, beside the launcher's loop."""

from contextlib import suppress
from queue import Empty, Full, Queue
from threading import Lock, Thread
from time import monotonic
from typing import Protocol

from topotrain.core.events import Event, Notice, Output
from topotrain.tools.recording.job_history import JobHistory
from topotrain.tools.recording.recorded_lines import RecordingHeader, TimedEvent

EVERY_S = 0.5
"""Seconds between two looks at the history."""
MOST_WAITING = 20_000
"""Events that wait for a slow export. Further ones are dropped: counters in events are cumulative."""
END_S = 30.0
"""Seconds that the end of a job waits for an export to write what is left."""
_LONGEST = 300  # characters of an error


class Export(Protocol):
    """Passes the history of a job on to another tool, on a thread of its own."""

    def start(self, history: JobHistory, resumed: bool) -> None:
        """Begin; the history has the job and no events yet.

        resumed: the job goes on from a snapshot.
        """
        ...

    def update(self, history: JobHistory) -> None:
        """Pass on what is new."""
        ...

    def end(self, code: int) -> None:
        """End; the job has this exit code."""
        ...


class ExportThread:
    """Keeps the history of a job for one export.

    An exception of the export ends it, and not the job.

    Args:
        name: of the export, for notices.
        export: what to call.
        header: of the job.
    """

    def __init__(self, name: str, export: Export, header: RecordingHeader) -> None:
        self._name, self._export, self._resumed = name, export, header.resumed
        self._began = monotonic()
        self._queue: Queue[TimedEvent | int] = Queue(MOST_WAITING)
        self._lock, self._notices, self._failed, self._dropped = Lock(), list[Notice](), False, 0
        self._queue.put(TimedEvent(0.0, header))
        self._thread = Thread(target=self._run, name=f"export {name}", daemon=True)
        self._thread.start()

    def put(self, event: Event | RecordingHeader) -> None:
        """Take an event; never waits."""
        if self._failed or isinstance(event, Output):
            return
        try:
            self._queue.put_nowait(TimedEvent(monotonic() - self._began, event))
        except Full:
            self._dropped += 1

    def notices(self) -> list[Notice]:
        """Return what the user should know, once."""
        if not self._notices:
            return []
        with self._lock:
            found, self._notices = self._notices, []
        return found

    def end(self, code: int) -> None:
        """Let the export write what is left; wait for it, but not for ever."""
        until = monotonic() + END_S
        # A queue that stays full is that of an export that stands still, which is said below.
        with suppress(Full):
            self._queue.put(code, timeout=END_S)
        self._thread.join(max(0.0, until - monotonic()))
        if self._thread.is_alive():
            self._notify(f"has not ended {END_S:.0f} s after the job, and is left behind")
        elif self._dropped:
            self._notify(f"was too slow: {self._dropped} events are not in it")

    def _run(self) -> None:
        history, code = JobHistory(), None
        try:
            first = self._queue.get()
            assert isinstance(first, TimedEvent)
            history.add(first)
            self._export.start(history, self._resumed)
            while code is None:
                code = self._fill(history)
                self._export.update(history)
            self._export.end(code)
        except Exception as error:
            self._failed = True
            # Errors of trackers may be pages long.
            why = next(iter(str(error).splitlines()), "")[:_LONGEST]
            self._notify(f"has failed: {type(error).__name__}: {why}; the job continues without it")
            # A launcher that ends the job must not wait for room.
            while code is None:
                item = self._queue.get()
                code = item if isinstance(item, int) else None

    def _fill(self, history: JobHistory) -> int | None:
        """Add the events of the next EVERY_S; return the exit code at the end."""
        until = monotonic() + EVERY_S
        while (left := until - monotonic()) > 0:
            try:
                item = self._queue.get(timeout=left)
            except Empty:
                break
            if isinstance(item, int):
                return item
            history.add(item)
        return None

    def _notify(self, text: str) -> None:
        with self._lock:
            self._notices.append(Notice("launcher", f"{self._name} {text}"))
