"""The file of a recording, `events.jsonl` in the workspace, and its readers.

* It is only appended to. The samples that are not due in it yet stand in a second, small file, which is replaced.
* A line that cannot be read is left out, such as the last one of a killed launcher.
* A sample is an event of which a later one of the same process tells the same of a later time.
"""

import json
import os
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from topotrain.config.job import ConfigError
from topotrain.config.private_files import make_folder, open_file, open_for_reading, write_text
from topotrain.launch.agent.file_locks import is_held
from topotrain.tools.recording.job_history import JobHistory
from topotrain.tools.recording.recorded_lines import RecordingError, RecordingHeader, TimedEvent, from_line, to_line

FILE, NEWEST = "events.jsonl", "events.newest.jsonl"
QUIET_S = 15.0
"""Seconds without a line after which a job without a launcher on this host is lost."""
_READ_BYTES = 1 << 20

Key = tuple[Hashable, ...]


def sample_key(timed: TimedEvent) -> Key:
    """Return the key of an event: a later sample stands for earlier ones of its key."""
    event = timed.event
    values, loss = getattr(event, "values", None), getattr(event, "loss", None)
    names = sorted(map(str, values)) if isinstance(values, Mapping) else ()
    # Others of its kind may lack them.
    parts = (*names, *(("loss",) if loss is not None else ()))
    return (type(event).__name__, getattr(event, "who", ""), parts)


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


class SeenEvents:
    """The time of the last event of each kind and process, from two files."""

    def __init__(self) -> None:
        self._started: float | None = None
        self._at: dict[Key, float] = {}

    def is_new(self, timed: TimedEvent) -> bool:
        """Note an event; return whether it is later than those of its kind so far."""
        event, key = timed.event, sample_key(timed)
        if isinstance(event, RecordingHeader) and event.started != self._started:
            self._started, self._at = event.started, {}
        new = timed.at > self._at.get(key, -1.0)
        if new:
            self._at[key] = timed.at
        return new


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
