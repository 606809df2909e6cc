"""The line that shows what a command does before it prints its result."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from topotrain.tools.monitor.live_terminal import redraws
from topotrain.tools.monitor.monitored_run import say

REDRAW_S = 0.2
LINES_S = 10.0
"""Seconds from one line to the next where a line cannot be redrawn, as in a log."""


class ProgressLine:
    """Redraws one line on stderr, or prints lines where it cannot.

    Args:
        quiet: nothing is shown.
        late_s: seconds before `show` shows something.
    """

    def __init__(self, quiet: bool = False, late_s: float = 0.0) -> None:
        # Here, because each command of the program imports this module.
        from topotrain.tools.monitor.result_tables import console

        self._quiet = quiet
        self._status = console(stderr=True).status("") if redraws(sys.stderr) else None
        self._next = time.monotonic() + (LINES_S if self._status is None else late_s)

    def stage(self, text: str) -> None:
        if self._status is None:
            self.note(text)
        elif not self._quiet:
            from rich.markup import escape

            self._status.update(escape(text))
            self._status.start()

    def show(self, text: str) -> None:
        """Show how far something is, unless a text was shown a moment ago."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + (LINES_S if self._status is None else REDRAW_S)
            self.stage(text)

    def note(self, text: str) -> None:
        if not self._quiet:
            say(text)  # above the line that is redrawn

    def end(self) -> None:
        if self._status is not None:
            self._status.stop()


@contextmanager
def progress_line(quiet: bool = False, late_s: float = 0.0) -> Iterator[ProgressLine]:
    """Yield a line, and clear it at the end of the block."""
    line = ProgressLine(quiet, late_s)
    try:
        yield line
    finally:
        line.end()
