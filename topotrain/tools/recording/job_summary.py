"""The figures of a job as a whole: its curves, and its summary."""

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from topotrain.core.events import (
    Event,
    Incident,
    Logged,
    Recovered,
    Resources,
    Saved,
    ServerLoad,
    StepDone,
    Tested,
    Traffic,
)
from topotrain.tools.recording.history_series import Moment, SeriesTable
from topotrain.tools.recording.process_table import ProcessTable, ProcessTrack
from topotrain.tools.recording.recorded_lines import RecordingHeader
from topotrain.tools.recording.run_progress import JobProgress

SUMMARY_VERSION = 1
MOST_INCIDENTS = 100
LAST_SNAPSHOTS = 5
_SHORT = 200  # characters
GROUP_S = 0.5
"""Seconds between two points of a group's loss, except the last one."""
_USUAL = frozenset({"computes", "waits", "applies", "finished"})


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
        counted = [process for process in self._processes.group(group) if process.counts]
        loss = mean_loss(counted)
        if loss is not None:
            self._added[group] = at
            step = max(each.figures.step for each in counted)
            self._series.add(Moment(now.number, at), f"group {group}", "loss", loss, step)


@dataclass(slots=True)
class JobFigures:
    """The figures of the job that are those of no single process."""

    header: RecordingHeader | None = None
    at: float = 0.0
    started: float = 0.0
    """When the job first started, in seconds since 1970."""
    ended: float | None = None
    code: int | None = None
    lost: bool = False
    """It has ended without a word."""
    incidents: list[dict[str, Any]] = field(default_factory=list)
    snapshots: list[dict[str, Any]] = field(default_factory=list)
    progress: JobProgress = field(default_factory=lambda: JobProgress(0.0))

    def begin(self, header: RecordingHeader, at: float) -> None:
        """Note a start of the job, or a change of its layout."""
        if self.header is None:
            self.started = header.started
        if self.header is None or self.header.started != header.started:
            self.progress.restart()
        self.header, self.ended, self.code = header, None, None
        self.reach(at)

    def reach(self, at: float) -> None:
        """Note that something came at this time, so the job is not lost."""
        # Events of several units may come in any order by a little.
        self.at, self.lost = max(self.at, at), False

    def lose(self) -> None:
        self.lost = True

    def end(self, code: int | None) -> None:
        self.ended, self.code = self.at, code

    def on_event(self, event: Event, at: float) -> None:
        """Record what an event tells of the job."""
        match event:
            case Incident(number=number, what=what, action=action):
                found = {"number": number, "at_s": at, "what": what, "action": action, "recovered_s": None}
                self.incidents = [*self.incidents, found][-MOST_INCIDENTS:]
            case Recovered():
                self._on_recovered(event)
            case Saved(number=number, step=step, why=why):
                found = {"number": number, "step": step, "why": why, "at_s": round(at, 3)}
                self.snapshots = [*self.snapshots, found][-LAST_SNAPSHOTS:]
            case _:
                pass

    def _on_recovered(self, event: Recovered) -> None:
        for at, each in reversed([*enumerate(self.incidents)]):
            # An incident with a time is of an earlier start. The numbers of both starts are the same.
            if each["number"] == event.number and each["recovered_s"] is None:
                # Replaced: a summary that was made before has the former one.
                self.incidents[at] = {**each, "recovered_s": event.waited_s}
                return

    def as_data(self, processes: Iterable[ProcessTrack]) -> dict[str, Any]:
        """Return the job as in the view, with the figures of all its workers."""
        job: Mapping[str, Any] = {} if self.header is None else self.header.job
        done, over = self.progress, self.ended is not None or self.lost
        workers = [process for process in processes if not process.is_server]
        counted = [each for each in workers if each.counts]
        # Of a job that has ended, the last figures of those that took part until then.
        rates = [each.figures.samples_per_s for each in counted if over or each.is_present]
        return {
            **{name: str(job.get(name, "")) for name in ("name", "framework", "workspace", "block")},
            "started": self.started,
            "elapsed": round(self.at, 3),
            "ended": None if self.ended is None else round(self.ended, 3),
            "code": self.code,
            "lost": self.lost,
            "progress": done.share if done.share >= 0 else None,
            "eta_s": None if over else _rounded(done.left_s(self.at)),
            "epoch": done.epoch if done.epoch >= 0 else None,
            "step": max((each.figures.step for each in workers), default=0),
            "loss": finite(mean_loss(counted)),
            "samples_per_s": _sum(rates),
        }

    def summary(self, processes: Collection[ProcessTrack]) -> dict[str, Any]:
        """Return the state of the job and its processes as the docs describe it."""
        job = self.as_data(processes)
        return {
            "version": SUMMARY_VERSION,
            "state": "lost" if self.lost else "running" if self.ended is None else "ended",
            "name": job["name"],
            "framework": job["framework"],
            "elapsed_s": job["elapsed"],
            **{name: job[name] for name in ("progress", "eta_s", "epoch", "code", "step", "loss", "samples_per_s")},
            "bytes_per_s": _sum(each.bytes_per_s for each in processes if each.is_present),
            "workers": [_worker(each) for each in processes if not each.is_server],
            "servers": [_server(each) for each in processes if each.is_server],
            "incidents": [*self.incidents],
            "snapshots": self.snapshots,
        }


def _worker(process: ProcessTrack) -> dict[str, Any]:
    figures, staleness = process.figures, process.figures.staleness
    return {
        "name": process.who,
        "state": process.states.now or "starting",
        "pid": process.pid,
        "step": figures.step,
        "loss": finite(figures.loss),
        "samples_per_s": _rounded(figures.samples_per_s),
        "staleness_mean": finite(staleness.mean),
        "staleness_p95": finite(staleness.p95),
        "staleness_max": staleness.max,
        "waiting_share": _rounded(figures.waiting_share),
        "memory_bytes": process.memory_bytes,
        "log": {name: finite(value) for name, value in figures.log.items()},
    }


def _server(process: ProcessTrack) -> dict[str, Any]:
    return {
        "name": process.who,
        "state": process.states.now or "starting",
        "updates": process.load.updates,
        "updates_per_s": _rounded(process.load.updates_per_s),
        "memory_bytes": process.memory_bytes,
    }


def mean_loss(workers: Iterable[ProcessTrack]) -> float | None:
    """Return the mean of the last losses that are known; None: none is."""
    losses = [each.figures.loss for each in workers if each.figures.loss is not None]
    return sum(losses) / len(losses) if losses else None


def finite(value: float | None) -> float | None:
    """Return None for NaN and infinity, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def _rounded(value: float | None) -> float | None:
    return None if (known := finite(value)) is None else round(known, 3)


def _sum(rates: Iterable[float | None]) -> float | None:
    """Return the sum of the rates that are known; None: none is."""
    known = [rate for rate in rates if rate is not None]
    return _rounded(sum(known)) if known else None


def compacted(summary: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Return at most `limit` bytes of JSON, without the processes that tell least.

    `left_out` counts the workers and servers that are missing.
    """
    data = {**summary, "left_out": 0}
    data["incidents"] = data["incidents"][-LAST_SNAPSHOTS:]
    if _size(data) > limit:
        data["workers"] = [{**worker, "log": {}} for worker in data["workers"]]
        data["incidents"] = [
            {**each, "what": each["what"][:_SHORT], "action": each["action"][:_SHORT]} for each in data["incidents"]
        ]
    everyone = [(kind, each) for kind in ("workers", "servers") for each in data[kind]]
    # Those that do not work come first: the others are alike.
    everyone.sort(key=lambda pair: pair[1]["state"] in _USUAL)
    while _size(data) > limit and everyone:
        everyone = everyone[: len(everyone) * 3 // 4]
        data["workers"] = [each for kind, each in everyone if kind == "workers"]
        data["servers"] = [each for kind, each in everyone if kind == "servers"]
        data["left_out"] = len(summary["workers"]) + len(summary["servers"]) - len(everyone)
    return data


def _size(data: Mapping[str, Any]) -> int:
    return len(json.dumps(data, separators=(",", ":")))
