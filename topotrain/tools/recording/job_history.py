"""The history of a job: the one fold of its events for pages, files and figures.

`view` is the whole history, `since` what has come behind a cursor, and `summary` the present state. All are plain data
without numbers that JSON does not have. The memory is bounded, however long the job is.
"""

from dataclasses import dataclass
from threading import RLock
from typing import Any, Protocol

from topotrain.core.events import Event, Notice, Serving, Slices, Started, StepDone, Tested
from topotrain.tools.recording.event_stories import EventStories
from topotrain.tools.recording.history_series import Moment, SeriesTable, StoryTrack
from topotrain.tools.recording.job_summary import JobCurves, JobFigures
from topotrain.tools.recording.process_table import ProcessTable, ProcessTrack
from topotrain.tools.recording.recorded_lines import RecordingEnd, RecordingHeader, TimedEvent

VIEW_VERSION = 1
_LONGEST = 500  # characters of a moment


@dataclass(frozen=True, slots=True)
class HistoryStart:
    """Where the present start of a job begins in its history.

    cursor: what has come since is of this start. at: its first second in the history. time: the same in seconds since
    1970. resumed: the job goes on from an earlier start.
    """

    cursor: int = 0
    at: float = 0.0
    time: float = 0.0
    resumed: bool = False


class HistorySource(Protocol):
    """Has the history of a job, for several threads."""

    def read(self) -> "JobHistory":
        """Return the history up to now; it may have no job yet. Raises ConfigError."""
        ...


class HistoryReader(Protocol):
    """Reads the history of a job while it runs, on threads of its own."""

    def follow(self, source: HistorySource) -> None:
        """Read a history from the first event of its job on."""
        ...

    def notices(self) -> list[Notice]:
        """Return what the user should know, once."""
        ...

    def end(self, code: int) -> None:
        """Read what is left of a complete history; code: of the job."""
        ...


class JobHistory:
    """Adds up the events of one job in the order of time, for several threads."""

    def __init__(self) -> None:
        self._number = 0
        self._lock = RLock()
        self._forget()

    def _forget(self) -> None:
        self._begun = self._number  # a cursor before this is of the former job
        self._start = HistoryStart()
        self._changed = self._number
        """The number of the event that changed a process last."""
        self._processes, self._series = ProcessTable(), SeriesTable()
        self._curves = JobCurves(self._processes, self._series)
        self._stories, self._story = EventStories(), StoryTrack()
        self._job = JobFigures()

    @property
    def has_job(self) -> bool:
        return self._job.header is not None

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended, and has said so."""
        return self._job.ended is not None

    @property
    def elapsed_s(self) -> float:
        """The seconds of all its starts up to the last event."""
        return self._job.at

    @property
    def cursor(self) -> int:
        """The number of the last event, as a view has it."""
        return self._number

    @property
    def start(self) -> HistoryStart:
        return self._start

    def lose(self) -> bool:
        """Note that the job has ended without a word; return whether that is news.

        The next event says that it goes on.
        """
        with self._lock:
            if not self.has_job or self.has_ended or self._job.lost:
                return False
            self._number += 1
            self._job.lose()
            self._end_processes("stopped")
            self._tell("failed", "", "the job is lost: its launcher is gone, and has not said how it ended")
            return True

    def add(self, timed: TimedEvent) -> None:
        event = timed.event
        with self._lock:
            self._number += 1
            if isinstance(event, RecordingHeader):
                self._on_header(event, timed.at)
                return
            self._job.reach(self._start.at + timed.at)
            if isinstance(event, RecordingEnd):
                self._on_end(event)
            else:
                self._on_event(event, self._now)

    @property
    def _now(self) -> Moment:
        return Moment(self._number, self._job.at)

    # ---- what is returned --------------------------------------------------------------------------------------------

    def view(self) -> dict[str, Any]:
        """Return the whole history, as the page about recordings describes it."""
        with self._lock:
            return self._as_data(-1, whole=True)

    def since(self, cursor: int) -> dict[str, Any]:
        """Return what has come since `cursor`, which an earlier view or delta had.

        Points, states and story have only new entries. Processes are there if they have changed.
        "whole": true says that this is another job, and all of it.
        """
        with self._lock:
            if cursor < self._begun or cursor > self._number:
                return {**self.view(), "whole": True}
            return self._as_data(cursor, whole=False)

    def summary(self) -> dict[str, Any]:
        with self._lock:
            return self._job.summary(self._processes.all())

    def process(self, name: str) -> dict[str, Any] | None:
        """Return the entry of a process in the view, or None."""
        with self._lock:
            found = self._processes.by_name.get(name)
            return None if found is None else found.as_data()

    def _as_data(self, cursor: int, whole: bool) -> dict[str, Any]:
        data: dict[str, Any] = {"version": VIEW_VERSION, "cursor": self._number}
        data["job"] = self._job.as_data(self._processes.all())
        if whole or self._changed > cursor:
            data["processes"] = [process.as_data() for process in self._processes.all()]
        data["series"] = self._series.as_data(cursor, whole)
        states = {name: process.states.since(cursor) for name, process in self._processes.by_name.items()}
        data["states"] = {name: entries for name, entries in states.items() if whole or entries}
        data["story"] = self._story.since(cursor)
        return data

    # ---- the start and the end of a job ------------------------------------------------------------------------------

    def _on_header(self, header: RecordingHeader, at: float) -> None:
        former = self._job.header
        is_new = former is None or former.started != header.started
        if former is not None and is_new:
            if header.resumed:
                # The former launcher may have been killed.
                self._curves.end(self._now)
                self._number += 1
                away_s = max(0.0, header.started - self._start.time - (self._job.at - self._start.at))
                self._tell("notice", "", f"the job was started again {away_s:.0f} s after its last event, and goes on")
            else:
                self._forget()
        if is_new:
            # The time in between is cut out: nothing happens in it on any curve.
            self._start = HistoryStart(self._number - 1, self._job.at, header.started, header.resumed)
        self._job.begin(header, self._start.at + at)
        self._processes.use(header.layout, self._job.at)
        self._changed = self._number
        for process in self._processes.all():
            # The servers inside it may be new.
            self._mirror(process, self._now)
        bound = header.job.get("staleness_bound")
        if isinstance(bound, int):
            self._series.add(self._now, "job", "staleness_bound", float(bound), 0)

    def _on_end(self, event: RecordingEnd) -> None:
        self._job.end(event.code)
        well = event.code == 0
        self._end_processes("finished" if well else "stopped")
        self._tell("ended", "", "the job has ended" + ("" if well else f" with code {event.code}"))

    def _end_processes(self, ending: str) -> None:
        """Let all processes without a reported end stop with the job."""
        for process in self._processes.all():
            if process.is_present:
                process.end(ending, self._job.at, with_job=True)
                process.states.enter(self._now, process.state)
        self._curves.end(self._now)

    # ---- events ------------------------------------------------------------------------------------------------------

    def _on_event(self, event: Event, now: Moment) -> None:
        name, known = getattr(event, "who", ""), self._processes.by_name
        told = self._stories.of(event)
        if told is not None:
            self._tell(told.kind, told.of if told.of in known else "", told.text[:_LONGEST])
        self._job.on_event(event, now.at)
        if isinstance(event, Tested):
            self._curves.add_test(event, now)
        process = known.get(name)
        if process is not None and not isinstance(event, StepDone):
            # Before the event: it may be the end of the process. A step may be the next point itself.
            self._curves.add_loss(process, now)
        for each in self._processes.on_event(event, now.at):
            self._enter(each, now)
        if process is None:
            return
        self._job.progress.on_event(event, now.at)
        self._curves.add(process, event, now)
        if isinstance(event, Started | Serving | Slices):
            self._changed = now.number

    def _enter(self, process: ProcessTrack, now: Moment) -> None:
        """Note the state of a process; a server inside a worker has the worker's."""
        hosted = process.is_server and self._processes.servers_in_workers
        if not hosted and process.states.enter(now, process.state):
            self._mirror(process, now)

    def _mirror(self, process: ProcessTrack, now: Moment) -> None:
        """Give the servers inside a worker's process its state."""
        for server in self._processes.inside(process):
            server.states.enter(now, process.states.now)

    def _tell(self, kind: str, of: str, text: str) -> None:
        self._story.add(self._now, kind, of or "job", text)
