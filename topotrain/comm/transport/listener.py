"""Accept connections of strangers without being stopped by them.

* Each connection has a thread of its own, on which its handler does the handshake.
* A connection is unproven until the handler says otherwise. At most MAX_UNPROVEN are unproven at once; a newcomer
  pushes another one out.
* A connection that is pushed out or beyond the limit is refused with FULL, without waiting for it to read that.
"""

import ipaddress
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import SystemRandom
from typing import Any

from topotrain.comm.security.handshake import HandshakeAborted, refuse
from topotrain.comm.transport import Refused

MAX_UNPROVEN = 64
_MAX_PUSHED = 16
_NETWORK_BYTES = 8  # one host may have all addresses of an IPv6 network
_RANDOM = SystemRandom()
MAX_CONNECTIONS = 4096
BACKLOG = 128
ConnectionHandler = Callable[[socket.socket], None]
_PAUSE_S = 0.05  # after an accept that failed
_CLOSING_S = 2.0  # for the accepting thread, and for a connection that is pushed out, to end


@dataclass(frozen=True, slots=True)
class _Newcomer:
    network: bytes
    until: float


class Newcomers:
    """Connections that have not proven themselves yet, bounded in number.

    When all places are taken, a newcomer pushes out a random connection of the address that has most of them. So silent
    connections of strangers keep a member out by chance only, and those of one address hardly concern the others.

    seconds: the time that each has. One thread at a time uses the object.
    """

    def __init__(self, seconds: float = float("inf")) -> None:
        self._seconds = seconds
        self._known: dict[socket.socket, _Newcomer] = {}
        self._pushed: list[socket.socket] = []

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, sock: socket.socket) -> bool:
        return sock in self._known

    @property
    def crowded(self) -> bool:
        """Whether many connections that were pushed out still hold descriptors."""
        return sum(sock.fileno() >= 0 for sock in self._pushed) >= _MAX_PUSHED

    def add(self, sock: socket.socket, peer: Any) -> socket.socket | None:
        """Add a connection; remove and return the one that has to end for it."""
        self._known = {known: one for known, one in self._known.items() if known.fileno() >= 0}
        place = tuple(peer[:2]) if isinstance(peer, tuple) else ()
        network = ipaddress.ip_address(place[0]).packed[:_NETWORK_BYTES] if place else b""
        self._known[sock] = _Newcomer(network, time.monotonic() + self._seconds)
        if len(self._known) <= MAX_UNPROVEN:
            return None
        counts = Counter(one.network for one in self._known.values())
        most = max(counts.values())
        pushed = _RANDOM.choice([o for o, one in self._known.items() if o is not sock and counts[one.network] == most])
        del self._known[pushed]
        self._pushed = [*(old for old in self._pushed if old.fileno() >= 0), pushed]
        return pushed

    def remove(self, sock: socket.socket) -> bool:
        """Remove a connection that is proven or has ended; return whether it was there."""
        return self._known.pop(sock, None) is not None

    def end_late(self, now: float | None = None) -> None:
        """Shut down all connections that have had their time. now: by the monotonic clock."""
        now = time.monotonic() if now is None else now
        for sock in [sock for sock, one in self._known.items() if one.until <= now]:
            del self._known[sock]
            shut_down(sock)


def shut_down(sock: socket.socket) -> None:
    """Shut both directions of a socket down, which wakes a thread that waits for it."""
    with suppress(OSError):  # it may be closed already
        # Not that of an SSLSocket, which would forget its state while another thread uses it.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class Listener:
    """Accepts connections at a listening socket, from `start` until `stop`.

    Args:
        handler: does the handshake, and serves a connection until its end, on a thread of its own. The listener closes
            the socket afterwards, unless it was released.
        most: connections at once, proven ones included.
        thread: the class of the threads that connections are handled on.
    """

    def __init__(
        self,
        sock: socket.socket,
        handler: ConnectionHandler,
        name: str,
        most: int = MAX_CONNECTIONS,
        thread: type[threading.Thread] = threading.Thread,
    ) -> None:
        self._sock, self._handler, self._name, self._most, self._thread = sock, handler, name, most, thread
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: dict[socket.socket, threading.Thread] = {}
        self._unproven = Newcomers()
        self._ending: set[threading.Thread] = set()  # done with their connection, in their last instructions
        self._acceptor = threading.Thread(target=self._accept, name=name, daemon=True)
        self.refused = 0  # connections that were refused because of a limit

    def start(self) -> None:
        """Begin to accept connections."""
        self._acceptor.start()

    def proven(self, sock: socket.socket) -> None:
        """Count a connection as proven; the listener still closes it at its end.

        Raises HandshakeAborted for one that was pushed out.
        """
        with self._lock:
            if not self._unproven.remove(sock):
                raise HandshakeAborted("another newcomer has taken its place")

    def release(self, sock: socket.socket) -> None:
        """Forget a proven connection; the handler closes it from now on."""
        with self._lock:
            self._threads.pop(sock, None)

    def stop(self) -> None:
        """Accept no more connections, and shut down those that are not released."""
        self._stop.set()
        shut_down(self._sock)  # wakes `accept`, closing alone would not
        if self._acceptor.ident is not None:  # it was started
            self._acceptor.join(_CLOSING_S)
        self._sock.close()
        with self._lock:
            known = list(self._threads)
        for sock in known:
            shut_down(sock)

    def join(self, seconds: float) -> None:
        """After `stop`: wait for each thread of a connection, at most so many seconds."""
        with self._lock:
            threads = [*self._threads.values(), *self._ending]
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(seconds)

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                sock, peer = self._sock.accept()
            except OSError:
                self._stop.wait(_PAUSE_S)  # out of descriptors: some will be closed; stopping: the loop ends
                continue
            if not self._admit(sock, peer):
                self._refuse(sock)
                sock.close()

    def _refuse(self, sock: socket.socket) -> None:
        self.refused += 1
        refuse(sock, Refused("FULL", f"{self._name} cannot take a connection now; try again"))

    def _admit(self, sock: socket.socket, peer: object) -> bool:
        thread = self._thread(target=self._handle, args=(sock,), name=f"{self._name}: connection", daemon=True)
        with self._lock:
            # Here, because threads that end cannot remove themselves.
            self._ending = {ending for ending in self._ending if ending.is_alive()}
            if len(self._threads) >= self._most or self._stop.is_set():
                return False
            self._threads[sock] = thread
            pushed = self._unproven.add(sock, peer)
            ending = self._threads.get(pushed) if pushed is not None else None
            # Started under the lock: `join` must not find a thread that has not started, which cannot be joined.
            try:
                thread.start()
            except RuntimeError:  # the system has no thread left
                del self._threads[sock]
                self._unproven.remove(sock)
                return False
        if pushed is not None and ending is not None:
            self._refuse(pushed)
            shut_down(pushed)
            # So that there are never many more threads than places.
            ending.join(_CLOSING_S)
        return True

    def _handle(self, sock: socket.socket) -> None:
        try:
            self._handler(sock)
        finally:
            with self._lock:
                self._unproven.remove(sock)
                ours = self._threads.pop(sock, None) is not None
                if ours:
                    self._ending.add(threading.current_thread())
            if ours:
                sock.close()
