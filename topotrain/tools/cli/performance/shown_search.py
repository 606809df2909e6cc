"""The line that shows how far a search for a layout is, or one rehearsal."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from topotrain.tools.monitor.live_terminal import redraws

if TYPE_CHECKING:
    from topotrain.tools.advice.candidate import Candidate

LATE_S = 3.0
"""Seconds after which a rehearsal is shown."""
REDRAW_S = 0.2
LINES_S = 10.0
"""Seconds from one line to the next where a line cannot be redrawn, as in a log."""
_WIDTH = 100


class RehearsalLine:
    """Shows which layout is rehearsed, or how far one rehearsal is.

    It redraws one line on stderr, or prints a line now and then where it cannot. late_s: seconds before the first one.
    """

    def __init__(self, quiet: bool = False, late_s: float = 0.0) -> None:
        self._quiet, self._redraws = quiet, redraws(sys.stderr)
        self._next = time.monotonic() + (late_s if self._redraws else LINES_S)
        self._drawn = False

    def show(self, text: str) -> None:
        """Show a text, unless the last one was shown a moment ago."""
        now = time.monotonic()
        if self._quiet or now < self._next:
            return
        self._drawn = True
        if self._redraws:
            self._next = now + REDRAW_S
            print(f"\r\033[K{text[:_WIDTH]}", end="", file=sys.stderr, flush=True)
        else:
            self._next = now + LINES_S
            print(f"topotrain: {text}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line."""
        if self._drawn and self._redraws:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def rehearsing(self, number: int, of: int, candidate: "Candidate") -> None:
        """Show a layout of an advice."""
        self.show(f"rehearsing {number} of {of}: {candidate.label}")

    def stepped(self, made: int, most: int) -> None:
        """Show the steps of a rehearsal."""
        self.show(f"rehearsing: {made:,} steps of all workers, of at most {most:,}")


@contextmanager
def shown_search(quiet: bool = False, late_s: float = 0.0) -> Iterator[RehearsalLine]:
    """Show rehearsals while they last. late_s: as for `RehearsalLine`."""
    line = RehearsalLine(quiet, late_s)
    try:
        yield line
    finally:
        line.end()
