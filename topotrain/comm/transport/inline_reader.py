"""Reading on the thread that waits, where a process has no thread to spare for it.

Rule: between two turns nothing is read. What has come by then waits in the sockets, which hold a few hundred of the
small frames of the shared-memory road; who sends more than that waits in its own writer thread. It is for a worker
that is home to a server, too: with readers of its own, its script's Python code and the server's would take the
interpreter from each other all the time.
"""

import selectors
import threading
from typing import Protocol


class InlineConnection(Protocol):
    """A connection that is read in turns (see `connection.Connection`)."""

    def fileno(self) -> int: ...

    def turn(self) -> bool: ...

    def end(self) -> None: ...

    def start(self) -> None: ...


class InlineReader:
    """The connections of one process that are read by whoever calls `turn`, until `release` gives each a thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self.released = False

    def add(self, connection: InlineConnection) -> None:
        """Read this one, too."""
        with self._lock:
            if not self.released:
                self._selector.register(connection.fileno(), selectors.EVENT_READ, connection)
                return
        connection.start()

    def turn(self, seconds: float) -> None:
        """Handle what has come; wait at most so long if nothing has."""
        for key, _ in self._selector.select(seconds):
            connection: InlineConnection = key.data
            if not connection.turn():
                with self._lock:
                    self._selector.unregister(key.fd)  # before its number is free for another socket
                connection.end()

    def release(self) -> None:
        """From now on each connection is read on a thread of its own."""
        with self._lock:
            if self.released:
                return
            self.released = True
            left = [key.data for key in self._selector.get_map().values()]
            self._selector.close()
        for connection in left:
            connection.start()
