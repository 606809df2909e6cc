"""Buffered output of a launcher to its terminal, pipe or file.

A reader that stops reading (a pager, a terminal after Ctrl-S) blocks the program's `print`, as under plain `python`. It
must not block the launcher, which has to notice deaths and signals. So a thread per descriptor does the writing, and
the launcher asks units to read no more output while too much is buffered (`full`).
"""

import os
import select
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from rich.console import Console

FULL_BYTES = 1 << 20
"""The number of buffered bytes per descriptor above which the output is full."""
LAST_S = 1.0
"""Seconds to write the remaining output after a signal has ended the job."""
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
        self._error: OSError | None = None
        self._over = False
        self._thread = threading.Thread(target=self._live, name="outlet", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """The number of bytes that the descriptor has not taken yet."""
        return len(self._buffer)

    def put(self, data: bytes) -> None:
        """Buffer `data` for writing. Raises the OSError of an earlier failed write."""
        with self._changed:
            # The error is raised once, where the next output is written, as a direct write would have done.
            error, self._error = self._error, None
            if error is not None:
                raise error
            self._buffer += data
            self._changed.notify_all()

    def empty(self, seconds: float | None) -> int:
        """Wait, at most so many seconds, until all is written; return the bytes left."""
        with self._changed:
            self._changed.wait_for(lambda: not self._buffer, seconds)
            return len(self._buffer)

    def close(self) -> None:
        """End the thread, and drop the output that is still buffered."""
        with self._changed:
            self._over = True
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
            except OSError as error:
                with self._changed:
                    # The reader is gone, so all output is dropped, and waiting threads go on.
                    self._error, done = error, len(self._buffer)
            with self._changed:
                # Only now: until it is written, output counts as waiting.
                del self._buffer[:done]
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
        """Buffer the text for writing. Raises OSError, such as BrokenPipeError."""
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
        return any(channel.waiting > FULL_BYTES for channel in self._channels.values())

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
            self._wait(None if self._patient else LAST_S)
        except KeyboardInterrupt:
            self._patient = False
            raise
        finally:
            # Ctrl-C here, or an earlier signal, ends the wait. The user learns how many bytes are lost.
            left = 0 if self._patient else self._wait(0.0)
            for channel in self._channels.values():
                channel.close()
            if left:
                text = f"{left:,} bytes of output were not taken by their reader; the program's are all in {log}"
                print(f"topotrain: {text}", file=sys.stderr, flush=True)

    def _wait(self, seconds: float | None) -> int:
        return sum([channel.empty(seconds) for channel in self._channels.values()])


@contextmanager
def outlet(terminal: Console, log: str) -> Iterator[ConsoleOutput]:
    """Redirect the terminal's output through a queue for the length of the block.

    The block ends when all output is taken. Ctrl-C ends the wait for a reader that does not read. After an exception in
    the block the wait is limited to `LAST_S` seconds.
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
