"""Displays that print lines, for a terminal, a pipe, a file or a notebook.

`progress/live_table.py` has the display that is redrawn in place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event as Flag
from threading import RLock, Thread
from time import monotonic
from typing import IO, Self

from rich.console import Console
from rich.text import Text

from topotrain.core.events import Event, Output, StepDone, Unsaved
from topotrain.launch.runtime.event_records import is_silenced
from topotrain.tools.monitor.job_report import Report
from topotrain.tools.monitor.progress.longest_wait import LongestWait, WaitLines, longest
from topotrain.tools.monitor.progress.process_states import describe
from topotrain.tools.recording.event_stories import EventStories
from topotrain.tools.recording.run_progress import JobProgress

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

    def check(self) -> None:
        """Show what is due by time, on any thread. Here nothing is: a wait is progress."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._name_slow()

    def wait(self) -> LongestWait | None:
        return longest(self.report.states.shown(), self.report.topology.cluster, monotonic())

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

    A long wait has a line of its own.
    """

    def __init__(self, report: Report, console: Console, out: IO[str] | None = None) -> None:
        super().__init__(report, console, out)
        self._last_line = 0.0
        self._wait_lines = WaitLines()

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        # By events and not by a timer: a job that stands still has no new numbers.
        if isinstance(event, StepDone) and self.run.elapsed(monotonic()) - self._last_line >= self._interval():
            self._line()

    def check(self) -> None:
        """Print what the job waits for, if it waits long."""
        line = self._wait_lines.due(self.wait(), monotonic())
        if line:
            self._say(f"topotrain: {line}")

    def _interval(self) -> float:
        # A log of a night would have thousands of lines otherwise.
        return min(max(LINE_EVERY, self._last_line / _SHARE), LINE_AT_MOST_EVERY)

    def __exit__(self, *error: object) -> None:
        if any(each.word != "starting" for each in self.report.states.workers()):  # a refused job has no progress
            self._line()
        self._name_slow()

    def _line(self) -> None:
        now = monotonic()
        self._last_line = self.run.elapsed(now)
        self._say(f"{self._last_line:6.1f} s  {self.run.words(now)}  {describe(self.report.states.workers())}")


@contextmanager
def checked(shown: QuietProgress) -> Iterator[None]:
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
