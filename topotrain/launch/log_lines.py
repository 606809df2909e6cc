"""Time and name on each line of the logs of processes.

A stamp is inserted where a line begins, and no byte of the program is changed. A progress bar that is redrawn with
carriage returns is one line. Output below Python's streams, such as that of a C library, goes to the log as it is.
"""

import contextlib
import io
import os
import re
import time

_STAMP = re.compile(rb"(?m)^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (?:worker|server) \d+/\d+ \| ")


class LineStamps:
    """Inserts the stamps of one process into its output.

    Args:
        name: of the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._inside = False  # the last output has not ended its line
        self._second, self._date = -1, ""

    def stamped(self, output: bytes, now: float) -> bytes:
        """Return a piece of output with a stamp at the beginning of each line.

        now: seconds since the epoch.
        """
        if not output:
            return output
        stamp, ends = self._stamp(now), output.endswith(b"\n")
        first = b"" if self._inside else stamp
        self._inside = not ends
        # The last newline gets no stamp: the line after it begins with the next piece, at another time.
        return first + output[: -1 if ends else None].replace(b"\n", b"\n" + stamp) + b"\n" * ends

    def _stamp(self, now: float) -> bytes:
        second = int(now)
        if second != self._second:
            # UTC, because the logs of several hosts are read together.
            self._second, self._date = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._date}.{int(now % 1 * 1000):03d}Z {self._name} | ".encode()


def without_stamps(output: bytes) -> bytes:
    """Return the lines of a log as their program has written them."""
    return _STAMP.sub(b"", output)


class StampedFile(io.BufferedIOBase):
    """A log as the buffer of a text stream, with stamps.

    Each write reaches the file at once. It has no buffer, and so no lock: a signal handler may print while the program
    prints.

    Args:
        fd: the descriptor, which is not closed.
        stamps: those of the process.
    """

    def __init__(self, fd: int, stamps: LineStamps) -> None:
        self._fd, self._stamps = fd, stamps

    @property
    def name(self) -> int:
        return self._fd

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        """Write `data`, and drop what a full disk does not take."""
        output = bytes(data)
        left = self._stamps.stamped(output, time.time())
        with contextlib.suppress(OSError):  # a log is no part of the training
            while left:
                # A nearly full disk may take a part only.
                left = left[os.write(self._fd, left) :]
        return len(output)


def text_stream(fd: int, stamps: LineStamps) -> io.TextIOWrapper:
    """Return a text stream that writes line by line, with stamps."""
    return io.TextIOWrapper(StampedFile(fd, stamps), encoding="utf-8", errors="backslashreplace", line_buffering=True)
