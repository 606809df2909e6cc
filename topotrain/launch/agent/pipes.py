"""Non-blocking pipes: read available data, and buffer what cannot be written yet.

Descriptors are non-blocking and belong to their creators. This module reads and writes them, and never closes them.
"""

import codecs
import fcntl
import os
import select
import signal
import sys
import termios
import time
from dataclasses import dataclass, field
from pathlib import Path

from topotrain.config.private_files import open_for_reading
from topotrain.launch.log_lines import without_stamps

_LOG_TAIL_BYTES = 4000


@dataclass(slots=True)
class LineReader:
    """Reads lines from a descriptor.

    open: False after the end of file. rest: the data after the last newline.
    """

    fd: int
    rest: bytes = b""
    open: bool = True

    def read(self) -> list[bytes] | None:
        """Return the complete lines that are available; None without any data."""
        data = _read(self.fd)
        self.open = data != b""
        if not data:
            return None
        *lines, self.rest = (self.rest + data).split(b"\n")
        return lines

    def drain(self) -> list[bytes]:
        """Return all available lines, at the end of file with an incomplete last one."""
        found: list[bytes] = []
        while (lines := self.read()) is not None:
            found += lines
        if self.rest and not self.open:
            found, self.rest = [*found, self.rest], b""
        return found


class OutputReader:
    """Reads a program's output as it comes.

    `text` decodes the pieces, even where a piece ends inside a character.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.open = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> list[bytes] | None:
        """Return the available output as one piece; None without any."""
        data = _read(self.fd)
        self.open = data != b""
        # Not split into lines: a progress bar has no newlines.
        return [data] if data else None

    def drain(self) -> list[bytes]:
        """Return the output that is in the pipe at this moment."""
        found: list[bytes] = []
        # FIONREAD: the number of bytes in the pipe now. An orphan of the program may keep writing, so reading until the
        # pipe is empty could take forever.
        there = int.from_bytes(fcntl.ioctl(self.fd, termios.FIONREAD, bytes(4)), sys.byteorder)
        while there > 0 and (pieces := self.read()) is not None:
            found += pieces
            there -= sum(map(len, pieces))
        return found

    def text(self, piece: bytes) -> str:
        """Return the characters that are complete with this piece."""
        return self._decoder.decode(piece)


def _read(fd: int) -> bytes | None:
    """Return the available data: None for nothing yet, b"" for the end."""
    try:
        return os.read(fd, 65536)
    except BlockingIOError:
        return None
    except OSError:
        # A descriptor that can no longer be read counts as ended.
        return b""


@dataclass(slots=True)
class LineWriter:
    """Writes lines to a descriptor as fast as it takes them."""

    fd: int
    waiting: bytearray = field(default_factory=bytearray)

    def put(self, line: bytes) -> None:
        """Queue a line, and write as much as possible."""
        self.waiting += line + b"\n"
        self.write()

    def write(self) -> None:
        """Write as much as possible."""
        if not self.waiting:
            return
        try:
            # A pipe may take a part of the data.
            del self.waiting[: os.write(self.fd, self.waiting)]
        except BlockingIOError:
            pass
        except OSError:
            # The reader is gone, and its end is noticed elsewhere.
            self.waiting.clear()

    def flush(self, seconds: float) -> None:
        """Write all waiting lines, for at most so many seconds."""
        writable, until = select.poll(), time.monotonic() + seconds
        writable.register(self.fd, select.POLLOUT)
        while self.waiting and (left_s := until - time.monotonic()) > 0:
            writable.poll(1000 * left_s)
            self.write()


def log_tail(path: Path) -> str:
    """Return the end of a log file, without stamps; "" if it cannot be read."""
    try:
        with os.fdopen(open_for_reading(path), "rb") as file:
            # The cut may be inside a character, which `errors` then replaces.
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
            return without_stamps(file.read()).decode(errors="replace")
    except OSError:
        return ""


def ending(code: int) -> str:
    """Describe an exit code: "was killed by SIGKILL" for -9."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
