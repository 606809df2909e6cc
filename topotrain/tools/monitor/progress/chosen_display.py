"""The display of a running job that fits its console: a table, lines, or errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event as Flag
from threading import Thread
from types import TracebackType
from typing import IO, Protocol, Self

from rich.console import Console

from topotrain.config.topology import Topology
from topotrain.core.events import Event
from topotrain.tools.monitor.progress.live_table import LiveTable
from topotrain.tools.monitor.progress_display import PlainProgress, QuietProgress

CHECK_S = 1.0
"""Seconds between two checks whether a wait needs a plain line."""


class Progress(Protocol):
    """A display: a context manager that is called with events."""

    def __call__(self, event: Event) -> None: ...

    def check(self) -> None:
        """Show what is due by time, on any thread."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def progress(topology: Topology, console: Console, quiet: bool = False, out: IO[str] | None = None) -> Progress:
    """Return the display for `console`.

    out: receives the main worker's stdout; None: the file that `console` writes to.
    """
    if quiet:
        return QuietProgress(topology, console, out)
    return LiveTable(topology, console, out) if console.is_terminal else PlainProgress(topology, console, out)


@contextmanager
def checked(shown: Progress) -> Iterator[None]:
    """Check a display every CHECK_S: a job that waits has no events."""
    over = Flag()

    def check() -> None:
        while not over.wait(CHECK_S):
            shown.check()

    thread = Thread(target=check, name="waits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
