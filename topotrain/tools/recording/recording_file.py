"""The file of a recording: `events.jsonl` in the workspace.

* A recording is written by a thread, so that the launcher waits for no disk.
* A file that is too large is written again without most of its old samples, and replaced. A follower notices that.
* A line that cannot be read is left out, such as the last one of a killed launcher.
"""

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from threading import Event as Flag
from threading import Lock, Thread
from typing import BinaryIO, Protocol

from topotrain.config.private_files import make_folder, open_file, open_for_reading
from topotrain.core.events import NO_NOTICES, Notifier
from topotrain.tools.recording.recorded_lines import (
    NOT_RECORDED,
    Recorded,
    RecordingEnd,
    RecordingHeader,
    TimedEvent,
    from_line,
    to_line,
)
from topotrain.tools.recording.recording_thinning import SampleSlots, described, thinned

FILE = "events.jsonl"
LIMIT_BYTES = 16 << 20
"""A larger file is thinned to half of this."""
WRITE_S = 0.25
_CLOSE_S = 5.0  # for the last lines; the disk may not answer
_MOST_WAITING = 20_000
"""Events that wait for the disk. Of more the oldest ones are dropped."""
_READ_BYTES = 1 << 20
_TICK = 1e-6


class RecordingClock(Protocol):
    """Returns seconds that never decrease."""

    def __call__(self) -> float: ...


class RecordingFile:
    """The file of a recording, which is written without a thread.

    Args:
        path: of the file.
        appends: an existing recording is continued, and not replaced.
        limit: bytes; a larger file is thinned.
    """

    def __init__(self, path: Path, appends: bool = False, limit: int = LIMIT_BYTES) -> None:
        self._path, self._limit = path, limit
        make_folder(path.parent)
        if not appends:
            # Another file, and not this one emptied: a follower would take the new lines for later ones.
            path.unlink(missing_ok=True)
        self._fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._size = os.fstat(self._fd).st_size
        self._broken = self._size > 0  # a killed launcher may have left half a line

    @property
    def size(self) -> int:
        """The bytes in the file."""
        return self._size

    def write(self, lines: str) -> None:
        """Append lines, and thin the file if it has become too large. Raises OSError."""
        if not lines:
            return
        data = memoryview((("\n" if self._broken else "") + lines).encode(errors="replace"))
        # Until all of it is written: what follows half a line must begin a new one.
        self._broken = True
        while data:
            count = os.write(self._fd, data)
            self._size += count
            data = data[count:]
        self._broken = False
        if self._size > self._limit:
            self._thin()

    def _thin(self) -> None:
        """Replace the file by one with fewer old samples."""
        with os.fdopen(open_for_reading(self._path), encoding="utf-8", errors="replace") as file:
            lines = file.readlines()
        kept = thinned(described(lines), self._limit // 2)
        temporary = self._path.with_suffix(".tmp")
        fd = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        try:
            data = memoryview("".join(lines[index] for index in kept).encode(errors="replace"))
            size = len(data)
            while data:
                data = data[os.write(fd, data) :]
            os.replace(temporary, self._path)
        except BaseException:
            os.close(fd)
            temporary.unlink(missing_ok=True)
            raise
        os.close(self._fd)
        self._fd, self._size = fd, size

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class RecordingWriter:
    """Writes the events of a start of a job, on a thread of its own.

    The file is made with the first event: before it, the workspace may be that of another job.

    Args:
        path: of the file.
        header: of the start. `resumed`: an existing recording is continued.
        clock: gives the time.
        notifier: is told once when the file cannot be written. It is called on the thread of the writer.
        limit: see `RecordingFile`.
    """

    def __init__(
        self,
        path: Path,
        header: RecordingHeader,
        clock: RecordingClock,
        notifier: Notifier = NO_NOTICES,
        limit: int = LIMIT_BYTES,
    ) -> None:
        self._path, self._clock, self._notifier, self._limit = path, clock, notifier, limit
        self._appends = header.resumed
        self._began, self._last = clock(), 0.0
        self._waiting: deque[TimedEvent] = deque(maxlen=_MOST_WAITING)
        self._slots, self._file = SampleSlots(), None  # type: tuple[SampleSlots, RecordingFile | None]
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
        while not self._closing.is_set():
            self._wakes.wait(WRITE_S)
            self._wakes.clear()
            asked = self._asked.is_set()
            self._asked.clear()
            self._drain(whole=asked)
            if asked:
                self._flushed.set()
        self._drain(whole=True)
        if self._file is not None:
            self._file.close()

    def _drain(self, whole: bool) -> None:
        """Write what has come since the last call; whole: also samples that are held."""
        found: list[TimedEvent] = []
        while self._waiting:
            timed = self._waiting.popleft()
            found += [*self._slots.due(timed.at), *self._slots.add(timed)]
        found += self._slots.flush() if whole else self._slots.due(self._clock() - self._began)
        try:
            if self._file is None:
                self._file = RecordingFile(self._path, self._appends, self._limit)
            self._file.write("".join(map(to_line, found)))
        except OSError as error:
            # Without its header a recording says nothing.
            headers = [timed for timed in found if isinstance(timed.event, RecordingHeader)]
            self._waiting.extendleft(reversed(headers))
            if not self._told:
                self._told = True
                self._notifier.notify(
                    f"the recording {self._path} cannot be written ({error.strerror}); the job continues"
                )


def read_recording(path: Path) -> Iterator[TimedEvent]:
    """Yield the events of a recording. Raises RecordingError, or OSError."""
    with os.fdopen(open_for_reading(path), "rb") as file:
        lines = _Lines(file)
        while chunk := lines.read():
            yield from _events(chunk)


class RecordingFollower:
    """Reads a recording while it is written.

    Args:
        path: of the file, which may not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: _Lines | None = None
        self._inode = 0
        self._started: float | None = None
        self._at = -1.0

    def poll(self) -> list[TimedEvent]:
        """Return the events since the last call.

        Raises RecordingError, or OSError but for an absent file.
        """
        try:
            now = os.stat(self._path)
        except FileNotFoundError:
            return self._read()
        if self._lines is not None and now.st_ino == self._inode:
            return self._read()
        # The former file has had its last line, and may have some that are not read yet.
        found = self._read()
        self.close()
        found += self._follow(self._open())
        return found

    def close(self) -> None:
        """Close the file."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _open(self) -> "_Lines":
        file = os.fdopen(open_for_reading(self._path), "rb")
        self._inode = os.fstat(file.fileno()).st_ino
        self._lines = _Lines(file)
        return self._lines

    def _follow(self, lines: "_Lines") -> list[TimedEvent]:
        """Return the events of another file that come behind the last one that is known."""
        found = []
        while chunk := lines.read():
            found += list(_events(chunk))
        starts = [timed.event.started for timed in found if isinstance(timed.event, RecordingHeader)]
        if self._started in starts:
            found = list(self._behind(found))
        self._note(found)
        return found

    def _behind(self, events: list[TimedEvent]) -> Iterator[TimedEvent]:
        known, started = False, None
        for timed in events:
            if isinstance(timed.event, RecordingHeader):
                # Starts in front of the one that is known are known, too.
                known = known or started == self._started
                started = timed.event.started
            if (started == self._started and timed.at > self._at) or (known and started != self._started):
                yield timed

    def _read(self) -> list[TimedEvent]:
        found: list[TimedEvent] = []
        while self._lines is not None and (chunk := self._lines.read()):
            found += list(_events(chunk))
        self._note(found)
        return found

    def _note(self, events: list[TimedEvent]) -> None:
        for timed in events:
            if isinstance(timed.event, RecordingHeader):
                self._started = timed.event.started
            self._at = timed.at


class _Lines:
    """Whole lines of a file that grows."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._half = file, b""

    def read(self) -> list[bytes]:
        """Return the next lines; none at the end of the file."""
        while data := self._file.read(_READ_BYTES):
            *lines, self._half = (self._half + data).split(b"\n")
            if lines:
                return lines
        return []

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _events(lines: list[bytes]) -> Iterator[TimedEvent]:
    for line in lines:
        timed = from_line(line.decode(errors="replace")) if line else None
        if timed is not None:
            yield timed
