"""Text between processes, without ever waiting: what is there is read, what does not fit is kept.

Rule: descriptors are non-blocking and belong to whoever made them; here they are read and written, never closed.
"""

import codecs
import fcntl
import os
import signal
import sys
import termios
from dataclasses import dataclass, field
from pathlib import Path

from topotrain.config.private_files import open_for_reading

_LOG_TAIL_BYTES = 4000


@dataclass(slots=True)
class LineReader:
    """Reads lines from a descriptor. `open` is False after its end; `rest` is what has no newline yet."""

    fd: int
    rest: bytes = b""
    open: bool = True

    def read(self) -> list[bytes] | None:
        """The whole lines that are there now, without their newline; None when nothing is there (any more)."""
        data = _read(self.fd)
        self.open = data != b""
        if not data:
            return None
        *lines, self.rest = (self.rest + data).split(b"\n")
        return lines

    def drain(self) -> list[bytes]:
        """All whole lines until nothing is there, and at the end what has no newline."""
        found: list[bytes] = []
        while (lines := self.read()) is not None:
            found += lines
        if self.rest and not self.open:
            found, self.rest = [*found, self.rest], b""
        return found


class OutputReader:
    """Reads a program's output as it comes: a progress bar has no newlines, and nothing may be added to a pipe.

    `text` turns the pieces into text, also where a piece ends inside a character.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.open = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> list[bytes] | None:
        """What is there now, in one piece; None when nothing is there (any more)."""
        data = _read(self.fd)
        self.open = data != b""
        return [data] if data else None

    def drain(self) -> list[bytes]:
        """Everything that is there at this moment: a process that was left behind may write on and on."""
        found: list[bytes] = []
        there = int.from_bytes(fcntl.ioctl(self.fd, termios.FIONREAD, bytes(4)), sys.byteorder)
        while there > 0 and (pieces := self.read()) is not None:
            found += pieces
            there -= sum(map(len, pieces))
        return found

    def text(self, piece: bytes) -> str:
        """The characters that are complete with this piece."""
        return self._decoder.decode(piece)


def _read(fd: int) -> bytes | None:
    """What is there now: None for nothing yet, b"" for the end (also of a descriptor that can no longer be read)."""
    try:
        return os.read(fd, 65536)
    except BlockingIOError:
        return None
    except OSError:
        return b""


@dataclass(slots=True)
class LineWriter:
    """Writes lines to a descriptor as it takes them."""

    fd: int
    waiting: bytearray = field(default_factory=bytearray)

    def put(self, line: bytes) -> None:
        """Queue a line and write what can be written."""
        self.waiting += line + b"\n"
        self.write()

    def write(self) -> None:
        """Write on; whatever is meant for a reader that is gone is dropped."""
        try:
            del self.waiting[: os.write(self.fd, self.waiting)]
        except BlockingIOError:
            pass
        except OSError:
            self.waiting.clear()


def log_tail(path: Path) -> str:
    """The last lines of a log file: what a process said before it died."""
    try:
        with os.fdopen(open_for_reading(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def ending(code: int) -> str:
    """ "was killed by SIGKILL" for -9, "ended with exit code 3" for 3."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
