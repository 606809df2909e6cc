"""Emulate a slow network between the units of one machine, in user space.

Every unit stands for a host with one link, which all its processes share. The link has `bandwidth` in each direction.

* The sender pays for both ends: a piece books time on its own host's uplink and on the other host's downlink.
* The writer thread sleeps until the link is nearly free again. So no kernel buffer hides the link, and several hosts
  that send to one host wait for each other.
* A piece that is paid for is under way for `delay`, and only then given to the kernel.

Each packet of PACKET bytes is lost with the given probability, and sent again until it arrives. There is no congestion
control: a real TCP connection slows down more.
"""

import errno
import fcntl
import math
import mmap
import os
import random
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from topotrain.config.job import Link
from topotrain.config.topology import Address, Topology

PACKET = 1500
REPAIR_S = 0.001
_PIECE_S = 0.0015  # a piece takes the link for about this long: short for fairness, long enough for a sleep
_LEAST_PIECE, _LARGEST_PIECE = PACKET, 1 << 18
_UNPAID = 1 << 26  # bytes under way at most where no bandwidth bounds them
AHEAD_S = 0.005
"""A sender wakes so many seconds before the link is free, as an adapter's queue keeps it busy."""
_LINGER_S = 2.0  # for bytes that are under way at the end of a connection
_TIME = struct.Struct("d")


def piece_bytes(rate: float) -> int:
    """Return the bytes that a connection sends at once over a link.

    rate: bytes per second of the link.
    """
    return min(max(int(rate * _PIECE_S), _LEAST_PIECE), _LARGEST_PIECE)


class Meter(Protocol):
    """One direction of one host's link, which is taken piece by piece."""

    def seconds(self, nbytes: int) -> float:
        """Return how long `nbytes` take the link."""
        ...

    def book(self, ready: float, nbytes: int) -> float:
        """Take the link for `nbytes`, from `ready` on at the earliest; return the end."""
        ...


class LinkMeter(Meter):
    """The time until which one direction of one host's link is taken.

    Processes that open the same file share it.

    Args:
        file: made if missing.
        rate: bytes per second.
    """

    def __init__(self, file: Path, rate: float) -> None:
        self._rate = rate
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, _TIME.size)  # changes nothing where another process has done it already
        self._memory = mmap.mmap(self._fd, _TIME.size)
        self._lock = threading.Lock()  # flock keeps processes apart, not the threads of one

    def seconds(self, nbytes: int) -> float:
        """Return how long `nbytes` take the link."""
        return nbytes / self._rate

    def book(self, ready: float, nbytes: int) -> float:
        """Take the link for `nbytes`, from `ready` on at the earliest; return the end.

        Times are seconds of the monotonic clock, which all processes of a machine share.
        """
        with self._lock:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                (free,) = _TIME.unpack_from(self._memory)
                # A link that was idle books from now on, and not from the end of its last piece.
                end = max(ready, free) + nbytes / self._rate
                _TIME.pack_into(self._memory, 0, end)
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        return float(end)


class EmulatedRoute:
    """The path from one host to another, for one connection: when pieces arrive.

    link: delay and jitter in ms, loss as a share of packets. up, down: the two links that are paid. None: unlimited.
    """

    def __init__(self, link: Link, up: Meter | None, down: Meter | None, dice: random.Random) -> None:
        self._link, self._up, self._down, self._dice = link, up, down, dice
        self._through = self._there = 0.0

    def book(self, ready: float, nbytes: int) -> tuple[float, float]:
        """Send `nbytes` at `ready`; return when to go on, and when they arrive."""
        rounds, again = self._losses(nbytes)
        taken = through = ready
        if self._up is not None and self._down is not None:
            # Packets that are sent again take the link's time again.
            size = nbytes + again * PACKET
            taken = self._up.book(ready, size)
            # The bytes reach the other link while they leave this one, so both are taken at the same time.
            through = self._down.book(taken - self._up.seconds(size), size)
        # The sender waits for its own link with this piece, and for the other end's link with the previous piece.
        # So it can fill both, and cannot run ahead of a link that others share.
        go_on, self._through = max(taken, self._through), through
        # The bytes behind a lost packet wait for it: a round trip and REPAIR_S per retransmission. Packets that are
        # lost together are repaired together.
        there = through + self._delay_s() + rounds * (2 * self._link.delay / 1000 + REPAIR_S)
        self._there = max(self._there, there)  # never out of order
        return go_on, self._there

    def _delay_s(self) -> float:
        jitter = self._link.jitter
        return max(0.0, self._link.delay + (self._dice.uniform(-jitter, jitter) if jitter else 0.0)) / 1000

    def _losses(self, nbytes: int) -> tuple[int, int]:
        """Return the rounds of retransmission, and the packets sent again in all."""
        rounds = again = 0
        left = math.ceil(nbytes / PACKET) if self._link.loss else 0
        # Each round sends the lost packets again, of which some are lost again.
        while left := sum(self._dice.random() < self._link.loss for _ in range(left)):
            rounds += 1
            again += left
        return rounds, again


class PiecesInFlight:
    """Pieces that are paid for and have not arrived yet, in order; `nbytes` in all."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[float, bytes]] = deque()
        self.nbytes = 0

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def put(self, there: float, piece: bytes) -> None:
        """Add a piece that will arrive at that time."""
        self._pieces.append((there, piece))
        self.nbytes += len(piece)

    def first(self) -> tuple[float, bytes]:
        """Return the next piece to arrive, and its time of arrival."""
        return self._pieces[0]

    def arrived(self) -> None:
        """Remove the first piece, which has arrived."""
        self.nbytes -= len(self._pieces.popleft()[1])


class ShapedSocket(socket.socket):
    """A connected stream socket that sends through an `EmulatedRoute`.

    It takes over the descriptor of `raw`. A send takes at most one piece and blocks as the link does. A send that must
    not wait (MSG_DONTWAIT) never takes anything, so a writer thread does it. `close` waits for what is under way.

    Args:
        raw: connected, given up by the caller.
        route: when bytes are through.
        piece: bytes sent at once, at most.
        room: bytes that may be under way.
    """

    def __init__(self, raw: socket.socket, route: EmulatedRoute, piece: int, room: int) -> None:
        super().__init__(raw.family, raw.type, raw.proto, raw.detach())
        # A timeout of the handshake must not end the sends of the connection.
        self.settimeout(None)
        self._route, self._piece, self._room = route, piece, room
        self._lock = threading.Lock()
        self._sent, self._freed = threading.Condition(self._lock), threading.Condition(self._lock)
        self._under_way = PiecesInFlight()
        self._last = False  # nothing more will be sent
        self._over = threading.Event()  # the sender must not sleep any longer
        self._cut = threading.Event()  # bytes under way must not wait any longer either
        self._error: OSError | None = None
        self._carrier = threading.Thread(target=self._carry, name="link", daemon=True)
        self._carrier.start()

    # --- sending -------------------------------------------------------------------------------------------------

    def sendmsg(self, buffers: Iterable[Any], ancdata: Any = (), flags: int = 0, address: Any = None, /) -> int:
        """Send one piece of the buffers; return its bytes. OSError after the end."""
        # So the caller's writer thread sends, and it is that thread which waits for the link.
        if flags & socket.MSG_DONTWAIT:
            raise BlockingIOError(errno.EAGAIN, "a slow link never takes bytes at once")
        return self._post(_head(buffers, self._piece))

    def send(self, data: Any, flags: int = 0, /) -> int:
        """As `sendmsg`, of one buffer."""
        return self.sendmsg([data], (), flags)

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        """Send the whole buffer."""
        view = memoryview(data).cast("B")
        while view:
            view = view[self.sendmsg([view], (), flags) :]

    def _post(self, piece: bytes) -> int:
        with self._lock:
            while self._under_way.nbytes > self._room and not self._last:
                # The sender waits as a socket with a full buffer does.
                self._freed.wait()
            if self._error is not None:
                raise self._error
            if self._last:
                raise BrokenPipeError(errno.EPIPE, "the sending direction is closed")
            go_on, there = self._route.book(time.monotonic(), len(piece))
            self._under_way.put(there, piece)
            self._sent.notify()
        # An event and not `sleep`: closing the socket ends the wait.
        self._over.wait(max(0.0, go_on - AHEAD_S - time.monotonic()))
        return len(piece)

    def _carry(self) -> None:
        """Give each piece to the kernel at its time; then close this direction."""
        try:
            while (first := self._next()) is not None:
                there, piece = first
                self._cut.wait(max(0.0, there - time.monotonic()))
                super().sendall(piece)
                with self._lock:
                    self._under_way.arrived()
                    self._freed.notify()
            super().shutdown(socket.SHUT_WR)
        except OSError as error:
            self._break(error)

    def _next(self) -> tuple[float, bytes] | None:
        with self._lock:
            while not self._under_way and not self._last:
                self._sent.wait()
            return self._under_way.first() if self._under_way else None

    def _break(self, error: OSError) -> None:
        with self._lock:
            self._error, self._last = error, True
            self._freed.notify()
        self._over.set()
        with suppress(OSError):  # a thread that reads must see the end
            super().shutdown(socket.SHUT_RDWR)

    # --- the end -------------------------------------------------------------------------------------------------

    def shutdown(self, how: int) -> None:
        """Shut directions down; the sending one only after everything under way."""
        if how != socket.SHUT_RD:
            with self._lock:
                self._last = True
                self._sent.notify()
                self._freed.notify()
        if how == socket.SHUT_RDWR:
            self._over.set()
        if how != socket.SHUT_WR:
            super().shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close once everything under way has arrived, or the peer does not take it."""
        if self.fileno() >= 0:
            with suppress(OSError):  # it may be down already
                self.shutdown(socket.SHUT_RDWR)
            with self._lock:
                first = self._under_way.first()[0] if self._under_way else -math.inf
            # The delay of the link, and a while for a peer that does not read.
            self._carrier.join(max(0.0, first - time.monotonic()) + _LINGER_S)
            self._cut.set()
            with suppress(OSError):
                super().shutdown(socket.SHUT_RDWR)
            self._carrier.join()
        super().close()


class EmulatedNetwork:
    """The emulated network as one process sees it.

    It puts connected sockets behind routes from host to host.

    Args:
        link: of every host.
        directory: the job's private folder, the same for all its processes. It is made if missing.
        key: a name that no other job has. It is the name of the files with the meters.
        topology: places addresses on hosts.
    """

    def __init__(self, link: Link, directory: Path, key: str, topology: Topology) -> None:
        self._link, self._directory, self._key, self._topology = link, directory, key, topology
        self._rate = None if link.bandwidth is None else link.bandwidth * 1e6 / 8
        self._meters: dict[tuple[int, str], LinkMeter] = {}
        self._lock = threading.Lock()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def shape(self, sock: socket.socket, me: Address, peer: Address) -> socket.socket:
        """Return the socket behind the link of these two, or unchanged on one host."""
        here, there = self._topology.host_of(me), self._topology.host_of(peer)
        # A link without limits needs no thread for its pieces.
        if here == there or self._link == Link():
            return sock
        piece, room = _LARGEST_PIECE, _UNPAID
        if self._rate is not None:
            piece = piece_bytes(self._rate)
            # Bytes that the delay keeps under way, those that the sender may be ahead by, and a piece at each end.
            room = (
                int(self._rate * (self._link.delay + self._link.jitter) / 1000)
                + int(self._rate * 2 * AHEAD_S)
                + 2 * piece
            )
        # A generator of its own: the one of `random` belongs to the script.
        route = EmulatedRoute(self._link, self._meter(here, "up"), self._meter(there, "down"), random.Random())
        return ShapedSocket(sock, route, piece, room)

    def _meter(self, host: int, direction: str) -> LinkMeter | None:
        if self._rate is None:
            return None
        with self._lock:
            found = self._meters.get((host, direction))
            if found is None:
                file = self._directory / f"{self._key}-{host}-{direction}"
                found = self._meters[host, direction] = LinkMeter(file, self._rate)
            return found


def _head(buffers: Iterable[Any], size: int) -> bytes:
    """Return a copy of the first `size` bytes of the buffers."""
    parts: list[memoryview] = []
    for buffer in buffers:
        view = memoryview(buffer)
        if view.nbytes:  # an empty one cannot be cast
            parts.append(view.cast("B")[:size])
            size -= len(parts[-1])
        if not size:
            break
    # A copy: the owner may change the buffers while the bytes are under way.
    return b"".join(parts)
