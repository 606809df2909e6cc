"""Progress of a job: elapsed time, epoch, share of its samples, and time left.

The terminal, the page, the summary and the metrics have these figures. All times are seconds of one clock.
"""

import math
from operator import itemgetter

from topotrain.core.events import Event, Finished, Started, StepDone

UNKNOWN = "-"
LEAST_S = 2.0
"""Seconds of training before there is an estimate."""
_MOST = 256
_COUNTED_S = 10.0
"""Seconds without a step after which the time that is left does not go on to fall."""


class RemainingTime:
    """Estimates when a job ends.

    The pace is that of the second half of the training so far. So the estimate forgets a slow beginning, and a single
    slow step moves it little.
    """

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []

    def update(self, now: float, share: float) -> None:
        """Note the share of the job that is done, from 0 to 1."""
        samples = self._samples
        if samples and share < samples[-1][1]:
            # The job goes on from a snapshot.
            samples.clear()
        # Between two leases the share stays the same, although the job makes steps.
        if not samples or share > samples[-1][1]:
            samples.append((now, share))
        if len(samples) > _MOST:
            # The first and the last one stay.
            del samples[1:-1:2]

    @property
    def end(self) -> float | None:
        """The time at which the job will end. None: not known yet."""
        # A copy: it is read by other threads, too.
        samples = self._samples.copy()
        if not samples or samples[-1][0] - samples[0][0] < LEAST_S:
            return None
        (first, _), (last, share) = samples[0], samples[-1]
        begin, before = max(sample for sample in samples if sample[0] <= (first + last) / 2)
        return last + (1.0 - share) * (last - begin) / (share - before)


class JobProgress:
    """Follows the progress of a job, for a thread that draws, too.

    now: the time at which the job begins.
    """

    def __init__(self, now: float) -> None:
        self._began = self._stepped = now
        self._remaining = RemainingTime()
        self._shares: dict[str, float] = {}
        self._furthest = ""
        """The worker with the greatest share."""
        self.epoch = -1
        """From 0; -1: unknown."""
        self.share = -1.0
        """The share of the job's samples, from 0 to 1; -1: unknown."""

    def restart(self) -> None:
        """Note that the whole job has started again."""
        self._remaining = RemainingTime()
        self._shares.clear()

    def on_event(self, event: Event, now: float) -> None:
        match event:
            case StepDone() | Finished() if 0 <= event.progress <= 1:
                self._shares[event.who] = event.progress
                self._update(event, now)
            case StepDone():
                self.epoch, self._stepped = max(event.epoch, self.epoch), now
            case Started(who=who):
                # Its new process may go on from a snapshot.
                self._shares.pop(who, None)
            case _:
                pass

    def _update(self, event: StepDone | Finished, now: float) -> None:
        self._stepped = now
        # The worker that is furthest: with leases the others know an earlier state of the job.
        if event.progress >= self.share:
            self.share, self._furthest = event.progress, event.who
        elif event.who == self._furthest or self._furthest not in self._shares:
            self._furthest, self.share = max(self._shares.items(), key=itemgetter(1))
        self._remaining.update(now, self.share)
        # At the end no epoch is under way, and the last one stays.
        if event.epoch >= 0 and event.progress >= self.share and (event.progress < 1 or self.epoch < 0):
            self.epoch = event.epoch

    def left_s(self, now: float) -> float | None:
        """Return the seconds that are left; None: unknown."""
        if self.share >= 1:
            return 0.0
        end = self._remaining.end
        # A job that stands still must not seem to come closer to its end.
        return None if end is None else max(0.0, end - min(now, self._stepped + _COUNTED_S))

    def words(self, now: float) -> str:
        left = self.left_s(now)
        epoch = str(self.epoch + 1) if self.epoch >= 0 else UNKNOWN
        # Rounded down: 100 % are the end.
        done = f"{math.floor(100 * self.share)} %" if self.share >= 0 else UNKNOWN
        return f"epoch {epoch}  done {done}  ETA {UNKNOWN if left is None else duration(left)}"

    def header(self, now: float) -> str:
        return f"elapsed {duration(self.elapsed(now))}  {self.words(now)}"

    def elapsed(self, now: float) -> float:
        return now - self._began


def duration(seconds: float) -> str:
    """Return a time such as 0:07, 12:34 or 27:00:59."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
