"""The turns of pages that ask for what is new."""

import threading
import time
from collections import deque
from contextlib import suppress

TURN_S = 1.0
"""Seconds between two answers to a page."""
_AGAIN_S = 2.0
"""A page that was answered asks again within this time, unless it was closed."""
_LOOK_S = 0.01


class PageTurns:
    """Holds each request for a turn, so that pages ask about once a second.

    The end of the server ends all turns, so that each page is answered once more: with the end of a job.
    """

    def __init__(self, turn_s: float = TURN_S) -> None:
        self._turn_s, self._ending = turn_s, threading.Event()
        self._expected: deque[float] = deque(maxlen=64)
        """Until when each answered page must ask again."""

    def wait(self) -> None:
        """Wait for the turn of a page that has asked again."""
        with suppress(IndexError):
            self._expected.pop()
        self._ending.wait(self._turn_s)

    def expect(self) -> None:
        """Expect a page that is answered now to ask again, but for the last answer."""
        if not self._ending.is_set():
            self._expected.append(time.monotonic() + _AGAIN_S)

    def end(self) -> None:
        """End all turns, and wait for pages that are about to ask again."""
        self._ending.set()
        while any(until > time.monotonic() for until in tuple(self._expected)):
            time.sleep(_LOOK_S)
