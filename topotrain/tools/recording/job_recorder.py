"""Records a job in its workspace while it runs."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from topotrain.comm.store.discovery.job_registry import SUMMARY_BYTES
from topotrain.config import job_file
from topotrain.config.job import Job
from topotrain.config.topology import Topology, layout
from topotrain.core.events import Event, Notice, Notifier, Resized
from topotrain.launch.recovery.resize import resized
from topotrain.tools.recording.job_history import JobHistory
from topotrain.tools.recording.job_summary import compacted
from topotrain.tools.recording.recorded_layout import layout_data
from topotrain.tools.recording.recorded_lines import RecordingHeader
from topotrain.tools.recording.recording_file import FILE, RecordingFollower, RecordingWriter


def header_of(
    job: Job, topology: Topology, started: float, resumed: bool = False, hosts: Sequence[str] = ()
) -> RecordingHeader:
    """Return the header of a start of a job.

    The arguments of the program are not in it: a recording may be shown to others.
    """
    from importlib.metadata import version

    described: dict[str, Any] = {
        "name": job.name,
        "framework": topology.framework,
        "workspace": job.workspace,
        "program": job.program,
        "block": job_file.dumps_cluster(topology.cluster),
    }
    bound = topology.cluster.max_staleness
    if bound is not None:
        described["staleness_bound"] = bound
    return RecordingHeader(
        topotrain=version("topotrain"),
        started=started,
        resumed=resumed,
        job=described,
        layout=layout_data(topology, hosts),
    )


class _Notices(Notifier):
    """Keeps texts for the thread of the launcher."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def notify(self, text: str) -> None:
        """As `Notifier.notify`."""
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
        path = Path(job.workspace).absolute() / FILE
        self._job, self._topology, self._hosts = job, topology, hosts
        self._header = header_of(job, topology, time.time(), resumed, hosts)
        self._notices = _Notices()
        self._writer = RecordingWriter(path, self._header, time.monotonic, self._notices)
        self._follower, self._history, self._reading = RecordingFollower(path), JobHistory(), Lock()
        self._taken = False

    def __call__(self, event: Event) -> None:
        """Record an event."""
        self._taken = True
        self._writer.write(event)
        if isinstance(event, Resized):
            self._topology = layout(resized(self._topology.cluster, event.workers), self._topology.hosts)
            now = header_of(self._job, self._topology, self._header.started, hosts=self._hosts)
            self._writer.write(replace(now, resumed=self._header.resumed))

    def notices(self) -> Sequence[Notice]:
        """Return what the user must know, once."""
        return self._notices.take()

    def summary(self) -> Mapping[str, Any] | None:
        """Return the present state of the job in bounded size; None before any event."""
        # Before it, the file is that of an earlier job.
        if not self._taken:
            return None
        self._writer.flush()
        with self._reading:
            try:
                for timed in self._follower.poll():
                    self._history.add(timed)
            # The disk is full, or the workspace is gone: the job continues without.
            except OSError:
                return None
        return compacted(self._history.summary(), SUMMARY_BYTES) if self._history.has_job else None

    def close(self, code: int | None) -> None:
        """Record how the job has ended; None: unknown. A second call does nothing."""
        self._writer.close(code)
        self._follower.close()
