"""Accept connections of strangers without being stopped by them.

* Each connection has a thread of its own, on which its handler does the handshake.
* A connection is unproven until the handler says otherwise. At most MAX_UNPROVEN are unproven at once.
* A connection beyond a limit is refused with FULL, without waiting for it to read that.
"""

import socket
import threading
from contextlib import suppress
from typing import Protocol

from topotrain.comm.security.handshake import refuse
from topotrain.comm.transport import Refused

MAX_UNPROVEN = 64
MAX_CONNECTIONS = 4096
BACKLOG = 128
_PAUSE_S = 0.05  # after an accept that failed
_CLOSING_S = 2.0  # for the accepting thread to end


class ConnectionHandler(Protocol):
    """The part of a server that a listener gives its connections to."""

    def handle_connection(self, sock: socket.socket) -> None:
        """Do the handshake, and serve the connection until its end.

        This runs on a thread of its own. The listener closes the socket afterwards, unless it was released.
        """
        ...


class Listener:
    """Accepts connections at a listening socket, from `start` until `stop`.

    Args:
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
        self._unproven: set[socket.socket] = set()
        self._ending: set[threading.Thread] = set()  # done with their connection, in their last instructions
        self._acceptor = threading.Thread(target=self._accept, name=name, daemon=True)
        self.refused = 0  # connections that were refused because of a limit

    @property
    def unproven(self) -> int:
        """How many connections have not proven themselves yet."""
        return len(self._unproven)

    def start(self) -> None:
        """Begin to accept connections."""
        self._acceptor.start()

    def proven(self, sock: socket.socket) -> None:
        """Count a connection as proven; the listener still closes it at its end."""
        with self._lock:
            self._unproven.discard(sock)

    def release(self, sock: socket.socket) -> None:
        """Forget a connection; the handler closes it from now on."""
        with self._lock:
            self._unproven.discard(sock)
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
                sock, _ = self._sock.accept()
            except OSError:
                self._stop.wait(_PAUSE_S)  # out of descriptors: some will be closed; stopping: the loop ends
                continue
            if not self._admit(sock):
                refuse(sock, Refused("FULL", f"{self._name} cannot take a connection now; try again"))
                sock.close()

    def _admit(self, sock: socket.socket) -> bool:
        thread = self._thread(target=self._handle, args=(sock,), name=f"{self._name}: connection", daemon=True)
        with self._lock:
            # Here, because threads that end cannot remove themselves.
            self._ending = {ending for ending in self._ending if ending.is_alive()}
            if len(self._unproven) < MAX_UNPROVEN and len(self._threads) < self._most and not self._stop.is_set():
                self._threads[sock] = thread
                self._unproven.add(sock)
                # Started under the lock: `join` must not find a thread that has not started, which cannot be joined.
                with suppress(RuntimeError):  # the system has no thread left
                    thread.start()
                    return True
                del self._threads[sock]
                self._unproven.discard(sock)
            self.refused += 1
        return False

    def _handle(self, sock: socket.socket) -> None:
        try:
            self._handler.handle_connection(sock)
        finally:
            with self._lock:
                self._unproven.discard(sock)
                ours = self._threads.pop(sock, None) is not None
                if ours:
                    self._ending.add(threading.current_thread())
            if ours:
                sock.close()


def shut_down(sock: socket.socket) -> None:
    """Shut both directions of a socket down, which wakes a thread that waits for it."""
    with suppress(OSError):  # it may be closed already
        sock.shutdown(socket.SHUT_RDWR)
