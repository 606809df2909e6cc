"""Records a job in its workspace while it runs."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from topotrain.comm.store.discovery.job_registry import SUMMARY_BYTES
from topotrain.config import job_file
from topotrain.config.job import Job
from topotrain.config.topology import Topology
from topotrain.core.events import Event, Notice, Notifier, Resized
from topotrain.launch import JobWatch
from topotrain.launch.recovery.resize import resized_layout
from topotrain.tools.recording.job_history import HistoryReader, JobHistory
from topotrain.tools.recording.job_summary import compacted
from topotrain.tools.recording.recorded_lines import RecordingHeader, layout_data
from topotrain.tools.recording.recording_file import FILE
from topotrain.tools.recording.recording_writer import RecordingWriter


def header_of(
    job: Job, topology: Topology, started: float, resumed: bool = False, hosts: Sequence[str] = ()
) -> RecordingHeader:
    """Return the header of a start of a job.

    The arguments of the program are not in it: a recording may be shown to others.

    started: seconds since 1970. resumed: the job goes on from a snapshot. hosts: the names of the units' hosts, by
    rank; empty: all run here.
    """
    from importlib.metadata import version

    described: dict[str, Any] = {
        "name": job.name,
        "framework": topology.framework,
        "workspace": job.workspace,
        "program": job.program,
        "block": job_file.dumps_cluster(topology.cluster),
    }
    if topology.cluster.max_staleness is not None:
        described["staleness_bound"] = topology.cluster.max_staleness
    return RecordingHeader(
        topotrain=version("topotrain"),
        started=started,
        resumed=resumed,
        job=described,
        layout=layout_data(topology, hosts),
    )


class JobRecorder(JobWatch, Notifier):
    """Records one start of a job that this process leads, and keeps its history.

    As a context manager it ends the recording of a job that has ended by an exception.

    Args:
        exports: read the history, which has all samples then.
    """

    def __init__(self, exports: HistoryReader | None = None) -> None:
        self._exports = exports
        self._job: Job | None = None
        self._topology: Topology | None = None
        self._led: tuple[bool, Sequence[str]] | None = None
        self._started = self._began = 0.0
        self._writer: RecordingWriter | None = None
        self._notices: list[Notice] = []
        self._empty = JobHistory()

    def read(self) -> JobHistory:
        """Return the history with earlier starts; before an event it has no job."""
        return self._empty if self._writer is None else self._writer.history

    def begin(self, job: Job, topology: Topology) -> None:
        """Name the job; it is recorded if this process leads it."""
        self._topology, self._job = topology, job
        self._note_time()
        if self._exports is not None:
            self._exports.follow(self)

    def lead(self, resumed: bool, hosts: Sequence[str]) -> None:
        # A job that was begun before is recorded behind its earlier start. A unit is elected on another thread.
        if self._led is None:
            self._note_time()
            self._led = resumed, hosts

    def _note_time(self) -> None:
        if self._writer is None:
            self._started, self._began = time.time(), time.monotonic()

    def _open(self, job: Job) -> RecordingWriter:
        # Absolute: the program of a notebook may change the folder.
        path = Path(job.workspace).absolute() / FILE
        detailed = self._exports is not None
        return RecordingWriter(path, self._header(), time.monotonic, self, detailed, self._began)

    def _header(self) -> RecordingHeader:
        assert self._job is not None
        assert self._topology is not None
        assert self._led is not None
        return header_of(self._job, self._topology, self._started, *self._led)

    def __call__(self, event: Event) -> None:
        if self._writer is None and self._job is not None and self._led is not None:
            # Not before the first event: until then the workspace may be that of another job.
            self._writer = self._open(self._job)
        if self._writer is not None:
            self._writer.write(event)
        if isinstance(event, Resized) and self._topology is not None:
            self._topology = resized_layout(self._topology, event.workers)
            if self._writer is not None:
                self._writer.write(self._header())

    def notices(self) -> Sequence[Notice]:
        """Return what the user must know, once."""
        found, self._notices = self._notices, []
        return found if self._exports is None else [*found, *self._exports.notices()]

    def notify(self, text: str) -> None:
        # On the thread of the writer; the launcher's takes it.
        self._notices.append(Notice("launcher", text))

    def summary(self) -> Mapping[str, Any] | None:
        if self._writer is not None:
            self._writer.flush()
        history = self.read()
        return compacted(history.summary(), SUMMARY_BYTES) if history.has_job else None

    def end(self, code: int) -> None:
        """Record how the job has ended, and let the exports write what is left."""
        self._close(code)
        if self._exports is not None:
            self._exports.end(code)

    def _close(self, code: int | None) -> None:
        if self._writer is not None:
            self._writer.close(code)  # a second call does nothing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close(None)
