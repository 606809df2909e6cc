"""The end of a job, as one unit knows it over all terms of its leaders."""

import socket
import threading

from topotrain.launch.multinode.node_info import JobEnd


class JobEnding:
    """How the job ends, and whether a last snapshot comes before.

    Several threads may use it. None of its methods waits, except `wait`.
    """

    def __init__(self) -> None:
        # Other threads decide; the run loop's selector sees it through this socket.
        self._wake_out, self._wake_in = socket.socketpair()
        self._lock = threading.Lock()
        self._closed, self._decided = threading.Event(), threading.Event()
        self.end: JobEnd | None = None
        self.asked: JobEnd | None = None
        """How the job is to end after a last snapshot."""
        self.proposed: JobEnd | None = None
        """How the job ends, as the leader has decided it; it counts once it is in the store."""
        self.hurry = threading.Event()
        """Set when the record in the store has to be written at once."""

    def fileno(self) -> int:
        """Return a descriptor that is readable after `deliver` and `wake`."""
        return self._wake_out.fileno()

    @property
    def over(self) -> bool:
        """Whether the end of the job is decided."""
        return self.end is not None

    def clear_wakeup(self) -> None:
        """Clear the event for which `fileno` became readable."""
        self._wake_out.recv(64)

    def ask(self, end: JobEnd) -> bool:
        """Note how the job is to end after a last snapshot; return whether this is new."""
        with self._lock:
            if self.asked is not None or self._closed.is_set():
                return False
            self.asked = end
            return True

    def propose(self, end: JobEnd) -> bool:
        """Note how the job ends, in the leader; return whether this is new."""
        with self._lock:
            if self.proposed is not None or self.end is not None or self._closed.is_set():
                return False
            self.proposed = end
        self.hurry.set()
        return True

    def retract(self) -> None:
        """Drop a proposal, because another unit leads."""
        with self._lock:
            self.proposed = None

    def wake(self) -> None:
        """Let the run loop look at this object."""
        with self._lock:
            if not self._closed.is_set():
                self._wake_in.send(b"!")

    def deliver(self, end: JobEnd) -> None:
        """Record how the job ends. The first end counts."""
        with self._lock:
            # It is set before the wakeup, which makes the run loop read it.
            if self.end is None and not self._closed.is_set():
                self.end = end
                self._wake_in.send(b"!")
        # After `end` is set: a waiting thread reads it at once.
        self._decided.set()

    def pause(self, seconds: float) -> bool:
        """Wait until the end is decided, or so long; return whether it is decided."""
        return self._decided.wait(seconds)

    def wait(self, seconds: float) -> JobEnd | None:
        """Return the end of the job if it is decided in time, else None."""
        self._decided.wait(seconds)
        return self.end

    def close(self) -> None:
        """Let all waiting threads go on."""
        self._closed.set()
        self._decided.set()
        self.hurry.set()
        # Under the lock: `deliver` on another thread must not write to a closed socket.
        with self._lock:
            self._wake_out.close()
            self._wake_in.close()
