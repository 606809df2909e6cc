"""The reading end of a stream of frames.

Small parts go through a small buffer, payloads directly into their final place.

Reading ahead never goes beyond READ_AHEAD bytes. So a header and the fields after it cost one system call, and at most
these few bytes of a payload are copied a second time.
"""

import os
import socket
import struct
from collections import deque

from topotrain.comm.transport.frame import HEADER_BYTES, Header
from topotrain.comm.transport.multi_socket import Channel
from topotrain.core.message_limits import ProtocolError

READ_AHEAD = 4096
_FD = struct.calcsize("i")
_MAX_FDS = 8


class EndOfStream(Exception):
    """The stream ended in the middle of a frame."""


class FrameReader:
    """Reads a socket, and with `with_fds` also file descriptors (see `pop_fd`)."""

    def __init__(self, sock: Channel, with_fds: bool) -> None:
        self._sock = sock
        self._with_fds = with_fds
        self._fds: deque[int] = deque()
        self._buffer = memoryview(bytearray(READ_AHEAD))
        self._at = self._end = 0
        self._number = 0  # of the last frame

    def wait(self) -> bool:
        """Wait for the beginning of a frame; False when the stream ends between frames."""
        return self._at < self._end or self._more()

    def frame(self, generation: int) -> tuple[Header, bytes]:
        """Return the header and the meta of the next frame; its payload comes next.

        Raises:
            ProtocolError: it is no frame, or of an older generation, or a frame before it is missing.
            EndOfStream: the stream ended within it.
        """
        header = Header.unpack(self.read(HEADER_BYTES))
        self._number += 1
        if header.generation < generation:
            raise ProtocolError(f"FENCED: a frame of generation {header.generation}, we are in {generation}")
        if header.number != self._number:
            raise ProtocolError(f"frame number {header.number} where {self._number} was due")
        return header, self.read(header.meta)

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes (the caller has bounded it). Raises EndOfStream."""
        if size > READ_AHEAD:
            whole = bytearray(size)
            self.read_into(memoryview(whole))
            return bytes(whole)
        while self._end - self._at < size:
            if not self._more():
                raise EndOfStream("the stream ended in the middle of a frame")
        self._at += size
        return bytes(self._buffer[self._at - size : self._at])

    def read_into(self, target: memoryview) -> None:
        """Receive exactly `target`. Raises EndOfStream."""
        ready = min(len(target), self._end - self._at)
        target[:ready] = self._buffer[self._at : self._at + ready]
        self._at += ready
        while ready < len(target):
            # All in one call: each return to Python would wait for the interpreter, which a busy script holds.
            count = self._sock.recv_into(target[ready:], 0, socket.MSG_WAITALL)
            if not count:
                raise EndOfStream("the stream ended in the middle of a payload")
            ready += count

    @property
    def pending(self) -> bool:
        """Whether something has been read ahead."""
        return self._at < self._end

    def pop_fd(self) -> int | None:
        """Return the next file descriptor that came; the caller closes it."""
        return self._fds.popleft() if self._fds else None

    def close(self) -> None:
        """Close the descriptors that were not popped."""
        while self._fds:
            os.close(self._fds.popleft())

    def _more(self) -> bool:
        """Read the bytes that are there, at least one; False at the end of the stream."""
        if self._at:
            rest = self._end - self._at
            # A copy first: source and target overlap.
            self._buffer[:rest] = bytes(self._buffer[self._at : self._end])
            self._at, self._end = 0, rest
        count = self._receive(self._buffer[self._end :])
        self._end += count
        return count > 0

    def _receive(self, target: memoryview) -> int:
        if not self._with_fds:
            return self._sock.recv_into(target)
        # Space for one descriptor: the kernel drops the others, and never merges the descriptors of two sends.
        space = socket.CMSG_SPACE(_FD)
        count, extra, _, _ = self._sock.recvmsg_into([target], space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds.extend(fd for (fd,) in struct.iter_unpack("i", data[: len(data) // _FD * _FD]))
        # Descriptors that nothing asks for would use up the limit of the process.
        if len(self._fds) > _MAX_FDS:
            raise EndOfStream("more file descriptors than were asked for")
        return count
