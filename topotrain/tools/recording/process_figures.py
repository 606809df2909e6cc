"""The present figures of a worker and of a server, from its samples."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import lt, sub

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
        samples = self._samples
        # `map` with `lt`: this runs thousands of times a second for a job of hundreds of processes.
        if samples and any(map(lt, counters, samples[-1][1])):
            samples.clear()
        samples.append((at, counters))
        while len(samples) > 2 and samples[0][0] < at - RATE_S:
            samples.popleft()

    def grown(self) -> tuple[float, tuple[float, ...]] | None:
        """Return the seconds and the growth of the counters; None after a single sample."""
        if len(self._samples) < 2:
            return None
        (first, before), (last, now) = self._samples[0], self._samples[-1]
        return last - first, tuple(map(sub, now, before))


@dataclass(slots=True)
class WorkerFigures:
    """The present figures of a worker."""

    step: int = 0
    loss: float | None = None
    samples_per_s: float | None = None
    staleness_mean: float = 0.0
    staleness_p95: float = 0.0
    staleness_max: int = 0
    waiting_share: float | None = None
    log: dict[str, float] = field(default_factory=dict)
    _is_recent: bool = False  # whether the staleness is that of the last seconds, and not of all
    _rates: RateWindow = field(default_factory=RateWindow)

    def on_step(self, at: float, event: StepDone) -> None:
        """Record a step."""
        self._is_recent = len(event.recent) == 3
        if self._is_recent:
            self.staleness_mean, self.staleness_p95, most = event.recent
            self.staleness_max = int(most) if math.isfinite(most) else 0
        else:
            self._take_staleness(event)
        self.step = event.step
        if event.loss is not None:
            self.loss = event.loss
        self._rates.add(at, event.time, event.samples, event.waited_s)
        grown = self._rates.grown()
        # The seconds are those of the process: several samples may have come together.
        seconds, samples, waited = (event.time, event.samples, event.waited_s) if grown is None else grown[1]
        if seconds > 0:
            self.samples_per_s = samples / seconds
            self.waiting_share = min(1.0, waited / seconds)

    def on_finished(self, event: Finished) -> None:
        """Record the end of the script."""
        # The totals of the end are no figures of the last seconds.
        if not self._is_recent:
            self._take_staleness(event)
        self.step = event.steps

    def _take_staleness(self, event: StepDone | Finished) -> None:
        self.staleness_mean, self.staleness_max = event.staleness_mean, event.staleness_max
        self.staleness_p95 = event.staleness_p95

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
    """The present figures of a server."""

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
        """Record a sample."""
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
