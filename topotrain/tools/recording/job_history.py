"""The history of a job: the one fold of its events for pages, files and figures.

`view` is the whole history, `since` what has come behind a cursor, and `summary` the present state. All are plain data
without numbers that JSON does not have. The memory is bounded, however long the job is.
"""

import math
from collections.abc import Sequence
from typing import Any

from topotrain.core.events import (
    Ending,
    Event,
    Exited,
    Failed,
    Finished,
    Frozen,
    Incident,
    Joined,
    Left,
    Logged,
    Lost,
    Recovered,
    Resources,
    Saved,
    ServerLoad,
    Serving,
    Slices,
    Started,
    StepDone,
    Tested,
    Thawed,
    Traffic,
    Traveled,
    Waits,
)
from topotrain.tools.recording.event_stories import story_of
from topotrain.tools.recording.group_loss import GroupLoss
from topotrain.tools.recording.history_series import (
    ALL_POINTS,
    FEWEST_POINTS,
    MOST_POINTS,
    SeriesPoint,
    StoryEntry,
    StoryTrack,
    ThinnedSeries,
)
from topotrain.tools.recording.job_summary import IncidentRecord, JobFigures, ProcessSummary
from topotrain.tools.recording.process_figures import ProcessTrack
from topotrain.tools.recording.recorded_layout import RecordedLayout
from topotrain.tools.recording.recorded_lines import RecordingEnd, RecordingHeader, TimedEvent
from topotrain.tools.recording.travel_track import TravelTrack

VIEW_VERSION = 1
MOST_SERIES = 20_000
APPLIES_S = 2.0
"""Seconds without news of a server after which it waits."""
UNITS = {
    "samples_per_s": "samples/s",
    "staleness_mean": "versions",
    "staleness_p95": "versions",
    "staleness_max": "versions",
    "staleness_bound": "versions",
    "bytes_per_s": "B/s",
    "memory_bytes": "B",
    "updates_per_s": "updates/s",
}


class JobHistory:
    """Adds up the events of one job, in the order of time."""

    def __init__(self) -> None:
        self._number = 0
        self._forget()

    def _forget(self) -> None:
        """Begin the history of another job."""
        self._begun = self._number  # a cursor before this is of the former job
        self._offset = 0.0
        self._processes: dict[str, ProcessTrack] = {}
        self._groups: dict[int, list[ProcessTrack]] = {}
        """The workers of each group."""
        self._layout = RecordedLayout({})
        self._connections: dict[tuple[str, str], None] = {}
        self._placed = self._number
        """The number of the event that changed the layout last."""
        self._series: dict[str, ThinnedSeries] = {}
        self._story = StoryTrack()
        self._travels = TravelTrack()
        self._losses: dict[int, GroupLoss] = {}
        """The loss of each worker group."""
        self._job = JobFigures()

    @property
    def has_job(self) -> bool:
        """Whether a header has come."""
        return self._job.header is not None

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended, and has said so."""
        return self._job.ended is not None

    def lose(self) -> bool:
        """Note that the job has ended without a word; return whether that is news.

        The next event says that it goes on.
        """
        if not self.has_job or self.has_ended or self._job.lost:
            return False
        self._number += 1
        self._job.lost = True
        self._all_gone("dead")
        self._finish_losses()
        self._tell("failed", "", "the job is lost: its launcher is gone, and has not said how it ended")
        return True

    def add(self, timed: TimedEvent) -> None:
        """Add one event."""
        self._number += 1
        self._job.lost = False
        event = timed.event
        if isinstance(event, RecordingHeader):
            self._on_header(event, timed.at)
        elif isinstance(event, RecordingEnd):
            self._job.at = max(self._job.at, self._offset + timed.at)
            self._on_end(event)
        else:
            # Events of several units may come in any order by a little.
            self._job.at = max(self._job.at, self._offset + timed.at)
            self._on_event(event, self._job.at)

    # ---- what is returned --------------------------------------------------------------------------------------------

    def view(self) -> dict[str, Any]:
        """Return the whole history, as the page about recordings describes it."""
        return self._as_data(-1, whole=True)

    def since(self, cursor: int) -> dict[str, Any]:
        """Return what has come since `cursor`, which an earlier view or delta had.

        Points, states and story have only new entries. Processes and connections are there if they have changed.
        "whole": true says that this is another job, and all of it.
        """
        if cursor < self._begun or cursor > self._number:
            return {**self.view(), "whole": True}
        return self._as_data(cursor, whole=False)

    def summary(self) -> dict[str, Any]:
        """Return the present state of the job."""
        return ProcessSummary(self._processes, self._job).as_data()

    def _as_data(self, cursor: int, whole: bool) -> dict[str, Any]:
        data: dict[str, Any] = {"version": VIEW_VERSION, "cursor": self._number}
        data["job"] = ProcessSummary(self._processes, self._job).job_data()
        if whole or self._placed > cursor:
            data["processes"] = [process.as_data() for process in self._processes.values()]
            data["connections"] = [{"from": one, "to": other} for one, other in self._connections]
        data["series"] = [
            series.as_data(name, cursor) for name, series in self._series.items() if whole or series.has_since(cursor)
        ]
        states = {who: process.states.since(cursor) for who, process in self._processes.items()}
        data["states"] = {who: entries for who, entries in states.items() if whole or entries}
        data["story"] = self._story.since(cursor)
        data["travels"] = self._travels.since(cursor)
        return data

    # ---- the start and the end of a job ------------------------------------------------------------------------------

    def _on_header(self, header: RecordingHeader, at: float) -> None:
        former = self._job.header
        if former is not None and former.started != header.started:
            if header.resumed:
                # The time in between is cut out: nothing happens in it on any curve.
                self._offset = self._job.at
                away_s = max(0.0, header.started - former.started - self._job.start_s)
                self._tell("notice", "", f"the job was started again {away_s:.0f} s after its last event, and goes on")
            else:
                self._forget()
        self._job.begin(header, self._offset, self._offset + at)
        self._layout = RecordedLayout(header.layout)
        self._travels.explained_by(header.job)
        self._place()
        bound = header.job.get("staleness_bound")
        if isinstance(bound, int):
            self._point("job", "staleness_bound", float(bound), 0)

    def _place(self) -> None:
        """Use the present layout; the tracks of processes that stay are kept."""
        known, self._placed = self._processes, self._number
        self._processes, self._groups = {}, {}
        for address, unit, host in self._layout.residents():
            who = str(address)
            track = known.get(who) or ProcessTrack(address, unit, host)
            track.unit, track.host = unit, host
            self._processes[who] = track
            if track.is_worker:
                self._groups.setdefault(address.group, []).append(track)
        self._connections = dict.fromkeys(self._layout.connections())

    def _on_end(self, event: RecordingEnd) -> None:
        self._job.ended, self._job.code = self._job.at, event.code
        well = event.code == 0
        self._all_gone("finished" if well else "dead")
        self._finish_losses()
        self._tell("ended", "", "the job has ended" + ("" if well else f" with code {event.code}"))

    def _all_gone(self, state: str) -> None:
        """Let all processes without a reported end stop with the job."""
        for process in self._processes.values():
            if process.states.now and process.is_present:
                self._enter(process, state)
                process.stopped_with_job = True

    # ---- events ------------------------------------------------------------------------------------------------------

    def _on_event(self, event: Event, at: float) -> None:
        who = getattr(event, "who", "")
        process = self._processes.get(who) if isinstance(who, str) else None
        told = story_of(event)
        if told is not None:
            self._tell(told[0], told[1] if told[1] in self._processes else "", told[2])
        self._on_job_event(event, at)
        if process is not None:
            self._on_process_event(process, event, at)
            if self._layout.servers_in_workers and process.is_worker:
                self._mirror(process)
            if process.is_worker:
                self._pass_time(process.address.group, at)

    def _on_job_event(self, event: Event, at: float) -> None:
        match event:
            case Incident():
                found = IncidentRecord(event.number, at, event.what, event.action)
                self._job.on_incident(found)
            case Recovered():
                self._job.on_recovered(event)
            case Saved():
                self._job.on_saved(event, at)
            case Left(group=group):
                for process in self._group(group):
                    self._enter(process, "away")
            case Joined(group=group):
                for process in self._group(group):
                    self._enter(process, "starting")
            case Failed(who=who) | Lost(who=who) if who.startswith("unit "):
                for process in self._processes.values():
                    if f"unit {process.unit}" == who and process.states.now not in ("finished", "away"):
                        self._enter(process, "dead")
            case Traveled():
                self._travels.add(self._number, at, event)
            case Tested():
                for name, value in event.values.items():
                    self._point("job", f"{event.kind}:{name}", value, event.step)
            case _:
                pass

    def _on_process_event(self, process: ProcessTrack, event: Event, at: float) -> None:
        match event:
            case Started(pid=pid):
                self._on_started(process, pid)
            case Serving(pid=pid):
                self._on_started(process, pid)
                self._enter(process, "waits")
            case StepDone():
                self._on_step(process, event, at)
            case Finished():
                process.worker.on_finished(event)
                self._enter(process, "finished")
            case Ending():
                self._enter(process, "finished")
            case Waits():
                self._enter(process, "waits")
            # Its first step has not ended: in a slowed job that takes long.
            case Traveled() if process.is_worker and process.states.now in ("starting", "restarts"):
                self._enter(process, "computes")
            case Logged():
                for name, value in process.worker.on_logged(event.values).items():
                    self._point(str(process.address), f"log:{name}", value, event.step)
            case Resources():
                self._on_resources(process, event, at)
            case Traffic():
                self._on_traffic(process, event, at)
            case ServerLoad():
                self._on_load(process, event, at)
            case Slices():
                parts = zip(event.names, event.first, event.count, strict=False)
                process.slices = [{"name": name, "first": first, "count": count} for name, first, count in parts]
                self._placed = self._number
            case Frozen():
                self._enter(process, "stopped")
            case Thawed():
                self._enter(process, "computes" if process.is_worker else "waits")
            # The exit of a former process may come behind the start of its successor.
            case Exited(pid=pid, code=code) if process.pid in (None, pid) and process.is_present:
                self._enter(process, "finished" if code == 0 else "dead")
            case Lost() | Failed() | Incident():
                self._enter(process, "dead")
            case _:
                pass

    def _on_started(self, process: ProcessTrack, pid: int) -> None:
        if process.pid == pid and process.states.now not in ("", "dead", "away"):
            return
        again = process.pid is not None and process.states.now not in ("", "away")
        self._enter(process, "restarts" if again else "starting")
        if process.pid != pid:
            process.start(pid)
            self._placed = self._number

    def _on_step(self, process: ProcessTrack, event: StepDone, at: float) -> None:
        name, figures = str(process.address), process.worker
        figures.on_step(at, event)
        self._job.on_progress(event, at)
        self._enter(process, "computes")
        if event.loss is not None:
            self._point(name, "loss", event.loss, event.step)
        for metric in ("samples_per_s", "waiting_share"):
            value = getattr(figures, metric)
            if value is not None:
                self._point(name, metric, value, event.step)
        for metric in ("staleness_mean", "staleness_p95", "staleness_max"):
            self._point(name, metric, float(getattr(figures, metric)), event.step)
        self._on_group_loss(process.address.group, at)

    def _on_group_loss(self, group: int, at: float) -> None:
        workers = [process.worker for process in self._group(group) if process.counts]
        losses = [worker.loss for worker in workers if worker.loss is not None]
        if losses:
            loss = self._losses.setdefault(group, GroupLoss())
            loss.take(at, max(worker.step for worker in workers), sum(losses) / len(losses))
            self._pass_time(group, at)

    def _pass_time(self, group: int, at: float) -> None:
        """Add the point that a group's loss holds, if it is time."""
        loss = self._losses.get(group)
        if loss is not None and loss.is_due(at):
            self._add_loss(group, loss)

    def _finish_losses(self) -> None:
        """Add the last point of each group's loss."""
        for group, loss in self._losses.items():
            self._add_loss(group, loss)

    def _add_loss(self, group: int, loss: GroupLoss) -> None:
        for at, step, value in loss.release():
            self._point(f"group {group}", "loss", value, step, at)

    def _on_resources(self, process: ProcessTrack, event: Resources, at: float) -> None:
        process.memory_bytes = event.memory_bytes
        self._point(str(process.address), "memory_bytes", float(event.memory_bytes), self._step_of(process))
        # Servers report what they do, and not that they do nothing.
        if process.states.now == "applies" and process.load_at is not None and at - process.load_at > APPLIES_S:
            self._enter(process, "waits")

    def _on_traffic(self, process: ProcessTrack, event: Traffic, at: float) -> None:
        name = str(process.address)
        for to, count in event.sent.items():
            if to not in self._processes:
                continue
            process.on_sent(at, to, count)
            rate = process.bytes_per_s(to)
            if rate is not None:
                self._point(f"{name}>{to}", "bytes_per_s", rate, self._step_of(process))
            if (name, to) not in self._connections and (to, name) not in self._connections:
                self._connections[name, to] = None
                self._placed = self._number

    def _on_load(self, process: ProcessTrack, event: ServerLoad, at: float) -> None:
        process.server.on_load(at, event)
        process.load_at = at
        if process.server.updates_per_s is not None:
            self._point(str(process.address), "updates_per_s", process.server.updates_per_s, event.version)
        self._enter(process, "applies" if process.server.works else "waits")

    # ---- entries -----------------------------------------------------------------------------------------------------

    def _mirror(self, worker: ProcessTrack) -> None:
        """Give the servers inside a worker's process its state."""
        for process in self._processes.values():
            same = process.address.index == worker.address.index or process.address.index == 0
            if not process.is_worker and process.unit == worker.unit and same:
                self._enter(process, worker.states.now or "starting")

    def _group(self, group: int) -> Sequence[ProcessTrack]:
        return self._groups.get(group, ())

    def _step_of(self, process: ProcessTrack) -> int:
        return process.worker.step if process.is_worker else process.server.updates

    def _enter(self, process: ProcessTrack, state: str) -> None:
        process.enter(self._number, self._job.at, state)

    def _tell(self, kind: str, who: str, text: str) -> None:
        self._story.add(StoryEntry(self._number, self._job.at, kind, who or "job", text))

    def _point(self, of: str, metric: str, value: float, step: int, at: float | None = None) -> None:
        name = f"{of}:{metric}"
        series = self._series.get(name)
        if series is None:
            if len(self._series) >= MOST_SERIES:
                return
            series = self._series[name] = ThinnedSeries(metric, of, UNITS.get(metric, ""))
        limit = min(MOST_POINTS, max(FEWEST_POINTS, ALL_POINTS // len(self._series)))
        shown = value if math.isfinite(value) else None
        series.add(SeriesPoint(self._number, self._job.at if at is None else at, step, shown), limit)
