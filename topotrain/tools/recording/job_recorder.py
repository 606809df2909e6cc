"""Records a job in its workspace while it runs."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

from topotrain.comm.store.discovery.job_registry import SUMMARY_BYTES
from topotrain.config.job import Job
from topotrain.config.topology import Topology
from topotrain.core.events import Event, Notice, Notifier, Resized
from topotrain.launch import JobWatch
from topotrain.launch.recovery.resize import resized_layout
from topotrain.tools.recording.job_history import JobHistory
from topotrain.tools.recording.job_start import JobStart
from topotrain.tools.recording.job_summary import compacted
from topotrain.tools.recording.recorded_lines import RecordingError, TimedEvent
from topotrain.tools.recording.recording_file import FILE, RecordingWriter, read_recording


class _Notices(Notifier):
    """Keeps texts for the thread of the launcher."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def notify(self, text: str) -> None:
        self._texts.append(text)

    def take(self) -> Sequence[Notice]:
        """Return the texts as events, once."""
        if not self._texts:
            return ()
        found, self._texts = self._texts, []
        return [Notice("launcher", text) for text in found]


class JobRecorder(JobWatch):
    """Records one start of a job that this process leads, now or later.

    Args:
        job, topology: of the job. None: `begin` names them.
    """

    def __init__(self, job: Job | None = None, topology: Topology | None = None) -> None:
        self._job, self._topology = job, topology
        self._led: tuple[bool, Sequence[str]] | None = None
        self._start: JobStart | None = None
        self._writer: RecordingWriter | None = None
        self._path = Path(FILE)
        self._notices, self._history, self._taken = _Notices(), JobHistory(), False
        # A unit is elected on another thread.
        self._lock = Lock()

    def begin(self, job: Job, topology: Topology) -> None:
        """Name the job; it is recorded if this process leads it."""
        self._job, self._topology = job, topology
        self._open()

    def lead(self, resumed: bool, hosts: Sequence[str]) -> None:
        # A job that was begun before is recorded behind its earlier start.
        self._led = resumed, hosts
        self._open()

    def _open(self) -> None:
        with self._lock:
            job, topology, led = self._job, self._topology, self._led
            if self._writer is None and job is not None and topology is not None and led is not None:
                # Absolute: the program of a notebook may change the folder.
                self._path = Path(job.workspace).absolute() / FILE
                self._start = JobStart(job, topology, time.time(), *led)
                self._writer = RecordingWriter(
                    self._path, self._start.header, time.monotonic, self._notices, self._hear
                )

    def __call__(self, event: Event) -> None:
        """Record an event."""
        writer, start = self._writer, self._start
        if writer is not None and start is not None:
            self._taken = True
            writer.write(event)
            if isinstance(event, Resized):
                self._start = start.after(event)
                writer.write(self._start.header)
        elif isinstance(event, Resized) and self._topology is not None:
            self._topology = resized_layout(self._topology, event.workers)

    def notices(self) -> Sequence[Notice]:
        """Return what the user must know, once."""
        return self._notices.take()

    def summary(self) -> Mapping[str, Any] | None:
        # Before any event, the file is that of an earlier job.
        if self._writer is None or not self._taken:
            return None
        self._writer.flush()
        history = self._history
        return compacted(history.summary(), SUMMARY_BYTES) if history.has_job else None

    def end(self, code: int | None) -> None:
        """Record how the job has ended; None: unknown. A second call does nothing."""
        if self._writer is not None:
            self._writer.close(code)

    def _hear(self, timed: TimedEvent) -> None:
        start = self._start
        if not self._history.has_job and start is not None and start.resumed:
            # What came before is in the file only. Until all of it is read, there is no summary.
            history = JobHistory()
            with suppress(OSError, RecordingError):
                for earlier in read_recording(self._path):
                    history.add(earlier)
            history.add(timed)
            self._history = history
        else:
            self._history.add(timed)


@contextmanager
def recording(job: Job, topology: Topology, resumed: bool) -> Iterator[JobRecorder]:
    """Record a job that this process launches.

    resumed: it goes on from a snapshot, and so does its recording.
    """
    made = JobRecorder(job, topology)
    made.lead(resumed, ())
    try:
        yield made
    finally:
        made.end(None)
