"""The line that shows how far a search for a layout is."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from topotrain.tools.monitor.live_terminal import redraws

if TYPE_CHECKING:
    from topotrain.tools.advice.candidate import Candidate

_WIDTH = 100


class SearchLine:
    """Redraws one line on stderr, on a terminal that can."""

    def __init__(self, quiet: bool = False) -> None:
        self._shows = not quiet and redraws(sys.stderr)

    def rehearsing(self, number: int, of: int, candidate: "Candidate") -> None:
        """As `SearchListener.rehearsing`."""
        self._draw(f"rehearsing {number} of at most {of}: {candidate.label}")

    def end(self) -> None:
        """Clear the line."""
        self._draw("")

    def _draw(self, text: str) -> None:
        if self._shows:
            print(f"\r\033[K{text[:_WIDTH]}", end="", file=sys.stderr, flush=True)


@contextmanager
def shown_search(quiet: bool = False) -> Iterator[SearchLine]:
    """Show a search while it lasts."""
    line = SearchLine(quiet)
    try:
        yield line
    finally:
        line.end()
