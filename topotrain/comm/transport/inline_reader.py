"""Read connections on the thread that waits, without threads for reading.

This is for a worker in a process that also runs a server. With reader threads, the script and the server would compete
for the interpreter all the time.
"""

import selectors
import threading

from topotrain.comm.transport.connection import Connection


class InlineReader:
    """Connections that are read by the thread that calls `turn`, until `release`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self.released = False

    def add(self, connection: Connection) -> None:
        """Read this connection, too."""
        with self._lock:
            if not self.released:
                self._selector.register(connection.fileno(), selectors.EVENT_READ, connection)
                return
        # Released: no thread calls `turn` for it any more.
        connection.start()

    def turn(self, seconds: float) -> None:
        """Handle the messages that have come; wait at most `seconds` if there are none."""
        # Between two turns messages wait in the sockets, which hold a few hundred of the small frames of the
        # shared-memory transport. A peer that sends more waits in its own writer thread.
        for key, _ in self._selector.select(seconds):
            connection: Connection = key.data
            goes_on = False
            try:
                goes_on = connection.turn()
            finally:
                # Also at a KeyboardInterrupt of the script's own thread.
                if not goes_on:
                    with self._lock:
                        self._selector.unregister(key.fd)  # before its number is free for another socket
                    connection.end()

    def release(self) -> None:
        """Read each connection on a thread of its own from now on."""
        with self._lock:
            if self.released:
                return
            self.released = True
            left = [key.data for key in self._selector.get_map().values()]
            self._selector.close()
        for connection in left:
            connection.start()
