"""The display that is redrawn in place, on a terminal.

The main worker's own output is shown above the table. Events only change rows, and drawing only reads them. The
terminal is restored when the context ends, however the job ended.
"""

from collections.abc import Iterable
from time import monotonic
from typing import IO, Self

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from topotrain.core.events import Output
from topotrain.tools.monitor.job_report import Report
from topotrain.tools.monitor.progress_display import PlainProgress, QuietProgress
from topotrain.tools.recording.process_table import ProcessTrack

REFRESH_PER_SECOND = 4

SHOWN_S = 1.0
"""Seconds of a wait before the table shows it."""


class _Patient(Live):
    """Skips drawing while the terminal has not taken the last drawing."""

    def refresh(self) -> None:
        if not getattr(self.console.file, "behind", False):
            super().refresh()


class LiveTable(QuietProgress):
    """Shows one row per worker, redrawn in place, and the program's unfinished line."""

    def __init__(self, report: Report, console: Console, out: IO[str] | None = None) -> None:
        super().__init__(report, console, out)
        self._unfinished = ""
        self._ended: float | None = None
        self._live = _Patient(
            console=console,
            get_renderable=self._renderable,
            # Not once per event: drawing would slow the job down.
            refresh_per_second=REFRESH_PER_SECOND,
            # The program's output comes as events, so rich need not replace the streams of this process.
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        # The last drawing stays on the terminal, and waits for nothing.
        self._ended = monotonic()
        # First: what is printed after it stays below the table.
        self._live.stop()
        if self._unfinished:
            self.console.print(Text.from_ansi(self._unfinished), soft_wrap=True)
        self._name_slow()

    def _renderable(self) -> Group:
        # Above the table: of one that is higher than the terminal the end is not shown.
        parts: list[Table | Text] = [Text(self.run.header(self._now()), no_wrap=True, overflow="ellipsis")]
        if self._ended is None:
            # The line is there without a wait, too, so that the table does not move up and down.
            parts.append(Text(self._wait(), style="dim", no_wrap=True, overflow="ellipsis"))
        parts.append(draw(self.report.states.workers()))
        if self._unfinished:
            parts.append(Text.from_ansi(self._unfinished))
        return Group(*parts)

    def _now(self) -> float:
        return monotonic() if self._ended is None else self._ended

    def _wait(self) -> str:
        wait = self.wait()
        return "" if wait is None or wait.seconds < SHOWN_S else wait.words()

    def _print(self, event: Output) -> None:
        """Print complete lines above the table, without markup and wrapping."""
        *lines, rest = (self._unfinished + event.text).split("\n")
        # Of a line that is rewritten, as by a progress bar, only the last state counts.
        self._unfinished = _last_state(rest)
        for line in lines:
            self.console.print(Text.from_ansi(_last_state(line)), soft_wrap=True)


def _last_state(line: str) -> str:
    # Text before a carriage return has been overwritten; one at the end overwrites nothing yet.
    return line.rstrip("\r").rsplit("\r", 1)[-1]


def progress(report: Report, console: Console, quiet: bool = False, out: IO[str] | None = None) -> QuietProgress:
    """Return the display of a report for `console`: a table, lines, or only notices.

    out: receives the main worker's stdout; None: the file that `console` writes to.
    """
    if quiet:
        return QuietProgress(report, console, out)
    return LiveTable(report, console, out) if console.is_terminal else PlainProgress(report, console, out)


def draw(workers: Iterable[ProcessTrack]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("unit", justify="right")
    table.add_column("worker")
    for title in ("step", "loss", "samples/s", "staleness", "max"):
        table.add_column(title, justify="right")
    table.add_column("state")
    for each in workers:
        table.add_row(*_cells(each), Text(each.word, style="red" if each.word == "failed" else ""))
    return table


def _cells(worker: ProcessTrack) -> tuple[str, ...]:
    figures = worker.figures
    return (
        str(worker.unit),
        worker.who.removeprefix("worker "),
        str(figures.step),
        "–" if figures.loss is None else f"{figures.loss:.4f}",
        f"{figures.samples_per_s or 0.0:,.0f}",
        f"{figures.staleness.mean:.2f}",
        str(figures.staleness.max),
    )
