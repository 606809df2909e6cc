"""The events of single processes: their states, figures and series."""

from topotrain.core.events import (
    Ending,
    Event,
    Exited,
    Failed,
    Finished,
    Frozen,
    Incident,
    Logged,
    Lost,
    Resources,
    ServerLoad,
    Serving,
    Slices,
    Started,
    StepDone,
    Thawed,
    Traffic,
    Waits,
)
from topotrain.tools.recording.history_series import GroupLoss, Moment, SeriesTable
from topotrain.tools.recording.process_figures import ProcessTrack
from topotrain.tools.recording.process_table import ProcessTable

APPLIES_S = 2.0
"""Seconds without news of a server after which it waits."""


class ProcessEvents:
    """Adds up the events of single processes.

    Args:
        processes: of the job.
        series: gets the points.
    """

    def __init__(self, processes: ProcessTable, series: SeriesTable) -> None:
        self._processes, self._series = processes, series
        self._losses: dict[int, GroupLoss] = {}  # of the worker groups

    def add(self, process: ProcessTrack, event: Event, now: Moment) -> None:
        """Add an event of a process."""
        match event:
            case Started(pid=pid):
                self._on_started(process, pid, now)
            case Serving(pid=pid):
                self._on_started(process, pid, now)
                process.enter(now, "waits")
            case StepDone():
                self._on_step(process, event, now)
            case Finished():
                process.worker.on_finished(event)
                process.enter(now, "finished")
            case Ending():
                process.enter(now, "finished")
            case Waits():
                process.enter(now, "waits")
            case Logged():
                for name, value in process.worker.on_logged(event.values).items():
                    self._series.add(now, str(process.address), f"log:{name}", value, event.step)
            case Resources():
                self._on_resources(process, event, now)
            case Traffic():
                self._on_traffic(process, event, now)
            case ServerLoad():
                self._on_load(process, event, now)
            case Slices():
                process.on_slices(event)
                self._processes.change(now.number)
            case Frozen():
                process.enter(now, "stopped")
            case Thawed():
                process.enter(now, "computes" if process.is_worker else "waits")
            # The exit of a former process may come behind the start of its successor.
            case Exited(pid=pid, code=code) if process.pid in (None, pid) and process.is_present:
                process.enter(now, "finished" if code == 0 else "dead")
            case Lost() | Failed() | Incident():
                process.enter(now, "dead")
            case _:
                pass
        self._processes.mirror(process, now)
        if process.is_worker:
            self._pass_time(process.address.group, now)

    def end(self, now: Moment) -> None:
        """Add the last points, because the job has ended."""
        for group in self._losses:
            self._add_loss(group, now)

    def _on_started(self, process: ProcessTrack, pid: int, now: Moment) -> None:
        if process.pid == pid and process.states.now not in ("", "dead", "away"):
            return
        again = process.pid is not None and process.states.now not in ("", "away")
        process.enter(now, "restarts" if again else "starting")
        if process.pid != pid:
            process.start(pid)
            self._processes.change(now.number)

    def _on_step(self, process: ProcessTrack, event: StepDone, now: Moment) -> None:
        name, figures = str(process.address), process.worker
        figures.on_step(now.at, event)
        process.enter(now, "computes")
        if event.loss is not None:
            self._series.add(now, name, "loss", event.loss, event.step)
        for metric in ("samples_per_s", "waiting_share"):
            value = getattr(figures, metric)
            if value is not None:
                self._series.add(now, name, metric, value, event.step)
        for metric in ("staleness_mean", "staleness_p95", "staleness_max"):
            self._series.add(now, name, metric, float(getattr(figures, metric)), event.step)
        self._on_group_loss(process.address.group, now)

    def _on_group_loss(self, group: int, now: Moment) -> None:
        workers = [process.worker for process in self._processes.workers(group) if process.counts]
        losses = [worker.loss for worker in workers if worker.loss is not None]
        if losses:
            step = max(worker.step for worker in workers)
            self._losses.setdefault(group, GroupLoss()).take(now.at, step, sum(losses) / len(losses))

    def _pass_time(self, group: int, now: Moment) -> None:
        """Add the point that a group's loss holds, if it is time."""
        if group in self._losses and self._losses[group].is_due(now.at):
            self._add_loss(group, now)

    def _add_loss(self, group: int, now: Moment) -> None:
        for at, step, loss in self._losses[group].release():
            self._series.add(Moment(now.number, at), f"group {group}", "loss", loss, step)

    def _on_resources(self, process: ProcessTrack, event: Resources, now: Moment) -> None:
        process.on_resources(event)
        self._series.add(now, str(process.address), "memory_bytes", float(event.memory_bytes), process.step)
        # Servers report what they do, and not that they do nothing.
        loaded_at = process.server.loaded_at
        if process.states.now == "applies" and loaded_at is not None and now.at - loaded_at > APPLIES_S:
            process.enter(now, "waits")

    def _on_traffic(self, process: ProcessTrack, event: Traffic, now: Moment) -> None:
        known = self._processes.by_name
        process.sent.add(now.at, sum(count for to, count in event.sent.items() if to in known))
        rate = process.bytes_per_s
        if rate is not None:
            self._series.add(now, str(process.address), "bytes_per_s", rate, process.step)

    def _on_load(self, process: ProcessTrack, event: ServerLoad, now: Moment) -> None:
        process.server.on_load(now.at, event)
        rate = process.server.updates_per_s
        if rate is not None:
            self._series.add(now, str(process.address), "updates_per_s", rate, event.version)
        process.enter(now, "applies" if process.server.works else "waits")
