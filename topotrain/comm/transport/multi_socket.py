"""Several sockets as one stream.

This is for links on which one connection's window or losses are the limit.

The stream is cut into stripes of STRIPE bytes, and stripe number n travels on lane n mod k. Both ends count the bytes,
so nothing is added to the stream, and it is read in order whatever the lanes do. One thread writes and one reads, as
with a single socket, while the kernel keeps k windows full at once. A small message costs the same as on one socket.
Inside a machine this brings nothing: there the processor is the limit, not the window.

A dialer opens lanes k-1 to 1 first, each with a handshake of its own, and lane 0 last. Until then they are pending.
"""

import socket
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from topotrain.comm.transport import TransportError
from topotrain.config.topology import Address

STRIPE = 1 << 16  # bytes; the kernel takes this much at once even before it has learned what a connection can do
LANES_S = 60.0  # seconds for all lanes of a connection to come; one takes 4 at most, on a machine that is not stopped


class Channel(Protocol):
    """The calls of `socket.socket` that the frames of a connection need."""

    def sendmsg(self, buffers: Iterable[Any], ancdata: Any = (), flags: int = 0, /) -> int: ...
    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int: ...
    def recvmsg_into(
        self, buffers: Iterable[Any], ancbufsize: int = 0, flags: int = 0, /
    ) -> tuple[int, list[tuple[int, int, bytes]], int, Any]: ...
    def shutdown(self, how: int, /) -> None: ...
    def settimeout(self, value: float | None, /) -> None: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


class HandshakeSocket(Channel, Protocol):
    """The calls of `socket.socket` that a handshake needs besides."""

    def sendall(self, data: Any, flags: int = 0, /) -> None: ...
    def send(self, data: Any, flags: int = 0, /) -> int: ...
    def recv(self, size: int, flags: int = 0, /) -> bytes: ...


class _Place:
    """The position of one direction: its lane, and the rest of the stripe."""

    def __init__(self, lanes: int, left: int) -> None:
        self._lanes, self.lane, self.left = lanes, 0, left

    def move(self, nbytes: int) -> None:
        self.left -= nbytes
        if not self.left:
            self.lane, self.left = (self.lane + 1) % self._lanes, STRIPE


class MultiSocketChannel:
    """Connected stream sockets, or objects with the same calls, as one `Channel`.

    At most one thread sends and one receives at a time. ahead: bytes sent on lane 0 that are not part of the stream.
    """

    def __init__(self, lanes: Sequence[Channel], ahead: int = 0) -> None:
        self._lanes = tuple(lanes)
        # The welcome of the handshake is sent through here, but the dialer reads it before its own count begins.
        self._out, self._in = _Place(len(lanes), STRIPE + ahead), _Place(len(lanes), STRIPE)

    def sendmsg(self, buffers: Iterable[Any], ancdata: Any = (), flags: int = 0, /) -> int:
        """Send from the buffers, as a socket does; return how many bytes."""
        if ancdata:
            raise ValueError("a bundle of sockets carries no descriptors")
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        sent = 0
        while views:
            head = _head(views, self._out.left)
            try:
                count = self._lanes[self._out.lane].sendmsg(head, (), flags)
            except BlockingIOError:
                # The bytes of the earlier lanes are gone: they must be reported before the caller tries again.
                if sent:
                    break
                raise
            self._out.move(count)
            sent += count
            # The lane is full; the next lane must wait for this stripe.
            if count < sum(map(len, head)) and flags & socket.MSG_DONTWAIT:
                break
            views = _without(views, count)
        return sent

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receive as a socket does, with MSG_WAITALL the whole buffer; 0 at the end."""
        target = memoryview(buffer).cast("B")[: nbytes or None]
        got = 0
        while got < len(target):
            # Never beyond the stripe: the bytes after it come on the next lane.
            end = got + min(self._in.left, len(target) - got)
            count = self._lanes[self._in.lane].recv_into(target[got:end], 0, flags)
            got += count
            if not count or not flags & socket.MSG_WAITALL:
                self._in.move(count)
                break
            self._in.move(count)
        return got

    def recvmsg_into(
        self, buffers: Iterable[Any], ancbufsize: int = 0, flags: int = 0, /
    ) -> tuple[int, list[tuple[int, int, bytes]], int, Any]:
        """Receive into the first buffer; there are never descriptors."""
        return self.recv_into(next(iter(buffers)), 0, flags), [], 0, None

    def shutdown(self, how: int, /) -> None:
        """Shut all lanes down."""
        for lane in self._lanes:
            with suppress(OSError):  # it may be down already
                lane.shutdown(how)

    def settimeout(self, value: float | None, /) -> None:
        """Set the timeout of all lanes."""
        for lane in self._lanes:
            lane.settimeout(value)

    def fileno(self) -> int:
        """Raise ValueError: no selector can wait for several descriptors as one."""
        raise ValueError("a bundle of sockets has no descriptor of its own; read it on a thread")

    def close(self) -> None:
        """Close all lanes."""
        for lane in self._lanes:
            lane.close()


def _head(views: list[memoryview], size: int) -> list[memoryview]:
    head = []
    for view in views:
        if size <= 0:
            break
        head.append(view[:size])
        size -= len(view)
    return head


def _without(views: list[memoryview], size: int) -> list[memoryview]:
    rest = []
    for view in views:
        if size < len(view):
            rest.append(view[size:])
        size = max(0, size - len(view))
    return rest


@dataclass(slots=True)
class _Attempt:
    """The lanes that have come of one attempt to connect."""

    bundle: bytes
    timer: threading.Timer
    lanes: dict[int, HandshakeSocket] = field(default_factory=dict)

    def close(self) -> None:
        self.timer.cancel()
        for sock in self.lanes.values():
            sock.close()


class PendingSockets:
    """Lanes of proven dialers, until their lane 0 comes and takes them.

    patience: seconds after which the lanes of an attempt are closed, because its dialer has died.
    """

    def __init__(self, patience: float = LANES_S) -> None:
        self._patience = patience
        self._lock = threading.Lock()
        self._closed = False
        self._pending: dict[tuple[Address, Address], _Attempt] = {}

    def put(self, route: tuple[Address, Address], bundle: bytes, lane: int, sock: HandshakeSocket) -> None:
        """Keep a lane, and close those of an earlier attempt. TransportError once closed."""
        with self._lock:
            if self._closed:
                raise TransportError("this transport is closed")
            attempt = self._pending.get(route)
            if attempt is None or attempt.bundle != bundle:
                timer = self._start_timer(route, bundle)
                # The dialer has given up its earlier attempt, and begun a new one.
                if attempt is not None:
                    attempt.close()
                attempt = self._pending[route] = _Attempt(bundle, timer)
            if lane in attempt.lanes:
                raise TransportError(f"lane {lane} came twice")
            attempt.lanes[lane] = sock

    def claim(self, route: tuple[Address, Address], bundle: bytes, count: int) -> list[HandshakeSocket]:
        """Return lanes 1 to count - 1 of a bundle. TransportError when one is missing."""
        with self._lock:
            attempt = self._pending.pop(route, None)
        lanes = {} if attempt is None or attempt.bundle != bundle else attempt.lanes
        if sorted(lanes) != list(range(1, count)):
            if attempt is not None:
                attempt.close()
            raise TransportError(f"{len(lanes) + 1} lanes of {count} came")
        if attempt is not None:
            attempt.timer.cancel()
        return [lanes[lane] for lane in range(1, count)]

    def close(self) -> None:
        """Close the lanes that were not taken."""
        with self._lock:
            self._closed = True
            for attempt in self._pending.values():
                attempt.close()
            self._pending.clear()

    def _start_timer(self, route: tuple[Address, Address], bundle: bytes) -> threading.Timer:
        timer = threading.Timer(self._patience, self._expire, (route, bundle))
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError as error:  # the system has no thread left
            raise TransportError(str(error)) from error
        return timer

    def _expire(self, route: tuple[Address, Address], bundle: bytes) -> None:
        with self._lock:
            attempt = self._pending.get(route)
            if attempt is not None and attempt.bundle == bundle:
                del self._pending[route]
                attempt.close()
