"""The file of a recording: `events.jsonl` in the workspace, only appended to.

* A recording is written by a thread, so that the launcher waits for no disk.
* The samples that are not due in it yet stand in a second, small file, which is replaced.
* A line that cannot be read is left out, such as the last one of a killed launcher.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from threading import Event as Flag
from threading import Lock, Thread
from typing import BinaryIO

from topotrain.config.private_files import make_folder, open_file, open_for_reading, write_text
from topotrain.core.events import NO_NOTICES, Notifier
from topotrain.tools.recording.job_history import JobHistory
from topotrain.tools.recording.recorded_lines import (
    NOT_RECORDED,
    Recorded,
    RecordingEnd,
    RecordingError,
    RecordingHeader,
    TimedEvent,
    from_line,
    to_line,
)
from topotrain.tools.recording.sample_slots import SampleSlots, SeenEvents

FILE, NEWEST = "events.jsonl", "events.newest.jsonl"
WRITE_S = 0.25
_CLOSE_S = 5.0  # for the last lines; the disk may not answer
_MOST_WAITING = 20_000
"""Events that wait for the disk. Of more the oldest ones are dropped."""
_READ_BYTES = 1 << 20
_TICK = 1e-6


class NewestSamples:
    """The file with the samples of a start that are not due in the recording yet.

    path: of the recording.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(NEWEST)
        self._version: tuple[int, int] | None = None

    def write(self, started: float, samples: Sequence[TimedEvent]) -> None:
        """Replace the samples. started: of the header. Raises OSError."""
        temporary = self._path.with_suffix(".tmp")
        write_text(temporary, "".join((json.dumps({"started": started}) + "\n", *map(to_line, samples))))
        os.replace(temporary, self._path)

    def remove(self) -> None:
        """Remove the file; there may be none."""
        self._path.unlink(missing_ok=True)

    def read(self, started: float | None = None) -> list[TimedEvent]:
        """Return the samples if they have changed. started: of the header; None: any."""
        # It is replaced while it is looked at, and goes when the job ends.
        with suppress(OSError, ValueError), os.fdopen(open_for_reading(self._path), errors="replace") as file:
            info = os.fstat(file.fileno())
            version = info.st_ino, info.st_mtime_ns
            if version != self._version:
                first, *lines = file.read().splitlines()
                if started is None or json.loads(first) == {"started": started}:
                    self._version = version
                    return [timed for line in lines if (timed := from_line(line)) is not None]
        return []


class RecordingFile:
    """The file of a recording, which is written without a thread.

    Args:
        path: of the file.
        appends: an existing recording is continued, and not replaced.
    """

    def __init__(self, path: Path, appends: bool = False) -> None:
        make_folder(path.parent)
        if not appends:
            # Another file, and not this one emptied: a follower would take the new lines for later ones.
            path.unlink(missing_ok=True)
        self._fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._broken = os.fstat(self._fd).st_size > 0  # a killed launcher may have left half a line

    def write(self, lines: str) -> None:
        """Append lines. Raises OSError."""
        if not lines:
            return
        data = memoryview((("\n" if self._broken else "") + lines).encode(errors="replace"))
        # Until all of it is written: what follows half a line must begin a new one.
        self._broken = True
        while data:
            data = data[os.write(self._fd, data) :]
        self._broken = False

    def close(self) -> None:
        os.close(self._fd)


class RecordingWriter:
    """Writes the events of a start of a job, and keeps their history, on a thread.

    The file is made with the first event: before it, the workspace may be that of another job.

    Args:
        path: of the file.
        header: of the start. `resumed`: an existing recording is continued.
        clock: returns seconds that never decrease.
        notifier: is told once when the file cannot be written. It is called on the thread of the writer.
        detailed: the history gets all samples, for the curves of exports. Else it gets those of the file and the newest
            ones.
    """

    def __init__(
        self,
        path: Path,
        header: RecordingHeader,
        clock: Callable[[], float],
        notifier: Notifier = NO_NOTICES,
        detailed: bool = False,
    ) -> None:
        self._path, self._clock, self._notifier, self._detailed = path, clock, notifier, detailed
        self.history = JobHistory()
        """With the earlier starts of the job. It has no job before the first event, and is replaced then."""
        self._header, self._newest = header, NewestSamples(path)
        self._began, self._last = clock(), 0.0
        self._waiting: deque[TimedEvent] = deque(maxlen=_MOST_WAITING)
        self._file: RecordingFile | None = None
        self._owed: list[TimedEvent] = []
        """Headers that could not be written yet."""
        self._told = False
        self._closing, self._wakes, self._asked, self._flushed = Flag(), Flag(), Flag(), Flag()
        self._lock = Lock()
        self._thread: Thread | None = None
        self._waiting.append(TimedEvent(0.0, header))

    def write(self, event: Recorded) -> None:
        """Take an event, on any thread. This never waits for the disk."""
        if isinstance(event, NOT_RECORDED) or self._closing.is_set():
            return
        self._put(event)
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = Thread(target=self._run, name="recording", daemon=True)
                    self._thread.start()

    def close(self, code: int | None = None) -> None:
        """Write what is left, and the end of the job."""
        if self._thread is None or self._closing.is_set():
            return
        self._put(RecordingEnd(code))
        self._closing.set()
        self._wakes.set()
        self._thread.join(_CLOSE_S)

    def flush(self, within_s: float = 1.0) -> None:
        """Wait until all events are in the file, but not long."""
        if self._thread is not None and not self._closing.is_set():
            self._flushed.clear()
            self._asked.set()
            self._wakes.set()
            self._flushed.wait(within_s)

    def _put(self, event: Recorded) -> None:
        with self._lock:
            # No two events have the same time: a follower finds its place by it.
            self._last = max(self._clock() - self._began, self._last + _TICK)
            self._waiting.append(TimedEvent(self._last, event))

    def _run(self) -> None:
        history, closes = self._earlier(), False
        slots, known = SampleSlots(history.elapsed_s), -1.0
        while not closes:
            self._wakes.wait(WRITE_S)
            self._wakes.clear()
            closes, asked = self._closing.is_set(), self._asked.is_set()
            self._asked.clear()
            come, due = self._take(slots)
            newest = slots.newest(self._clock() - self._began, whole=asked or closes)
            # Samples that were held when the newest ones were asked for are known already.
            for timed in come if self._detailed else [each for each in (*due, *newest) if each.at > known]:
                history.add(timed)
            known = max((timed.at for timed in newest), default=known)
            # Only now: without its earlier starts the figures of a job are not right.
            self.history = history
            self._append(due, newest)
            if asked:
                self._flushed.set()
        with suppress(OSError):
            self._newest.remove()
        if self._file is not None:
            self._file.close()

    def _take(self, slots: SampleSlots) -> tuple[list[TimedEvent], list[TimedEvent]]:
        """Return what has come since the last call, and what is due in the file."""
        come, due = list[TimedEvent](), list[TimedEvent]()
        while self._waiting:
            timed = self._waiting.popleft()
            come.append(timed)
            due += [*slots.due(timed.at), *slots.add(timed)]
        return come, due + slots.due(self._clock() - self._began)

    def _append(self, due: Sequence[TimedEvent], newest: Sequence[TimedEvent]) -> None:
        lines = [*self._owed, *due]
        # Without its header a recording says nothing.
        self._owed = [timed for timed in lines if isinstance(timed.event, RecordingHeader)]
        try:
            if self._file is None:
                self._file = self._opened()
            self._file.write("".join(map(to_line, lines)))
            self._owed = []
            if newest:
                self._newest.write(self._header.started, newest)
        except OSError as error:
            if not self._told:
                self._told = True
                self._notifier.notify(
                    f"the recording {self._path} cannot be written ({error.strerror}); the job continues"
                )

    def _earlier(self) -> JobHistory:
        """Return the history of what the recording has already."""
        history = JobHistory()
        if self._header.resumed:
            with suppress(OSError, RecordingError), closing(RecordingFollower(self._path)) as follower:
                for timed in follower.poll():
                    history.add(timed)
        return history

    def _opened(self) -> RecordingFile:
        file = RecordingFile(self._path, self._header.resumed)
        # Those of a launcher that was killed.
        left = self._newest.read() if self._header.resumed else []
        file.write("".join(map(to_line, left)))
        self._newest.remove()
        return file


class RecordingFollower:
    """Reads a recording while it is written.

    Args:
        path: of the file, which may not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._half = b""
        """The beginning of a line that has not come whole yet."""
        self._inode = 0
        self._started: float | None = None
        self._seen, self._newest = SeenEvents(), NewestSamples(path)

    def poll(self) -> list[TimedEvent]:
        """Return the events since the last call.

        Raises RecordingError, or OSError but for an absent file.
        """
        found = self._read()
        with suppress(FileNotFoundError):
            if self._file is None or os.stat(self._path).st_ino != self._inode:
                # The former file has had its last line.
                self.close()
                self._open()
                found += self._read()
        found += self._newest.read(self._started)
        return [timed for timed in found if self._seen.is_new(timed)]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        self._file, self._half = os.fdopen(open_for_reading(self._path), "rb"), b""
        self._inode = os.fstat(self._file.fileno()).st_ino

    def _read(self) -> list[TimedEvent]:
        """Return the events of the whole lines that have come."""
        found: list[TimedEvent] = []
        while self._file is not None and (data := self._file.read(_READ_BYTES)):
            *lines, self._half = (self._half + data).split(b"\n")
            found += [timed for line in lines if line and (timed := from_line(line.decode(errors="replace")))]
        for timed in found:
            if isinstance(timed.event, RecordingHeader):
                self._started = timed.event.started
        return found
