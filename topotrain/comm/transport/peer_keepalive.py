"""Notice that the host at the other end cannot be reached.

Its power, a cable, or the network in one direction may have failed.

The other host's kernel is probed, and any acknowledgement shows that it runs. It acknowledges while its processes
compute, hold Python's lock for minutes, do not read, or are stopped. Whether those processes do their work is watched
on their own host. So a beat, an empty frame, is sent where nothing else is under way, and one thread per process reads
the kernel's state of each connection (TCP_INFO) once per beat.

A host is out of reach when it has been silent for the lease and two probes went unanswered.
"""

import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from topotrain.comm.transport.connection import Connection

LEASE_S = 2.0
"""Seconds for which a host may be silent, unless the job says otherwise."""
_BEATS = 4  # per lease: the kernel retransmits lost data after 0.2 s, 0.6 s and 1.4 s
_IN_VAIN = 2  # unanswered probes: a network may lose one
_INFO = struct.Struct("=8B24I4Q3I")  # of tcp_info, as far as it is needed here; older kernels have fewer fields
_RETRANSMITS, _PROBES, _UNACKED, _LAST_ACK_MS, _TOTAL_RETRANS, _UNSENT = 2, 3, 12, 20, 31, 38
_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: close without sending what is queued


@dataclass(frozen=True, slots=True)
class KernelSignals:
    """The kernel's view of a connection."""

    silent_s: float  # seconds since the other host last acknowledged anything
    again: int = 0  # segments retransmitted since the beginning
    tries: int = 0  # how often in a row its acknowledgement was late
    probes: int = 0  # unanswered probes of its closed window
    waiting: bool = False  # data is still to be acknowledged, or to be sent


def signs(sock: socket.socket) -> KernelSignals:
    """Read the state of a connection from the kernel.

    Raises OSError for a closed socket.
    """
    # Not SO_KEEPALIVE: it sends nothing while data is under way, and at most one probe a second.
    raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    info = _INFO.unpack(raw.ljust(_INFO.size, b"\0"))
    waiting = bool(info[_UNACKED] or info[_UNSENT])
    return KernelSignals(info[_LAST_ACK_MS] / 1000, info[_TOTAL_RETRANS], info[_RETRANSMITS], info[_PROBES], waiting)


class SilenceTimer:
    """How long one host has been silent, as far as this process was looking.

    lease_s: as in `KeepaliveWatch`. now: seconds, of the clock that `update` is given.
    """

    def __init__(self, lease_s: float, now: float) -> None:
        self._lease_s, self._updated = lease_s, now
        self._last = KernelSignals(0.0)
        self.silent_s = 0.0

    def update(self, signs: KernelSignals, now: float) -> bool:
        """Whether the host is out of reach."""
        passed, self._updated = now - self._updated, now
        most = 2 * beat_s(self._lease_s)
        if signs.silent_s < passed:
            self.silent_s, self._last = min(signs.silent_s, most), signs
        else:
            # Time in which this process or its machine was stopped says nothing about the other host. Two beats at most
            # count: by then the kernel has taken in what came meanwhile.
            self.silent_s += min(passed, most)
        # Silence alone is not enough: the closed window of a peer that does not read is probed at intervals that grow
        # to minutes, which TCP_USER_TIMEOUT would take for death.
        asked = max(signs.again - self._last.again, signs.tries - self._last.tries) + signs.probes
        return self.silent_s >= self._lease_s and asked >= _IN_VAIN


def beat_s(lease_s: float) -> float:
    """Return the seconds between two looks, and between beats when idle."""
    return lease_s / _BEATS


class KeepaliveWatch:
    """Watches the connections of one process, on its own thread, until closed.

    lease_s: seconds of silence after which a connection is cut, so that its reader sees its end.
    """

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._change = threading.Condition()
        self._watched: dict[Connection, list[tuple[socket.socket, SilenceTimer]]] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, connection: Connection, socks: Sequence[socket.socket]) -> None:
        """Watch this connection, too, over its sockets."""
        now = time.monotonic()
        with self._change:
            if self._closed:
                return
            self._watched[connection] = [(sock, SilenceTimer(self._lease_s, now)) for sock in socks]
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
                self._thread.start()
            self._change.notify()

    def remove(self, connection: Connection) -> None:
        """Stop watching a connection that has ended."""
        with self._change:
            self._watched.pop(connection, None)

    def close(self) -> None:
        """Stop watching all connections."""
        with self._change:
            self._closed = True
            self._watched.clear()
            self._change.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while watched := self._next():
            for connection, socks in watched:
                with suppress(OSError):  # its socket has just been closed
                    self._look(connection, socks)

    def _next(self) -> list[tuple[Connection, list[tuple[socket.socket, SilenceTimer]]]]:
        """Return the connections to look at, when it is time; none at the end."""
        with self._change:
            due = time.monotonic() + beat_s(self._lease_s)
            while not self._closed:
                left = due - time.monotonic()
                if self._watched and left <= 0:
                    return list(self._watched.items())
                # Without a connection nothing wakes this thread.
                self._change.wait(left if self._watched else None)
        return []

    def _look(self, connection: Connection, socks: Sequence[tuple[socket.socket, SilenceTimer]]) -> None:
        now = time.monotonic()
        found = [(timer, signs(sock)) for sock, timer in socks]
        silent = [timer.silent_s for timer, sign in found if timer.update(sign, now)]
        if silent:
            self.remove(connection)
            for sock, _ in socks:
                # The kernel would go on to send to the lost host for minutes.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            connection.cut(
                f"its host has not answered for {max(silent):.1f} s (lease_s: {self._lease_s:g}): "
                "it is gone, or the network between us is"
            )
        # The acknowledgement of data under way is a sign of the host already; a beat would add nothing.
        elif not any(sign.waiting for _, sign in found) and any(self._quiet(sign) for _, sign in found):
            connection.beat()

    def _quiet(self, sign: KernelSignals) -> bool:
        # Half a beat: the acknowledgement of the last beat came a round trip after it, so a whole beat would never
        # be over at the next look, and only every second look would send one.
        return 2 * sign.silent_s >= beat_s(self._lease_s)
