"""Buffered output of a launcher to its terminal, pipe or file.

The output is no part of the job. A thread per descriptor does the writing, so that a reader that does not read never
blocks the launcher, which has to notice deaths and signals. A slow reader slows the program down: the launcher asks
units to read no more output while too much is buffered (`full`). Output is dropped if its reader has gone or has
stopped reading (a pager, a terminal after Ctrl-S), or the disk is full. The job goes on, and the logs have all of it.
"""

import io
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from rich.console import Console

FULL_BYTES = 1 << 20
"""The number of buffered bytes per descriptor above which the output is full."""
LAST_S = 1.0
"""Seconds to write the remaining output after a signal has ended the job."""
STOPPED_S = 10.0
"""Seconds without a byte taken after which a reader counts as stopped."""
_LOOK_MS = 100
_LARGE = 1 << 18


class OutputQueue:
    """A file descriptor that is written to by its own thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # A regular file is always ready.
        # A descriptor that is ready takes at least PIPE_BUF bytes, so a write of as many does not block.
        self._most = _LARGE if stat.S_ISREG(os.fstat(fd).st_mode) else select.PIPE_BUF
        self._changed = threading.Condition()
        self._buffer = bytearray()
        self.lost = 0
        """The number of bytes that were dropped."""
        self._taken_at = time.monotonic()  # or nothing was there to be taken
        self._over = False
        self._thread = threading.Thread(target=self._live, name="outlet", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """The number of bytes that the descriptor has not taken yet."""
        return len(self._buffer)

    @property
    def stopped(self) -> bool:
        """Whether the reader has taken nothing for long, although there is output."""
        return bool(self._buffer) and time.monotonic() >= self._taken_at + STOPPED_S

    def put(self, data: bytes) -> None:
        """Buffer `data` for writing; beyond FULL_BYTES not for a stopped reader."""
        with self._changed:
            if self.stopped and len(self._buffer) > FULL_BYTES:
                self.lost += len(data)
                return
            if not self._buffer:
                self._taken_at = time.monotonic()
            self._buffer += data
            self._changed.notify_all()

    def empty(self, seconds: float | None) -> None:
        """Wait until all is written, at most so many seconds; None: or the reader stops."""
        until = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while self._buffer and (not self.stopped if until is None else time.monotonic() < until):
                self._changed.wait(_LOOK_MS / 1000)

    def close(self) -> None:
        """End the thread, and drop the output that is still buffered."""
        with self._changed:
            self._over = True
            self.lost += len(self._buffer)
            self._changed.notify_all()
        self._thread.join(LAST_S)

    def _live(self) -> None:
        ready = select.poll()
        ready.register(self._fd, select.POLLOUT)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._buffer or self._over)
                if self._over:
                    return
                # A copy: the buffer grows while this thread writes without the lock.
                piece = bytes(self._buffer[: self._most])
            # A limited wait, so that `close` ends the thread although the reader has stopped.
            if not ready.poll(_LOOK_MS):
                continue
            try:
                done = os.write(self._fd, piece)
            except BlockingIOError:
                continue
            except OSError:
                with self._changed:
                    # The reader is gone, or the disk is full for now: what waits is dropped, and the job goes on.
                    done = len(self._buffer)
                    self.lost += done
            with self._changed:
                # Only now: until it is written, output counts as waiting.
                del self._buffer[:done]
                self._taken_at = time.monotonic()
                self._changed.notify_all()


class StreamWriter:
    """A text file that writes through an `OutputQueue`, else like `file`."""

    def __init__(self, file: IO[str], channel: OutputQueue) -> None:
        self._file, self._channel = file, channel

    @property
    def behind(self) -> bool:
        """Whether some output is still buffered."""
        return bool(self._channel.waiting)

    def write(self, text: str) -> int:
        """Buffer the text for writing; never raises for the reader."""
        self._channel.put(text.encode(getattr(self._file, "encoding", None) or "utf-8", "backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: the queue's thread writes as soon as it can."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class ConsoleOutput:
    """The output queues of a launcher, one per file; it implements `launch.Outlet`."""

    def __init__(self) -> None:
        self._channels: dict[tuple[int, int], OutputQueue] = {}
        self._patient = True

    @property
    def full(self) -> bool:
        """Whether so much is buffered that units should read no more output."""
        return any(channel.waiting > FULL_BYTES and not channel.stopped for channel in self._channels.values())

    def writer(self, file: IO[str]) -> IO[str]:
        """Return a file that writes to `file` through its queue.

        A file without a descriptor is returned as it is.
        """
        try:
            file.flush()
            fd = file.fileno()
            info = os.fstat(fd)
        except (OSError, ValueError):
            return file
        # stdout and stderr are often one file, and their lines must keep their order.
        place = info.st_dev, info.st_ino
        if place not in self._channels:
            self._channels[place] = OutputQueue(fd)
        return StreamWriter(file, self._channels[place])  # type: ignore[return-value]

    def hurry(self) -> None:
        """Limit the wait for readers to LAST_S, because a signal has ended the job."""
        self._patient = False

    def finish(self, log: str) -> None:
        """Wait until all output is taken, and end all threads.

        log: where the program's output is stored as well.
        """
        try:
            for channel in self._channels.values():
                channel.empty(None if self._patient else LAST_S)
        finally:
            # Ctrl-C here, or an earlier signal, ends the wait. The user learns how many bytes are lost.
            for channel in self._channels.values():
                channel.close()
            lost = sum(channel.lost for channel in self._channels.values())
            if lost:
                text = f"{lost:,} bytes of output were not taken by their reader; the program's are all in {log}"
                print(f"topotrain: {text}", file=sys.stderr, flush=True)


@contextmanager
def outlet(terminal: Console, log: str) -> Iterator[ConsoleOutput]:
    """Redirect the terminal's output through a queue for the length of the block.

    The block ends when all output is taken, or its reader stops. Ctrl-C ends the wait, too. After an exception in the
    block it is limited to `LAST_S` seconds.
    """
    made, former = ConsoleOutput(), terminal.file
    terminal.file = made.writer(former)
    try:
        yield made
    except BaseException:
        made.hurry()
        raise
    finally:
        terminal.file = former
        made.finish(log)


def out_of(outlet: ConsoleOutput, chatty: bool) -> IO[str] | None:
    """Return the file for the main worker's stdout; None: that of the console."""
    return outlet.writer(sys.stdout) if chatty else None


class _LossyFile(io.FileIO):
    """A descriptor that drops what it does not take."""

    def write(self, data: Any, /) -> int:
        """Write as much as possible, and report all as written."""
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def lossy_streams() -> None:
    """Let no error of stdout or stderr end this process, which trains."""
    for fd, name in ((1, "stdout"), (2, "stderr")):
        former = getattr(sys, name)
        former.flush()
        raw = io.BufferedWriter(_LossyFile(fd, "w", closefd=False))
        line_by_line = fd == 2 or former.isatty()
        setattr(sys, name, io.TextIOWrapper(raw, former.encoding, "backslashreplace", line_buffering=line_by_line))
