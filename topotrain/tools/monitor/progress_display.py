"""Displays of a running job: a table that is redrawn in place, lines, or only notices.

Events only change what the report has, and drawing only reads it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from threading import Event as Flag
from threading import RLock, Thread
from time import monotonic
from typing import IO, Self

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from topotrain.core.events import Event, Output, StepDone, Unsaved
from topotrain.launch.runtime.event_records import is_silenced
from topotrain.tools.monitor.job_report import Report
from topotrain.tools.monitor.longest_wait import LongestWait, longest
from topotrain.tools.recording.event_stories import EventStories
from topotrain.tools.recording.process_table import ProcessTrack
from topotrain.tools.recording.run_progress import JobProgress

REFRESH_PER_SECOND = 4
SHOWN_S = 1.0
"""Seconds of a wait before the table shows it."""
FIRST_S, REPEAT_S = 10.0, 60.0
"""Seconds of a wait before the first plain line about it, and between later ones."""
CHECK_S = 1.0
"""Seconds between two checks whether a wait needs a plain line."""
LINE_EVERY, LINE_AT_MOST_EVERY = 5.0, 60.0
"""Seconds between two plain lines, at first and in a long job."""
_SHARE = 20
"""A line comes after a twentieth of the time so far."""
_SAID = frozenset({"incident", "recovered", "resized", "left", "joined", "skipped", "notice"})
"""Kinds of moments with a line each."""


class QuietProgress:
    """Shows the program's output, notices and recoveries, as all displays do."""

    def __init__(self, report: Report, console: Console, out: IO[str] | None = None) -> None:
        self.console, self.report = console, report
        self._stories = EventStories()
        self._main = str(report.topology.workers(0)[0])
        self._out = out
        self._inside_line = False  # the program's last output on the console had no newline
        self._writing = RLock()
        self.run = JobProgress(monotonic())

    def __call__(self, event: Event) -> None:
        """Add an event to the report, and show it unless the logger's level silences it."""
        self.report(event)
        if is_silenced(event):
            return
        self.run.on_event(event, monotonic())
        if isinstance(event, Output) and event.who == self._main:
            self._print(event)
        story = self._stories.of(event)
        # A snapshot that cannot be taken is the answer to a request.
        if story is not None and story.kind in _SAID and not isinstance(event, Unsaved):
            self._say(f"topotrain: {story.of}: {story.text}" if story.kind == "notice" else f"topotrain: {story.text}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._name_slow()

    def wait(self) -> LongestWait | None:
        return longest(self.report.states.alone(), self.report.topology.cluster, monotonic())

    def _name_slow(self) -> None:
        for slow in self.report.stragglers:
            self._say(f"topotrain: {slow.words()}")

    def _say(self, text: str) -> None:
        with self._writing:
            # Else the line would go on behind the program's progress bar.
            if self._inside_line:
                self.console.file.write("\n")
                self._inside_line = False
            self.console.print(Text(text), soft_wrap=True)

    def _print(self, event: Output) -> None:
        """Write a program's output unchanged."""
        file = self._out if event.stream == "stdout" and self._out is not None else self.console.file
        with self._writing:
            file.write(event.text)
            file.flush()
            if file is self.console.file:
                self._inside_line = not event.text.endswith("\n")


class PlainProgress(QuietProgress):
    """Prints a line now and then, less often in a long job, and a last one.

    A long wait has a line of its own after FIRST_S, and every REPEAT_S.
    """

    def __init__(self, report: Report, console: Console, out: IO[str] | None = None) -> None:
        super().__init__(report, console, out)
        self._last_line = 0.0
        self._waits_for, self._next_wait = "", 0.0
        self._over = Flag()
        self._thread = Thread(target=self._check_on, name="waits", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        # By events and not by a timer: a job that stands still has no new numbers.
        if isinstance(event, StepDone) and self.run.elapsed(monotonic()) - self._last_line >= self._interval():
            self._line()

    def _check_on(self) -> None:
        # A job that waits has no events.
        while not self._over.wait(CHECK_S):
            self.check()

    def check(self) -> None:
        """Print what the job waits for, if it waits long."""
        wait, now = self.wait(), monotonic()
        # A job with steps of half a minute waits in each of them, which is worth a line a minute.
        if wait is None or wait.seconds < FIRST_S or (wait.what == self._waits_for and now < self._next_wait):
            return
        self._waits_for, self._next_wait = wait.what, now + REPEAT_S
        self._say(f"topotrain: {wait.words()}")

    def _interval(self) -> float:
        # A log of a night would have thousands of lines otherwise.
        return min(max(LINE_EVERY, self._last_line / _SHARE), LINE_AT_MOST_EVERY)

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        if any(each.word != "starting" for each in self.report.states.workers()):  # a refused job has no progress
            self._line()
        self._name_slow()

    def _line(self) -> None:
        now = monotonic()
        self._last_line = self.run.elapsed(now)
        self._say(f"{self._last_line:6.1f} s  {self.run.words(now)}  {describe(self.report.states.workers())}")


class _Patient(Live):
    """Skips drawing while the terminal has not taken the last drawing."""

    def refresh(self) -> None:
        if not getattr(self.console.file, "behind", False):
            super().refresh()


class LiveTable(QuietProgress):
    """Shows one row per worker, redrawn in place, and the program's unfinished line.

    The main worker's own output is shown above the table. The terminal is restored when the context ends, however the
    job ended.
    """

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


def describe(workers: Sequence[ProcessTrack]) -> str:
    low, high = min(each.figures.step for each in workers), max(each.figures.step for each in workers)
    steps = f"step {high}" if low == high else f"steps {low} to {high}"
    # As on the page: those of dead and absent workers are figures of an earlier time.
    counted = [each for each in workers if each.ending not in ("failed", "away")]
    losses = [each.figures.loss for each in counted if each.figures.loss is not None]
    loss = f"loss {sum(losses) / len(losses):.4f}  " if losses else ""
    active = [each for each in counted if each.word == "training"] or counted
    rate = sum(each.figures.samples_per_s or 0.0 for each in active)
    mean = sum(each.figures.staleness.mean for each in workers) / len(workers)
    worst = max(each.figures.staleness.max for each in workers)
    counts = Counter(each.word for each in workers)
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    return f"{steps}  {loss}{rate:,.0f} samples/s  staleness {mean:.2f} (max {worst})  workers: {states}"
