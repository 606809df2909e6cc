"""Recordings of made-up jobs: their headers, their events, and a day of a job in no time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from topotrain.config.job import Cluster, Job
from topotrain.config.topology import Topology, layout
from topotrain.core import events
from topotrain.core.events import Event, StepDone
from topotrain.tools.monitor.job_report import Report
from topotrain.tools.recording.job_history import HistoryReader, JobHistory
from topotrain.tools.recording.job_recorder import JobRecorder, header_of
from topotrain.tools.recording.recorded_lines import RecordingHeader, TimedEvent, from_line

WORKERS = ("worker 0/0", "worker 0/1", "worker 1/0", "worker 1/1")
SERVERS = ("server 0/0", "server 0/1")
STARTED = 1000.0


def job_of(folder: Path | str = "work", **fields: Any) -> Job:
    """A job of two groups of two workers, and two servers."""
    usual = {"nworker_groups": 2, "nworkers_per_group": 2, "nservers_per_group": 2, "server_worker_separate": True}
    return Job(name="digits", cluster=Cluster(workspace=str(folder), **{**usual, **fields}))


def recorder_of(job: Job, resumed: bool = False, exports: HistoryReader | None = None) -> JobRecorder:
    """The recorder of a job that this process leads from its start on."""
    made = JobRecorder(exports)
    made.begin(job, layout(job.cluster))
    made.lead(resumed, ())
    return made


def report_of(topology: Topology) -> Report:
    """The report of a job with this layout."""
    return Report(Job(cluster=topology.cluster), topology)


def header(started: float = STARTED, resumed: bool = False, **fields: Any) -> RecordingHeader:
    job = job_of(**fields)
    return header_of(job, layout(job.cluster), started, resumed)


def read_recording(path: Path) -> list[TimedEvent]:
    """The events of the whole lines of a recording, without its newest samples."""
    lines = path.read_text(errors="replace").split("\n")[:-1]
    return [timed for line in lines if (timed := from_line(line)) is not None]


def step(
    who: str = "worker 0/0", time: float = 1.0, number: int = 10, loss: float | None = 0.5, **more: Any
) -> StepDone:
    usual = {"samples": 32 * number, "staleness_mean": 0.5, "staleness_max": 3, "bytes_out": 10, "bytes_in": 20}
    return StepDone(who, time, number, loss=loss, **{**usual, **more})


def history(*timed: TimedEvent) -> JobHistory:
    made = JobHistory()
    for each in timed:
        made.add(each)
    return made


@dataclass
class Clock:
    """A clock that is set by hand."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def displays_go_by(clock: Callable[[], float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the report and the displays of a job read this clock."""
    for module in ("job_report", "progress_display"):
        monkeypatch.setattr(f"topotrain.tools.monitor.{module}.monotonic", clock)


def day(workers: int, seconds: float, every_s: float = 0.5) -> Iterator[tuple[float, Event]]:
    """The events of a job with so many workers and a server for each three, as its processes send them."""
    servers = [f"server 0/{k}" for k in range(servers_of(workers))]
    ticks = int(seconds / every_s)
    for tick in range(ticks):
        at, count = tick * every_s, tick * 12
        seldom = tick % max(1, round(1 / every_s)) == 0
        for index in range(workers):
            who = f"worker {index}/0"
            known = {"waited_s": at / 9, "progress": tick / ticks, "epoch": tick * 9 // ticks}
            yield at, step(who, at + 0.1, count, 1.0 / (tick + 1), own_s=0.02, threads=1, **known)
            if seldom:
                yield at, events.Resources(who, 4000 + index, 10**9 + tick, at)
                yield at, events.Traffic(who, dict.fromkeys(servers, tick * 123457))
                yield at, events.Logged(who, at, count, {"accuracy": 0.5})
        for index, who in enumerate(servers if seldom else ()):
            yield at, events.ServerLoad(who, count * workers, count * workers, at / 3)
            yield at, events.Resources(who, 5000 + index, 10**9 + tick, at)
        if tick % 600 == 0:
            yield at, events.Saved("server 0/0", tick // 600, count, "work/manifests/step", "time")


def servers_of(workers: int) -> int:
    """The number of servers of `day`."""
    return max(1, workers // 3)
