"""What topotrain itself writes on a terminal: lines, errors, and one line that is redrawn.

stdout is for the program, or for JSON where the user asks for it. Everything else goes to stderr.

A display is redrawn in place where that is possible. Elsewhere each drawing would stay, one after another: in a pipe or
file, on a terminal that cannot move its cursor, in the log of a CI system, and below the cell of a notebook. Some of
these look like terminals to a process.
"""

import os
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from topotrain.config.plain_text import printable

if TYPE_CHECKING:
    from rich.console import Console

DUMB = frozenset({"", "dumb", "unknown"})
"""Values of TERM for terminals that cannot move their cursor."""
NOTEBOOK = ("JPY_PARENT_PID", "JPY_SESSION_NAME")
"""Variables of a Jupyter kernel, which gives `!command` a terminal of its own and shows what it writes there."""
_OFF = frozenset({"", "0", "false", "no"})
FULL_WIDTH = 160
REDRAW_S = 0.2
LINES_S = 10.0
"""Seconds from one line to the next where a line cannot be redrawn, as in a log."""


def redraws(file: IO[Any], environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a display on `file` can be redrawn in place."""
    # NO_COLOR has no part in this: it is about colors only.
    captured = any(name in environ for name in NOTEBOOK) or environ.get("CI", "").lower() not in _OFF
    return not captured and environ.get("TERM", "") not in DUMB and not file.closed and file.isatty()


def console(stderr: bool = False) -> "Console":
    """Return a console that cuts no table in a file or a pipe, nor redraws there."""
    from rich.console import Console  # here: each command of the program imports this module

    if redraws(sys.stderr if stderr else sys.stdout):
        return Console(stderr=stderr, highlight=False)
    # rich would follow FORCE_COLOR into a pipe, and would make HTML in a notebook. It assumes 80 columns elsewhere, and
    # would cut a table in a log.
    return Console(stderr=stderr, highlight=False, width=FULL_WIDTH, force_terminal=False, force_jupyter=False)


def say(text: str) -> None:
    print(f"topotrain: {text}", file=sys.stderr, flush=True)


def complain(text: str) -> None:
    """Print an error to stderr, in one block."""
    # A part of the text may come from another process or a file.
    first, *rest = printable(text, keep="\t\n").rstrip().splitlines() or [""]
    lines = [f"topotrain: error: {first}", *textwrap.indent("\n".join(rest), "  ").splitlines()]
    print("\n".join(lines), file=sys.stderr, flush=True)


@contextmanager
def complaining_of(path: Path) -> Iterator[None]:
    """Print one line if writing the file fails, so that other results are still shown."""
    try:
        yield
    except OSError as error:
        complain(f"{path}: cannot be written ({error.strerror})")


class ProgressLine:
    """Redraws one line on stderr, or prints lines where it cannot.

    Args:
        quiet: nothing is shown.
        late_s: seconds before `show` shows something.
    """

    def __init__(self, quiet: bool = False, late_s: float = 0.0) -> None:
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
