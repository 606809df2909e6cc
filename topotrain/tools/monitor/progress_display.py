"""The display of a running job: a live table on a terminal, plain lines elsewhere.

The main worker's own output is shown above the table. Events only change rows, and drawing only reads them. The
terminal is restored when the context ends, however the job ended.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Event as Flag
from threading import RLock, Thread
from time import monotonic
from types import TracebackType
from typing import IO, Protocol, Self

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from topotrain.config.topology import Topology, layout
from topotrain.core.events import (
    Event,
    Exited,
    Failed,
    Finished,
    Incident,
    Joined,
    Left,
    Notice,
    Output,
    Recovered,
    Resized,
    Skipped,
    Started,
    StepDone,
)
from topotrain.launch.recovery.resize import resized
from topotrain.tools.monitor.job_report import moved
from topotrain.tools.monitor.longest_wait import JobWaits, WaitLines
from topotrain.tools.monitor.stragglers import stragglers

LINE_EVERY, LINE_AT_MOST_EVERY = 5.0, 60.0
"""Seconds between two plain lines, at first and in a long job."""
_SHARE = 20
"""A line comes after a twentieth of the time so far."""

REFRESH_PER_SECOND = 4

SHOWN_S = 1.0
"""Seconds of a wait before the table shows it."""
CHECK_S = 1.0
"""Seconds between two checks whether a wait needs a plain line."""

SKIPS_SAID = 10
"""The number of skipped steps of a worker with a line each. After these only every tenth gets one."""


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """The state of one worker."""

    unit: int
    who: str
    step: int = 0
    loss: float | None = None
    samples_per_s: float = 0.0  # mean since its first step
    staleness_mean: float = 0.0
    staleness_max: int = 0
    state: str = "starting"


class WorkerRows:
    """The rows of all workers."""

    def __init__(self, topology: Topology) -> None:
        self._rows: dict[str, WorkerRow] = {}
        self.lay_out(topology)

    def lay_out(self, topology: Topology) -> None:
        """Use this layout from now on. Rows of workers that stay are kept."""
        workers = [worker for unit in topology.units for worker in unit.workers]
        rows = [WorkerRow(topology.unit_of(worker), str(worker)) for worker in workers]
        self._rows = {row.who: replace(self._rows.get(row.who, row), unit=row.unit) for row in rows}

    def __call__(self, event: Event) -> None:
        """Update the rows by one event."""
        match event:
            case Started(who=who) if who in self._rows:
                self._change(who, state="preparing")
            case StepDone(who=who) if who in self._rows:
                self._rows[who] = _stepped(self._rows[who], event)
            case Finished(who=who) if who in self._rows:
                self._change(who, state="finished", step=event.steps)
            case Failed(who=who) if who in self._rows:
                self._change(who, state="failed")
            case Left(group=group):
                for who in self._rows:
                    if who.startswith(f"worker {group}/"):
                        self._change(who, state="away")
            case Exited(who=who) if who in self._rows and event.code != 0 and self._rows[who].state != "failed":
                self._change(who, state="stopped")  # a failed worker has reported it; the others are being stopped
            case _:
                pass

    def all(self) -> list[WorkerRow]:
        """Return every worker's row, in layout order."""
        return list(self._rows.values())

    def _change(self, who: str, state: str, step: int | None = None) -> None:
        row = self._rows[who]
        # Replaced and never changed: the thread that draws reads rows without a lock.
        self._rows[who] = replace(row, state=state, step=row.step if step is None else step)


def _stepped(row: WorkerRow, event: StepDone) -> WorkerRow:
    return replace(
        row,
        step=event.step,
        loss=row.loss if event.loss is None else event.loss,
        samples_per_s=event.samples / event.time if event.time > 0 else 0.0,
        staleness_mean=event.staleness_mean,
        staleness_max=event.staleness_max,
        state="training",
    )


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

    def __call__(self, event: Event) -> None:
        """Show one event."""
        self.rows(event)
        self.waits.on_event(event, monotonic())
        match event:
            case Output(who=who) if who == self._main:
                self._print(event)
            case StepDone(own_s=float(own)) | Finished(own_s=float(own)):
                self._own[event.who] = own
            case Notice():
                self._print_line(f"topotrain: {event.who}: {event.text}")
            case Skipped() if _is_said(event):
                self._print_line(f"topotrain: {skip(event)}")
            case Incident():
                self._print_line(f"topotrain: {event.what}; {event.action}")
            case Resized():
                self._resized(event)
            case Recovered():
                self._print_line(f"topotrain: {recovery(event, 'change' if event.number in self._changes else 'loss')}")
            case Left():
                self._print_line(f"topotrain: group {event.group} {event.how}; the others continue")
            case Joined():
                self._print_line(f"topotrain: group {event.group} joins (incarnation {event.incarnation})")
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
        self._topology = layout(resized(self._topology.cluster, event.workers))
        self.rows.lay_out(self._topology)
        self.waits.lay_out(self._topology, monotonic())
        now = {str(worker) for worker in self._topology.workers(0)}
        # Those of workers that have left would make the others look fast or slow.
        self._own = {who: own for who, own in self._own.items() if who in now}
        many = f"nworkers_per_group: {event.workers}"
        self._print_line(f"topotrain: {moved(event)}; the job goes on after step {event.step} with {many}")

    def _name_slow(self) -> None:
        for slow in stragglers(self._topology, self._own):
            self._print_line(f"topotrain: {slow.words()}")

    def _print_line(self, text: str) -> None:
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
        self._began = self._last = monotonic()
        self._wait_lines = WaitLines()

    def __call__(self, event: Event) -> None:
        """Show one event. A step prints a new line if the last one is old enough."""
        super().__call__(event)
        # By events and not by a timer: a job that stands still has no new numbers.
        if isinstance(event, StepDone) and monotonic() - self._last >= self._interval():
            self._line()

    def check(self) -> None:
        """Print what the job waits for, if it waits long."""
        now = monotonic()
        line = self._wait_lines.due(self.waits.longest(now), now)
        if line:
            self._print_line(f"topotrain: {line}")

    def _interval(self) -> float:
        # A log of a night would have thousands of lines otherwise.
        return min(max(LINE_EVERY, (self._last - self._began) / _SHARE), LINE_AT_MOST_EVERY)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if any(row.state != "starting" for row in self.rows.all()):  # a refused job has no progress
            self._line()
        self._name_slow()

    def _line(self) -> None:
        self._last = monotonic()
        self._print_line(f"{self._last - self._began:6.1f} s  {describe(self.rows.all())}")


class _Patient(Live):
    """Skips drawing while the terminal has not taken the last drawing."""

    def refresh(self) -> None:
        if not getattr(self.console.file, "behind", False):
            super().refresh()


class LiveTable(QuietProgress):
    """Shows one row per worker, redrawn in place, and the program's unfinished line."""

    def __init__(self, topology: Topology, console: Console, out: IO[str] | None = None) -> None:
        super().__init__(topology, console, out)
        self._unfinished, self._over = "", False
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The last drawing stays on the terminal, and waits for nothing.
        self._over = True
        # First: what is printed after it stays below the table.
        self._live.stop()
        if self._unfinished:
            self.console.print(Text.from_ansi(self._unfinished), soft_wrap=True)
        self._name_slow()

    def _renderable(self) -> Group:
        parts: list[Table | Text] = [draw(self.rows.all())]
        wait = None if self._over else self.waits.longest(monotonic())
        if wait is not None and wait.seconds >= SHOWN_S:
            parts.append(Text(wait.words(), style="dim"))
        if self._unfinished:
            parts.append(Text.from_ansi(self._unfinished))
        return Group(*parts)

    def _print(self, event: Output) -> None:
        """Print complete lines above the table, without markup and wrapping."""
        *lines, rest = (self._unfinished + event.text).split("\n")
        # Of a line that is rewritten, as by a progress bar, only the last state counts.
        self._unfinished = _last_state(rest)
        for line in lines:
            self.console.print(Text.from_ansi(_last_state(line)), soft_wrap=True)


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


def _last_state(line: str) -> str:
    # Text before a carriage return has been overwritten; one at the end overwrites nothing yet.
    return line.rstrip("\r").rsplit("\r", 1)[-1]


def draw(rows: Iterable[WorkerRow]) -> Table:
    """Return the table of a live job."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("unit", justify="right")
    table.add_column("worker")
    for title in ("step", "loss", "samples/s", "staleness", "max"):
        table.add_column(title, justify="right")
    table.add_column("state")
    for row in rows:
        table.add_row(*_cells(row), Text(row.state, style="red" if row.state == "failed" else ""))
    return table


def _cells(row: WorkerRow) -> tuple[str, ...]:
    return (
        str(row.unit),
        row.who.removeprefix("worker "),
        str(row.step),
        "–" if row.loss is None else f"{row.loss:.4f}",
        f"{row.samples_per_s:,.0f}",
        f"{row.staleness_mean:.2f}",
        str(row.staleness_max),
    )


def describe(rows: Sequence[WorkerRow]) -> str:
    """Describe all workers in one line."""
    low, high = min(row.step for row in rows), max(row.step for row in rows)
    steps = f"step {high}" if low == high else f"steps {low} to {high}"
    losses = [row.loss for row in rows if row.loss is not None]
    loss = f"loss {sum(losses) / len(losses):.4f}  " if losses else ""
    rate = sum(row.samples_per_s for row in rows)
    mean = sum(row.staleness_mean for row in rows) / len(rows)
    worst = max(row.staleness_max for row in rows)
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.state] = counts.get(row.state, 0) + 1
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    return f"{steps}  {loss}{rate:,.0f} samples/s  staleness {mean:.2f} (max {worst})  workers: {states}"
