"""The counters of a worker or server over all its processes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from topotrain.core.events import Event, Finished, LocalSteps, StepDone

Point = tuple[float, float]
"""A loss, after the seconds since the first step."""


@dataclass(slots=True)
class LossCurve:
    """The (time, loss) points of one worker in bounded memory."""

    limit: int = 2048
    points: list[Point] = field(default_factory=list)
    _stride: int = 1
    _open: tuple[int, float, float] = (0, 0.0, 0.0)
    """The points that are not added yet: their number, and the sums of their times and losses."""

    def add(self, time: float, loss: float) -> None:
        """Add a point; `time` (seconds) never decreases."""
        count, times, losses = self._open[0] + 1, self._open[1] + time, self._open[2] + loss
        if count < self._stride:
            self._open = count, times, losses
            return
        self.points.append((times / count, losses / count))
        self._open = 0, 0.0, 0.0
        if len(self.points) >= self.limit:
            # The whole curve stays, with half the points: dropping old ones would lose its beginning.
            self.points = [mean_point(self.points[i : i + 2]) for i in range(0, len(self.points), 2)]
            self._stride *= 2


def mean_point(points: Sequence[Point]) -> Point:
    return sum(t for t, _ in points) / len(points), sum(loss for _, loss in points) / len(points)


@dataclass(frozen=True, slots=True)
class ProcessCounts:
    """The counters of a resident.

    stale: the sum of the staleness of all steps. late: the steps of backup workers without it.
    made, lost, waited_s: the steps between rounds, those of them that are in no round, and seconds of waits for rounds.
    """

    steps: int = 0
    samples: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    bytes_link: int = 0
    stale: float = 0.0
    staleness_max: int = 0
    time: float = 0.0
    late: int = 0
    made: int = 0
    lost: float = 0.0
    waited_s: float = 0.0

    def and_then(self, more: "ProcessCounts") -> "ProcessCounts":
        both = {name: getattr(self, name) + getattr(more, name) for name in _COUNTERS}
        most = max(self.staleness_max, more.staleness_max)
        # Not the sum of both: a restarted process reports the steps of its group, with those of former processes.
        return ProcessCounts(**both | {"staleness_max": most, "steps": more.steps or self.steps})


_COUNTERS = tuple(f.name for f in fields(ProcessCounts))


@dataclass(slots=True)
class ProcessTally:
    """The counters of a resident, of its present process and the former ones."""

    pid: int | None = None
    before: ProcessCounts = ProcessCounts()
    last: StepDone | Finished | None = None
    """The last event of the present process."""
    time: float = 0.0
    """Seconds of the present process since its first step."""
    local: LocalSteps | None = None
    """The steps between rounds of the present process."""
    trains_alone: bool = False
    """It has reported such steps."""
    curve: LossCurve = field(default_factory=LossCurve)

    @property
    def step(self) -> int:
        """The last step of the present process."""
        return 0 if self.last is None else self.last.step if isinstance(self.last, StepDone) else self.last.steps

    @property
    def whole(self) -> ProcessCounts:
        # Not added up event by event: jobs have hundreds of processes, which report four times a second.
        return self.before.and_then(self._now())

    def _now(self) -> ProcessCounts:
        last, local, now = self.last, self.local, ProcessCounts()
        if local is not None:
            # A worker tells all its steps before its end: pending ones are those of a process that came to no end.
            now = ProcessCounts(made=local.made, lost=local.pending + local.dropped, waited_s=local.waited_s)
        if last is None:
            return now
        # The mean is over the steps of this process, and `step` includes those of former ones.
        stale = last.staleness_mean * max(0, self.step - self.before.steps)
        traffic = {"bytes_out": last.bytes_out, "bytes_in": last.bytes_in, "bytes_link": last.bytes_link}
        counts = {"steps": self.step, "samples": last.samples, "staleness_max": last.staleness_max, "late": last.late}
        return replace(now, stale=stale, time=self.time, **traffic, **counts)

    def take(self, pid: int | None, event: Event) -> None:
        """Take the counters of an event; pid: of the present process, if it is known."""
        if pid is not None and pid != self.pid:
            if self.pid is not None:
                # A new process counts from 0 again.
                self.before, self.last, self.time, self.local = self.whole, None, 0.0, None
            self.pid = pid
        match event:
            case LocalSteps():
                self.local, self.trains_alone = event, True
            case Finished():
                self.last = event
            case StepDone(time=time, loss=loss):
                self.last, self.time = event, time
                if loss is not None and math.isfinite(loss):  # else every mean would not be finite
                    self.curve.add(self.before.time + time, loss)
            case _:
                pass
