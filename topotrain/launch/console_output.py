"""What a launcher prints, kept until its terminal, pipe or file takes it.

Rule: a reader that stops reading (a pager, a terminal after Ctrl-S) stops the program's `print`, as under plain
`python`, and never the launcher, which must hear deaths and signals. So a thread for each descriptor does the writing,
and the launcher asks units to read no more output while too much is kept (`full`). Nothing is dropped without a word.
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
"""Of what is kept for one descriptor."""
LAST_S = 1.0
"""For what is left when a signal has ended the job."""
_LOOK_MS = 100
_LARGE = 1 << 18


class OutputQueue:
    """A descriptor that is written to by a thread of its own.

    A descriptor that can take something takes at least `select.PIPE_BUF` bytes, so that no write waits.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._most = _LARGE if stat.S_ISREG(os.fstat(fd).st_mode) else select.PIPE_BUF
        self._changed = threading.Condition()
        self._kept = bytearray()
        self._error: OSError | None = None
        self._over = False
        self._thread = threading.Thread(target=self._live, name="outlet", daemon=True)
        self._thread.start()

    @property
    def kept(self) -> int:
        """Bytes that the descriptor has not taken yet."""
        return len(self._kept)

    def put(self, data: bytes) -> None:
        """Keep these until they are taken. Raises the OSError that an earlier write has met."""
        with self._changed:
            error, self._error = self._error, None
            if error is not None:
                raise error
            self._kept += data
            self._changed.notify_all()

    def empty(self, seconds: float | None) -> int:
        """Wait until all is taken, so long at most (None: without an end); returns the bytes that are left."""
        with self._changed:
            self._changed.wait_for(lambda: not self._kept, seconds)
            return len(self._kept)

    def close(self) -> None:
        """End the thread; what is still kept is dropped."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join(LAST_S)

    def _live(self) -> None:
        ready = select.poll()
        ready.register(self._fd, select.POLLOUT)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._kept or self._over)
                if self._over:
                    return
                piece = bytes(self._kept[: self._most])
            if not ready.poll(_LOOK_MS):
                continue
            try:
                done = os.write(self._fd, piece)
            except BlockingIOError:
                continue
            except OSError as error:
                with self._changed:
                    self._error, done = error, len(self._kept)
            with self._changed:
                del self._kept[:done]
                self._changed.notify_all()


class StreamWriter:
    """A text file over a channel, for what writes to `file`; all else of it is the file's."""

    def __init__(self, file: IO[str], channel: OutputQueue) -> None:
        self._file, self._channel = file, channel

    @property
    def behind(self) -> bool:
        """Something was not taken yet."""
        return bool(self._channel.kept)

    def write(self, text: str) -> int:
        """Keep the text until it is taken. Raises OSError, such as BrokenPipeError."""
        self._channel.put(text.encode(getattr(self._file, "encoding", None) or "utf-8", "backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """It is written as soon as it can be."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class ConsoleOutput:
    """The channels of a launcher, one for each file that it prints to; see `launch.ConsoleOutput`."""

    def __init__(self) -> None:
        self._channels: dict[tuple[int, int], OutputQueue] = {}
        self._patient = True

    @property
    def full(self) -> bool:
        """So much is kept that no more output is to come."""
        return any(channel.kept > FULL_BYTES for channel in self._channels.values())

    def writer(self, file: IO[str]) -> IO[str]:
        """A file to print to instead; `file` itself where it has no descriptor. Two of one file keep their order."""
        try:
            file.flush()
            fd = file.fileno()
            info = os.fstat(fd)
        except (OSError, ValueError):
            return file
        place = info.st_dev, info.st_ino
        if place not in self._channels:
            self._channels[place] = OutputQueue(fd)
        return StreamWriter(file, self._channels[place])  # type: ignore[return-value]

    def hurry(self) -> None:
        """A signal has ended the job: what is not taken within a moment is dropped, and that is told."""
        self._patient = False

    def finish(self, log: str) -> None:
        """Wait until all is taken, and end all threads. log: where the program's output is, too."""
        try:
            self._wait(None if self._patient else LAST_S)
        except KeyboardInterrupt:
            self._patient = False
            raise
        finally:
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
    """An outlet that the terminal prints through as long as the block lasts; then all is taken.

    Ctrl-C ends the wait for a reader that does not read, and so does an exception of the block after a moment.
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
    """Where the main worker's stdout goes; None: wherever the console writes."""
    return outlet.writer(sys.stdout) if chatty else None
