"""Whether and where the events of a job are recorded."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

from topotrain.config.job import Job
from topotrain.config.topology import Topology
from topotrain.core.events import Event, Notice
from topotrain.launch import JobWatch

if TYPE_CHECKING:
    from topotrain.tools.recording.job_recorder import JobRecorder


class JobRecording(JobWatch):
    """The recording of a job that this process leads, now or later.

    Args:
        job, topology: of the job. None: `begin` names them.
    """

    def __init__(self, job: Job | None = None, topology: Topology | None = None) -> None:
        self._job, self._topology = job, topology
        self._led: tuple[bool, Sequence[str]] | None = None
        self._made: JobRecorder | None = None
        # A unit is elected on another thread.
        self._lock = Lock()

    def begin(self, job: Job, topology: Topology) -> None:
        """Name the job; it is recorded if this process leads it."""
        self._job, self._topology = job, topology
        self._open()

    def lead(self, resumed: bool, hosts: Sequence[str]) -> None:
        self._led = resumed, hosts
        self._open()

    def _open(self) -> None:
        with self._lock:
            job, topology, led = self._job, self._topology, self._led
            if self._made is not None or job is None or topology is None or led is None:
                return
            from topotrain.tools.recording.job_recorder import JobRecorder

            self._made = JobRecorder(job, topology, *led)

    def __call__(self, event: Event) -> None:
        """Record an event."""
        if self._made is not None:
            self._made(event)

    def notices(self) -> Sequence[Notice]:
        """Return what the user must know, once."""
        return () if self._made is None else self._made.notices()

    def summary(self) -> Mapping[str, Any] | None:
        return None if self._made is None else self._made.summary()

    def end(self, code: int | None) -> None:
        """Record how the job has ended; None: unknown. A second call does nothing."""
        if self._made is not None:
            self._made.close(code)


@contextmanager
def recording(job: Job, topology: Topology, resumed: bool) -> Iterator[JobRecording]:
    """Record a job that this process launches.

    resumed: it goes on from a snapshot, and so does its recording.
    """
    made = JobRecording(job, topology)
    made.lead(resumed, ())
    try:
        yield made
    finally:
        made.end(None)
