"""Records a job in its workspace while it runs."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from topotrain.comm.store.discovery.job_registry import SUMMARY_BYTES
from topotrain.config.job import Job
from topotrain.config.topology import Topology
from topotrain.core.events import Event, Notice, Notifier, Resized
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
        found, self._texts = self._texts, []
        return [Notice("launcher", text) for text in found]


class JobRecorder:
    """Records one start of a job.

    Args:
        job, topology: of the job.
        resumed: the job goes on from a snapshot, and its recording behind that of the earlier start.
        hosts: the names of the units' hosts, by rank; empty: all run here.
    """

    def __init__(self, job: Job, topology: Topology, resumed: bool = False, hosts: Sequence[str] = ()) -> None:
        self._path = Path(job.workspace).absolute() / FILE
        self._start = JobStart(job, topology, time.time(), resumed, hosts)
        self._notices = _Notices()
        self._history = JobHistory()
        self._writer = RecordingWriter(self._path, self._start.header, time.monotonic, self._notices, self._hear)
        self._taken = False

    def __call__(self, event: Event) -> None:
        """Record an event."""
        self._taken = True
        self._writer.write(event)
        if isinstance(event, Resized):
            self._start = self._start.after(event)
            self._writer.write(self._start.header)

    def notices(self) -> Sequence[Notice]:
        """Return what the user must know, once."""
        return self._notices.take()

    def summary(self) -> Mapping[str, Any] | None:
        """Return the present state of the job in bounded size; None before any event."""
        # Before it, the file is that of an earlier job.
        if not self._taken:
            return None
        self._writer.flush()
        history = self._history
        return compacted(history.summary(), SUMMARY_BYTES) if history.has_job else None

    def close(self, code: int | None) -> None:
        """Record how the job has ended; None: unknown. A second call does nothing."""
        self._writer.close(code)

    def _hear(self, timed: TimedEvent) -> None:
        if not self._history.has_job and self._start.resumed:
            # What came before is in the file only. Until all of it is read, there is no summary.
            history = JobHistory()
            with suppress(OSError, RecordingError):
                for earlier in read_recording(self._path):
                    history.add(earlier)
            history.add(timed)
            self._history = history
        else:
            self._history.add(timed)
