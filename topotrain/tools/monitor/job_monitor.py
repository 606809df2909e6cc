"""The one listener of a job's events in its launcher, and the notice of a unit that waits for others."""

import sys
from typing import TYPE_CHECKING

from topotrain.core.events import Event, Saved
from topotrain.launch import EventListener
from topotrain.launch.multinode.node_rendezvous import RendezvousNotice
from topotrain.launch.runtime.event_records import record
from topotrain.tools.monitor.job_report import Report
from topotrain.tools.monitor.progress_display import QuietProgress
from topotrain.tools.monitor.terminal import ProgressLine, redraws
from topotrain.tools.recording.job_recorder import JobRecorder

if TYPE_CHECKING:
    from topotrain.tools.exporters.job_exports import JobExports


class JobMonitor:
    """Passes each event of a job, and each notice of its followers, to all of them.

    Args:
        display: has the report.
        recorder: keeps the history.
        exports: read the history.
        listener: also receives every event.
    """

    def __init__(
        self,
        display: QuietProgress,
        recorder: JobRecorder,
        exports: "JobExports | None" = None,
        listener: EventListener | None = None,
    ) -> None:
        self._display, self._recorder = display, recorder
        self._exports, self._listener = exports, listener
        self.saved: Saved | None = None
        """The last snapshot."""
        if exports is not None:
            exports.follow(recorder)

    @property
    def report(self) -> Report:
        return self._display.report

    def end(self, code: int) -> None:
        """Let the recording and the exports write what is left."""
        self._recorder.end(code)
        if self._exports is not None:
            self._exports.end(code)
            for notice in self._exports.notices():
                self._display(notice)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Saved):
            self.saved = event
        exported = () if self._exports is None else self._exports.notices()
        for each in (event, *self._recorder.notices(), *exported):
            record(each)
            self._display(each)
            self._recorder(each)
            if self._listener is not None:
                self._listener(each)


class LiveRendezvousNotice(RendezvousNotice):
    """Shows the wait in one line, which the next one replaces."""

    def __init__(self, rank: int, nprocs: int) -> None:
        super().__init__(rank, nprocs)
        self._line = ProgressLine(late_s=1.0)

    def show(self, text: str, now: float) -> None:
        self._line.show(text)

    def end(self) -> None:
        self._line.end()


def rendezvous_notice(rank: int, nprocs: int) -> RendezvousNotice:
    """Return the notice for stderr: a line in place on a terminal, lines elsewhere."""
    return (LiveRendezvousNotice if redraws(sys.stderr) else RendezvousNotice)(rank, nprocs)
