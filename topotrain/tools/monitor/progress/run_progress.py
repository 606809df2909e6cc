"""Progress of a job: elapsed time, epoch, share of its samples, and time left."""

import math
from dataclasses import dataclass, replace

from topotrain.core.events import Event, Finished, Started, StepDone
from topotrain.tools.monitor.progress.remaining_time import RemainingTime

UNKNOWN = "-"
_COUNTED_S = 10.0
"""Seconds without a step after which the time that is left does not go on to fall."""


@dataclass(frozen=True, slots=True)
class ProgressFigures:
    """The figures as of the last step.

    epoch: from 0, -1: unknown. share: of the job's samples, from 0 to 1; -1: unknown. end: the time at which the job
    will end, None: unknown. at: the time of the last step.
    """

    epoch: int = -1
    share: float = -1.0
    end: float | None = None
    at: float = 0.0

    def words(self, now: float) -> str:
        """Return the figures as a text."""
        epoch = str(self.epoch + 1) if self.epoch >= 0 else UNKNOWN
        # Rounded down: 100 % are the end.
        done = f"{math.floor(100 * self.share)} %" if self.share >= 0 else UNKNOWN
        return f"epoch {epoch}  done {done}  ETA {self._left(now)}"

    def _left(self, now: float) -> str:
        if self.share >= 1:
            return duration(0.0)
        if self.end is None:
            return UNKNOWN
        # A job that stands still must not seem to come closer to its end.
        return duration(max(0.0, self.end - min(now, self.at + _COUNTED_S)))


class RunProgress:
    """Follows the progress of a job. All times are of one clock.

    now: the time at which the job begins.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._remaining = RemainingTime()
        self._shares: dict[str, float] = {}
        # Replaced as a whole: the thread that draws reads it without a lock.
        self._figures = ProgressFigures(at=now)

    def on_event(self, event: Event, now: float) -> None:
        """Record an event."""
        match event:
            case Started(who=who):
                # Its new process may go on from a snapshot.
                self._shares.pop(who, None)
            case StepDone() | Finished() if 0 <= event.progress <= 1:
                self._shares[event.who] = event.progress
                self._update(event, now)
            case StepDone():
                epoch = max(event.epoch, self._figures.epoch)
                self._figures = replace(self._figures, epoch=epoch, at=now)
            case _:
                pass

    def _update(self, event: StepDone | Finished, now: float) -> None:
        # The worker that is furthest: with leases the others know an earlier state of the job.
        share = max(self._shares.values())
        self._remaining.update(now, share)
        # At the end no epoch is under way, and the last one stays.
        epoch = event.epoch if event.progress < 1 and event.progress >= share else self._figures.epoch
        self._figures = ProgressFigures(epoch, share, self._remaining.end, now)

    def words(self, now: float) -> str:
        """Return the figures as a text."""
        return self._figures.words(now)

    def header(self, now: float) -> str:
        """Return the elapsed time and the figures."""
        return f"elapsed {duration(self.elapsed(now))}  {self.words(now)}"

    def elapsed(self, now: float) -> float:
        """Return the seconds since the job began."""
        return now - self._began


def duration(seconds: float) -> str:
    """Return a time such as 0:07, 12:34 or 27:00:59."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
