"""The present figures of a worker and of a server, from its samples."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import lt, sub
from typing import NamedTuple

from topotrain.core.events import MOST_LOGGED_NAMES, Finished, ServerLoad, StepDone

RATE_S = 10.0
"""Seconds over which rates are measured."""
APPLIES_S = 2.0
"""Seconds without news of a server after which it waits."""


@dataclass(slots=True)
class RateWindow:
    """Rates of counters over the last seconds.

    A rate is that since the first sample of the window, or since the one before the last where that is older. A counter
    that decreases is that of a new process.
    """

    _samples: deque[tuple[float, tuple[float, ...]]] = field(default_factory=deque)

    def add(self, at: float, *counters: float) -> None:
        """Add a sample of the counters."""
        # `map` with `lt`: this runs thousands of times a second for a job of hundreds of processes.
        samples = self._samples
        if samples and any(map(lt, counters, samples[-1][1])):
            # Another window, and not this one emptied: other threads read it.
            samples = self._samples = deque()
        samples.append((at, counters))
        while len(samples) > 2 and samples[0][0] < at - RATE_S:
            samples.popleft()

    def grown(self) -> tuple[float, tuple[float, ...]] | None:
        """Return the seconds and the growth of the counters; None after a single sample."""
        samples = self._samples
        if len(samples) < 2:
            return None
        (first, before), (last, now) = samples[0], samples[-1]
        return last - first, tuple(map(sub, now, before))


class Staleness(NamedTuple):
    """Of updates, in versions: mean, 95th percentile and maximum."""

    mean: float
    p95: float
    max: int


@dataclass(slots=True)
class WorkerFigures:
    step: int = 0
    loss: float | None = None
    log: dict[str, float] = field(default_factory=dict)
    _last: StepDone | Finished | None = None
    """The last event with its staleness."""
    _totals: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Of the present process: seconds, samples, seconds of waits."""
    _rates: RateWindow = field(default_factory=RateWindow)

    def on_step(self, at: float, event: StepDone) -> None:
        # Figures are made when they are read: jobs of hundreds of processes have a thousand events a second.
        self._last, self.step = event, event.step
        if event.loss is not None:
            self.loss = event.loss
        self._totals = event.time, event.samples, event.waited_s
        self._rates.add(at, *self._totals)

    def on_finished(self, event: Finished) -> None:
        # The totals of the end are no figures of the last seconds.
        if not isinstance(self._last, StepDone) or len(self._last.recent) != 3:
            self._last = event
        self.step = event.steps

    @property
    def samples_per_s(self) -> float | None:
        """The samples per second of the process's own time."""
        seconds, samples, _ = self._grown()
        return samples / seconds if seconds > 0 else None

    @property
    def waiting_share(self) -> float | None:
        """The share of its time for which it has waited."""
        seconds, _, waited = self._grown()
        return min(1.0, waited / seconds) if seconds > 0 else None

    def _grown(self) -> tuple[float, ...]:
        # The seconds are those of the process: several samples may have come together.
        grown = self._rates.grown()
        return self._totals if grown is None else grown[1]

    @property
    def staleness(self) -> Staleness:
        """The staleness of the last seconds, or else of all steps."""
        last = self._last
        if last is None:
            return Staleness(0.0, 0.0, 0)
        if isinstance(last, StepDone) and len(last.recent) == 3:
            mean, p95, most = last.recent
            return Staleness(mean, p95, int(most) if math.isfinite(most) else 0)
        return Staleness(last.staleness_mean, last.staleness_p95, last.staleness_max)

    def on_logged(self, values: Mapping[str, float]) -> Mapping[str, float]:
        """Record logged values; return those that are kept."""
        kept = {}
        for name, value in values.items():
            # Workers keep to this limit, but a recording may have anything.
            if name in self.log or len(self.log) < MOST_LOGGED_NAMES:
                self.log[name] = kept[name] = value
        return kept


@dataclass(slots=True)
class ServerFigures:
    updates: int = 0
    updates_per_s: float | None = None
    works: bool = False
    """Whether it has applied updates between its last two samples."""
    loaded_at: float | None = None
    """When the last sample came."""
    _rates: RateWindow = field(default_factory=RateWindow)

    def on_resources(self, at: float) -> None:
        """Note that the server lives, and may have said nothing for long."""
        # Servers report what they do, and not that they do nothing.
        if self.loaded_at is not None and at - self.loaded_at > APPLIES_S:
            self.works = False

    def on_load(self, at: float, event: ServerLoad) -> None:
        self.loaded_at = at
        self.works = event.updates > self.updates
        self.updates = event.updates
        if event.updates == 0:
            # The time before the first update is no part of the rate.
            self._rates, self.updates_per_s = RateWindow(), None
            return
        self._rates.add(at, event.updates)
        grown = self._rates.grown()
        if grown is not None and grown[0] > 0:
            self.updates_per_s = grown[1][0] / grown[0]
