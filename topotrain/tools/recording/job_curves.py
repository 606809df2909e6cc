"""The curves of a job, from the events and the figures of its processes."""

from topotrain.core.events import Event, Logged, Resources, ServerLoad, StepDone, Tested, Traffic
from topotrain.tools.recording.history_series import Moment, SeriesTable
from topotrain.tools.recording.process_table import ProcessTable, ProcessTrack

GROUP_S = 0.5
"""Seconds between two points of a group's loss, except the last one."""


class JobCurves:
    """Adds points to the series of a job.

    Args:
        processes: of the job.
        series: gets the points.
    """

    def __init__(self, processes: ProcessTable, series: SeriesTable) -> None:
        self._processes, self._series = processes, series
        self._stepped: dict[int, float] = {}
        """When each worker group made a step that its loss has no point of yet."""
        self._added: dict[int, float] = {}
        """The time of the last point of each group's loss."""

    def add(self, process: ProcessTrack, event: Event, now: Moment) -> None:
        """Add the points of an event; the process has recorded it."""
        match event:
            case StepDone():
                self._on_step(process, event, now)
            case Logged():
                for name, value in process.figures.on_logged(event.values).items():
                    self._series.add(now, process.who, f"log:{name}", value, event.step)
            case Resources():
                self._series.add(now, process.who, "memory_bytes", float(event.memory_bytes), process.progress)
            case Traffic():
                known = self._processes.by_name
                process.sent.add(now.at, sum(count for to, count in event.sent.items() if to in known))
                if process.bytes_per_s is not None:
                    self._series.add(now, process.who, "bytes_per_s", process.bytes_per_s, process.progress)
            case ServerLoad() if process.load.updates_per_s is not None:
                self._series.add(now, process.who, "updates_per_s", process.load.updates_per_s, event.version)
            case _:
                pass
        self.add_loss(process, now)

    def add_test(self, event: Tested, now: Moment) -> None:
        for metric, value in event.values.items():
            self._series.add(now, "job", f"{event.kind}:{metric}", value, event.step)

    def add_loss(self, process: ProcessTrack, now: Moment) -> None:
        """Add the loss of a worker's group, if it has made a step and it is time."""
        group = process.group
        # Not in each step: the mean of a group of hundreds of workers takes a while.
        if not process.is_server and group in self._stepped and now.at >= self._added.get(group, -GROUP_S) + GROUP_S:
            self._add_loss(group, now)

    def end(self, now: Moment) -> None:
        """Add the last points, because the job has ended."""
        for group in list(self._stepped):
            self._add_loss(group, now)

    def _on_step(self, process: ProcessTrack, event: StepDone, now: Moment) -> None:
        figures, staleness = process.figures, process.figures.staleness
        for metric, value in (
            ("loss", event.loss),
            ("samples_per_s", figures.samples_per_s),
            ("waiting_share", figures.waiting_share),
            ("staleness_mean", staleness.mean),
            ("staleness_p95", staleness.p95),
            ("staleness_max", float(staleness.max)),
        ):
            if value is not None:
                self._series.add(now, process.who, metric, value, event.step)
        self._stepped[process.group] = now.at

    def _add_loss(self, group: int, now: Moment) -> None:
        at = self._stepped.pop(group)
        figures = [process.figures for process in self._processes.group(group) if process.counts]
        losses = [each.loss for each in figures if each.loss is not None]
        if losses:
            self._added[group] = at
            step = max(each.step for each in figures)
            self._series.add(Moment(now.number, at), f"group {group}", "loss", sum(losses) / len(losses), step)
