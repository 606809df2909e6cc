"""Recordings of made-up jobs: their headers, streams of events by hypothesis, and a day of a job in no time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from topotrain.config.job import Cluster, Job
from topotrain.config.topology import Topology, layout
from topotrain.core import events
from topotrain.core.events import Event, StepDone
from topotrain.tools.monitor.job_report import Report
from topotrain.tools.recording.job_history import HistoryReader, JobHistory
from topotrain.tools.recording.job_recorder import JobRecorder, header_of
from topotrain.tools.recording.recorded_lines import RecordingEnd, RecordingHeader, TimedEvent, from_line

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


@dataclass
class _Counts:
    """What a process has counted so far."""

    time: float = 0.0
    steps: int = 0
    waited: float = 0.0
    sent: dict[str, int] = field(default_factory=dict)
    updates: int = 0
    pid: int = 1


def _event(draw: st.DrawFn, counts: dict[str, _Counts], incidents: list[int], passed: float) -> Event:
    worker, server = draw(st.sampled_from(WORKERS)), draw(st.sampled_from(SERVERS))
    mine, theirs = counts.setdefault(worker, _Counts()), counts.setdefault(server, _Counts())
    kind = draw(st.sampled_from(("step",) * 6 + ("load", "traffic", "resources", "log", "waits", "rare")))
    number = st.floats(allow_nan=True, allow_infinity=True)
    match kind:
        case "step":
            mine.time, mine.steps = mine.time + passed, mine.steps + draw(st.integers(0, 9))
            mine.waited += passed * draw(st.floats(0, 1))
            known = {"waited_s": mine.waited, "epoch": mine.steps // 50, "progress": min(1.0, mine.steps / 1000)}
            loss = draw(st.none() | number)
            return step(worker, mine.time, mine.steps, loss, staleness_p95=draw(st.floats(0, 9)), **known)
        case "load":
            theirs.updates += draw(st.integers(0, 5))
            return events.ServerLoad(server, theirs.updates, theirs.updates, 0.5)
        case "traffic":
            # All that it has sent so far, to each receiver.
            mine.sent[server] = mine.sent.get(server, 0) + draw(st.integers(0, 10**7))
            return events.Traffic(worker, dict(mine.sent))
        case "resources":
            return events.Resources(draw(st.sampled_from((worker, server))), 1, draw(st.integers(0, 10**10)), 1.0)
        case "log":
            return events.Logged(worker, mine.time, mine.steps, {draw(st.sampled_from(("a", "b"))): draw(number)})
        case "waits":
            return events.Waits(worker, 1.0)
        case _:
            return _rare_event(draw, worker, mine, incidents, passed)


def _rare_event(draw: st.DrawFn, worker: str, mine: _Counts, incidents: list[int], passed: float) -> Event:
    who = draw(st.sampled_from((*WORKERS, *SERVERS)))
    match draw(st.integers(0, 9)):
        case 0:
            # Its counts begin anew, as those of a new process.
            mine.time, mine.steps, mine.waited, mine.sent, mine.pid = 0.0, 0, 0.0, {}, mine.pid + 1
            return events.Started(worker, mine.pid)
        case 1:
            incidents.append(len(incidents))
            return events.Incident(incidents[-1], who, f"{who} was killed", "its group restarts", passed)
        case 2:
            return events.Recovered(incidents[-1] if incidents else 0, 0.5, 0.25)
        case 3:
            return events.Saved("server 0/0", 1, mine.steps, "here", "time")
        case 4:
            return events.Left(draw(st.integers(0, 1)), "has left", 1.0)
        case 5:
            return events.Joined(draw(st.integers(0, 1)), 1, 1.0)
        case 6:
            return draw(st.sampled_from((events.Frozen(who, 1), events.Thawed(who, 1))))
        case 7:
            return events.Notice(who, draw(st.text(max_size=20)))
        case 8:
            return events.Exited(who, mine.pid, draw(st.sampled_from((0, 1, -9))))
        case _:
            return events.Tested("worker 0/0", "test", mine.steps, {"accuracy": 0.5}, 0)


@st.composite
def recordings(draw: st.DrawFn, most: int = 25) -> list[TimedEvent]:
    """Whole recordings: starts of a job, the later ones resumed, with events at any distance."""
    found: list[TimedEvent] = []
    for start in range(draw(st.integers(1, 2))):
        at, counts, incidents = 0.0, dict[str, _Counts](), list[int]()
        found.append(TimedEvent(0.0, header(STARTED + 1e6 * start, resumed=start > 0)))
        for _ in range(draw(st.integers(0, most))):
            passed = draw(st.sampled_from((0.01, 0.2, 0.5, 3.0, 60.0, 3600.0)))
            at += passed
            found.append(TimedEvent(round(at, 6), _event(draw, counts, incidents, passed)))
        if draw(st.booleans()):
            found.append(TimedEvent(round(at + 1, 6), RecordingEnd(draw(st.sampled_from((0, 1, None))))))
    return found


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
