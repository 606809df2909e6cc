"""Displays that print lines, for a terminal, a pipe, a file or a notebook.

`progress/live_table.py` has the display that is redrawn in place.
"""

from threading import RLock
from time import monotonic
from types import TracebackType
from typing import IO, Self

from rich.console import Console
from rich.text import Text

from topotrain.config.topology import Topology
from topotrain.core.events import Event, Finished, Output, Resized, StepDone, Unsaved
from topotrain.launch.recovery.resize import resized_layout
from topotrain.tools.monitor.progress.longest_wait import JobWaits, WaitLines
from topotrain.tools.monitor.progress.worker_rows import WorkerRows, describe
from topotrain.tools.monitor.stragglers import stragglers
from topotrain.tools.recording.event_stories import EventStories
from topotrain.tools.recording.run_progress import JobProgress

LINE_EVERY, LINE_AT_MOST_EVERY = 5.0, 60.0
"""Seconds between two plain lines, at first and in a long job."""
_SHARE = 20
"""A line comes after a twentieth of the time so far."""
_SAID = frozenset({"incident", "recovered", "resized", "left", "joined", "skipped", "notice"})
"""Kinds of moments with a line each."""


class QuietProgress:
    """Shows the program's output, notices and recoveries, as all displays do."""

    def __init__(self, topology: Topology, console: Console, out: IO[str] | None = None) -> None:
        self.console = console
        self.rows = WorkerRows(topology)
        self._topology = topology
        self._own: dict[str, float] = {}  # a worker's own seconds for a step
        self._stories = EventStories()
        self._main = str(topology.workers(0)[0])
        self._out = out
        self._inside_line = False  # the program's last output on the console had no newline
        self._writing = RLock()
        self.waits = JobWaits(topology, monotonic())
        self.run = JobProgress(monotonic())

    def __call__(self, event: Event) -> None:
        """Show one event."""
        self.rows(event)
        now = monotonic()
        self.waits.on_event(event, now)
        self.run.on_event(event, now)
        match event:
            case Output(who=who) if who == self._main:
                self._print(event)
            case StepDone(own_s=float(own)) | Finished(own_s=float(own)):
                self._own[event.who] = own
            case Resized():
                self._resized(event)
            case _:
                pass
        story = self._stories.of(event)
        # A snapshot that cannot be taken is the answer to a request.
        if story is not None and story.kind in _SAID and not isinstance(event, Unsaved):
            self._say(f"topotrain: {story.of}: {story.text}" if story.kind == "notice" else f"topotrain: {story.text}")

    def check(self) -> None:
        """Show nothing: a wait is progress."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._name_slow()

    def _resized(self, event: Resized) -> None:
        self._topology = resized_layout(self._topology, event.workers)
        self.rows.lay_out(self._topology)
        self.waits.lay_out(self._topology, monotonic())
        now = {str(worker) for worker in self._topology.workers(0)}
        # Those of workers that have left would make the others look fast or slow.
        self._own = {who: own for who, own in self._own.items() if who in now}

    def _name_slow(self) -> None:
        for slow in stragglers(self._topology, self._own):
            self._say(f"topotrain: {slow.words()}")

    def _say(self, text: str) -> None:
        """Print a line of the display."""
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

    def __init__(self, topology: Topology, console: Console, out: IO[str] | None = None) -> None:
        super().__init__(topology, console, out)
        self._last_line = 0.0
        self._wait_lines = WaitLines()

    def __call__(self, event: Event) -> None:
        """Show one event. A step prints a new line if the last one is old enough."""
        super().__call__(event)
        # By events and not by a timer: a job that stands still has no new numbers.
        if isinstance(event, StepDone) and self.run.elapsed(monotonic()) - self._last_line >= self._interval():
            self._line()

    def check(self) -> None:
        """Print what the job waits for, if it waits long."""
        now = monotonic()
        line = self._wait_lines.due(self.waits.longest(now), now)
        if line:
            self._say(f"topotrain: {line}")

    def _interval(self) -> float:
        # A log of a night would have thousands of lines otherwise.
        return min(max(LINE_EVERY, self._last_line / _SHARE), LINE_AT_MOST_EVERY)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if any(row.state != "starting" for row in self.rows.all()):  # a refused job has no progress
            self._line()
        self._name_slow()

    def _line(self) -> None:
        now = monotonic()
        self._last_line = self.run.elapsed(now)
        self._say(f"{self._last_line:6.1f} s  {self.run.words(now)}  {describe(self.rows.all())}")
