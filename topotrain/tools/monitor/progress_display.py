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
from topotrain.core.events import (
    Event,
    Finished,
    Incident,
    Joined,
    Left,
    Notice,
    Output,
    Recovered,
    Resized,
    Skipped,
    StepDone,
)
from topotrain.launch.recovery.resize import resized_layout
from topotrain.tools.monitor.job_report import moved
from topotrain.tools.monitor.progress.longest_wait import JobWaits, WaitLines
from topotrain.tools.monitor.progress.run_progress import RunProgress
from topotrain.tools.monitor.progress.worker_rows import WorkerRows, describe
from topotrain.tools.monitor.stragglers import stragglers

LINE_EVERY, LINE_AT_MOST_EVERY = 5.0, 60.0
"""Seconds between two plain lines, at first and in a long job."""
_SHARE = 20
"""A line comes after a twentieth of the time so far."""

SKIPS_SAID = 10
"""The number of skipped steps of a worker with a line each. After these only every tenth gets one."""


class QuietProgress:
    """Shows the program's output, notices and recoveries, as all displays do."""

    def __init__(self, topology: Topology, console: Console, out: IO[str] | None = None) -> None:
        self.console = console
        self.rows = WorkerRows(topology)
        self._topology = topology
        self._own: dict[str, float] = {}  # a worker's own seconds for a step
        self._changes: set[int] = set()  # resizes, which have a Recovered event like losses
        self._main = str(topology.workers(0)[0])
        self._out = out
        self._inside_line = False  # the program's last output on the console had no newline
        self._writing = RLock()
        self.waits = JobWaits(topology, monotonic())
        self.run = RunProgress(monotonic())

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
            case Notice():
                self._say(f"topotrain: {event.who}: {event.text}")
            case Skipped() if _is_said(event):
                self._say(f"topotrain: {skip(event)}")
            case Incident():
                self._say(f"topotrain: {event.what}; {event.action}")
            case Resized():
                self._resized(event)
            case Recovered():
                self._say(f"topotrain: {recovery(event, 'change' if event.number in self._changes else 'loss')}")
            case Left():
                self._say(f"topotrain: group {event.group} {event.how}; the others continue")
            case Joined():
                self._say(f"topotrain: group {event.group} joins (incarnation {event.incarnation})")
            case _:
                pass

    def check(self) -> None:
        """Show nothing: a wait is progress."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._name_slow()

    def _resized(self, event: Resized) -> None:
        self._changes.add(event.number)
        self._topology = resized_layout(self._topology, event.workers)
        self.rows.lay_out(self._topology)
        self.waits.lay_out(self._topology, monotonic())
        now = {str(worker) for worker in self._topology.workers(0)}
        # Those of workers that have left would make the others look fast or slow.
        self._own = {who: own for who, own in self._own.items() if who in now}
        many = f"nworkers_per_group: {event.workers}"
        self._say(f"topotrain: {moved(event)}; the job goes on after step {event.step} with {many}")

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


def recovery(event: Recovered, what: str = "loss") -> str:
    """Describe the cost of a recovery."""
    others = f", the others were without a step for at most {event.others_s:.1f} s" if event.others_s else ""
    return f"training again {event.waited_s:.1f} s after that {what}{others}"


def skip(event: Skipped) -> str:
    """Describe a skipped step."""
    whose = f"of {event.parameter}" if event.parameter else "of a table's rows"
    what = "the gradient" if event.by else "its group's sum of the gradients"
    many = f" (its skipped step number {event.total})" if event.total > 1 else ""
    return f"{event.who}: {what} {whose} is not finite in step {event.step}: the step is skipped{many}"


def _is_said(event: Skipped) -> bool:
    """Return whether to show a skipped step, once for a group."""
    # Of a group only the worker with the bad gradient is shown, or else its first worker.
    teller = event.by == event.who or (not event.by and event.who.endswith("/0"))
    return teller and (event.total <= SKIPS_SAID or event.total % SKIPS_SAID == 0)
