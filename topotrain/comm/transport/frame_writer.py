"""The writing end of a stream.

Bytes that the kernel does not take at once wait here, uncopied, for a writer thread.

`put` never blocks. The caller holds `lock` around it, so that frames leave in the order of their numbers.

At most LIMIT bytes may wait here. Two kinds of callers keep to that:

* A thread that may stop reading without blocking any process (a worker's script) calls `wait_for_room` first.
* A side that only answers (a server, to a worker) takes no new request from a peer that does not read its answers: its
  reader calls `wait_until_taken` before it reads on.

The two cannot deadlock, because a worker's reader never waits. It takes the answers, so the server reads on, so the
worker's own queue shrinks. Where both sides answer (server to server, rank to rank) no reader may wait. The queue there
is bounded by the protocol, a few messages per bucket.
"""

import socket
import threading
from array import array
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from topotrain.comm.transport.multi_socket import Channel

LINGER = 2.0  # seconds that the end of a connection gives to what is queued
LIMIT = 1 << 26  # bytes; a body may be as large, so one always fits into an empty queue
OVERHEAD = 1 << 10  # bytes; a waiting frame occupies about that in Python's objects, however small it is


class ReaderThread(threading.Thread):
    """A thread on which a transport reads.

    Code that it calls never waits for a writer.
    """


@dataclass(slots=True)
class _Chunk:
    """Bytes to be sent: the views shrink as the kernel takes them."""

    views: list[memoryview]
    fds: tuple[int, ...] = ()
    cost: int = 0  # what it counts for while it is queued

    def enqueue(self) -> int:
        """Fix and return the cost of what is left."""
        self.cost = sum(map(len, self.views)) + OVERHEAD
        return self.cost

    def send(self, sock: Channel, flags: int) -> bool:
        """Give the kernel the bytes that it takes; whether that was all. Raises OSError."""
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", self.fds))] if self.fds else []
        # MSG_NOSIGNAL: a script may have restored SIGPIPE, which would end the process.
        sent = sock.sendmsg(self.views, extra, flags | socket.MSG_NOSIGNAL)
        # The kernel sends descriptors with the first byte, so they must not be sent again.
        self.fds = ()
        while self.views and sent >= len(self.views[0]):
            sent -= len(self.views.pop(0))
        if sent:
            self.views[0] = self.views[0][sent:]
        return not self.views


class FrameWriter:
    """The queue of one socket.

    After an error the socket is shut down, so its reader sees the end, and `error` has it.

    `greeting` goes out before everything else, at the first `send_greeting` or `put`.
    """

    def __init__(self, sock: Channel, name: str, greeting: bytes) -> None:
        self.lock = threading.Lock()
        self.queued = 0  # bytes that wait, OVERHEAD included
        self.error: OSError | None = None  # the first one
        self._sock, self._name = sock, name
        self._work, self._room = threading.Condition(self.lock), threading.Condition(self.lock)
        self._queue: deque[_Chunk] = deque([_Chunk([memoryview(greeting)])] if greeting else ())
        self._writer: threading.Thread | None = None
        self._idle = False  # the writer waits for a frame
        self._last = False  # nothing more will be put

    @property
    def empty(self) -> bool:
        """Whether the kernel has taken everything."""
        return not self._queue

    def send_greeting(self) -> None:
        """Send the greeting, unless a writer has begun with it already."""
        with self.lock:
            if self._queue and self._writer is None:
                if self._push(self._queue[0]):
                    self._queue.popleft()
                else:
                    self._call_writer()

    def put(self, views: list[memoryview], fds: tuple[int, ...] = ()) -> None:
        """Send or queue bytes, with descriptors at the first of them; the lock is held."""
        chunk = _Chunk(views, fds)
        # Behind a queue nothing may be pushed: it would overtake the queued frames.
        if self._queue or not self._push(chunk):
            self.queued += chunk.enqueue()
            self._queue.append(chunk)
            self._call_writer()

    def wait_for_room(self, nbytes: int) -> None:
        """Wait until `nbytes` more keep to LIMIT, the queue is empty, or the end has come.

        The lock is held by the caller, but released while waiting.
        """
        # A waiting reader would not empty the peer's queue, and the peer would not empty this one.
        if isinstance(threading.current_thread(), ReaderThread):
            return
        while self._queue and self.queued + nbytes + OVERHEAD > LIMIT and not self._last:
            self._room.wait()

    def wait_until_taken(self) -> None:
        """Wait until no more than LIMIT is queued, or the end has come."""
        if self.queued > LIMIT:  # read without the lock, because this is called for every frame
            with self.lock:
                while self.queued > LIMIT and not self._last:
                    self._room.wait()

    def finish(self) -> None:
        """Close the sending direction once the queue is empty; the lock is held."""
        self._last = True
        if not self._queue:
            self.shutdown(socket.SHUT_WR)
        self._work.notify_all()
        self._room.notify_all()

    def cut(self) -> None:
        """Close both directions, whatever is queued; the lock is held."""
        self._last = True
        self.shutdown(socket.SHUT_RDWR)
        self._work.notify_all()
        self._room.notify_all()

    def drain(self) -> None:
        """After `finish`: wait until the queue is sent or lost, at most LINGER seconds."""
        if self._writer is not None:
            self._writer.join(LINGER)

    def stop(self) -> None:
        """Drop the queue and end the writer."""
        with self.lock:
            self.cut()
            self._drop()
        if self._writer is not None:
            # No thread may be inside `sendmsg` when the descriptor's number becomes free.
            self._writer.join()

    def shutdown(self, how: int) -> None:
        """Shut the socket down, which wakes a thread that waits for it."""
        with suppress(OSError):  # it may be down already
            self._sock.shutdown(how)

    def _push(self, chunk: _Chunk) -> bool:
        """Give the kernel the bytes that it takes at once; True when that was all."""
        try:
            return chunk.send(self._sock, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            self._break(error)
            # A broken socket takes nothing any more, so nothing is left to queue.
            return True

    def _call_writer(self) -> None:
        # Made when it is needed: the kernel mostly takes small frames at once, and there may be many connections.
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name=self._name, daemon=True)
            self._writer.start()
        # A writer that is sending looks into the queue by itself, and `Condition.notify` is slow Python.
        if self._idle:
            self._work.notify_all()

    def _write(self) -> None:
        while (chunk := self._next()) is not None:
            try:
                # Without the lock: this may wait for the peer, and `put` must not.
                while not chunk.send(self._sock, 0):
                    pass
            except OSError as error:
                with self.lock:
                    self._break(error)
                return
            with self.lock:
                if self._queue:  # `stop` may have emptied it meanwhile
                    # Only now: while the kernel has a part of it, a frame must stay the first of the queue.
                    self.queued -= self._queue.popleft().cost
                    self._room.notify_all()
                if self._last and not self._queue:
                    self.shutdown(socket.SHUT_WR)

    def _next(self) -> _Chunk | None:
        with self.lock:
            self._idle = True
            while not self._queue and not self._last:
                self._work.wait()
            self._idle = False
            return self._queue[0] if self._queue else None

    def _break(self, error: OSError) -> None:
        self.error = self.error or error
        self.shutdown(socket.SHUT_RDWR)
        self._drop()

    def _drop(self) -> None:
        self._queue.clear()
        self.queued = 0
        self._room.notify_all()
