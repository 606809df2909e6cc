"""The one listener of a job's events in its launcher, and the notice of a unit that waits for others."""

import sys

from topotrain.core.events import Event, Saved
from topotrain.launch import EventListener
from topotrain.launch.multinode.node_rendezvous import RendezvousNotice
from topotrain.launch.runtime.event_records import record
from topotrain.tools.monitor.job_report import Report
from topotrain.tools.monitor.progress_display import QuietProgress
from topotrain.tools.monitor.terminal import ProgressLine, redraws
from topotrain.tools.recording.job_recorder import JobRecorder


class JobMonitor:
    """Passes each event of a job, and each notice of its recorder, to all that follow it.

    Args:
        display: has the report.
        recorder: keeps the history.
        listener: also receives every event.
    """

    def __init__(self, display: QuietProgress, recorder: JobRecorder, listener: EventListener | None = None) -> None:
        self._display, self._recorder, self._listener = display, recorder, listener
        self.saved: Saved | None = None
        """The last snapshot."""

    @property
    def report(self) -> Report:
        return self._display.report

    def end(self, code: int) -> None:
        """Let the recording and the exports write what is left."""
        self._recorder.end(code)
        for notice in self._recorder.notices():
            self._display(notice)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Saved):
            self.saved = event
        for each in (event, *self._recorder.notices()):
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
