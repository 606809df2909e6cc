"""Whether the loss of an asynchronous job rises for good: said once, by worker (0,0).

Rule: noise says nothing. Losses are looked at in blocks of 16; the middle one of a block stands for it, so that single
large ones do not count, and the spread of a block is the middle distance from that. The loss rises when three blocks in
a row lie above the lowest one by more than 4 spreads, and by more than half of what had been gained since the start.
"""

import math
from statistics import median

from topotrain.asynchrony import explanation, groups_apart
from topotrain.events import Notice
from topotrain.front.context import Context
from topotrain.worker import Worker

BLOCK = 16
_SPREADS = 4.0
_GAIN = 0.5
_IN_A_ROW = 3


class Trend:
    """Losses one by one; tells when they have risen for good."""

    def __init__(self) -> None:
        self._open: list[float] = []
        self._first = self.lowest = math.inf
        self._spread = 0.0
        self._above = 0
        self.latest = math.inf

    def __call__(self, loss: float) -> bool:
        """Take one more; whether the loss is rising."""
        self._open.append(loss if math.isfinite(loss) else math.inf)
        if len(self._open) < BLOCK:
            return False
        block, self._open = self._open, []
        self.latest = middle = median(block)
        if middle < self.lowest:
            self.lowest = middle
            self._first = middle if self._first == math.inf else self._first
            self._spread = max(self._spread, median(abs(loss - middle) for loss in block if math.isfinite(loss)))
        limit = self.lowest + max(_SPREADS * self._spread, _GAIN * (self._first - self.lowest))
        self._above = self._above + 1 if middle > limit else 0
        return self._above >= _IN_A_ROW


class Rising:
    """Says so, once, where worker groups do not wait for each other."""

    def __init__(self, here: Context, worker: Worker) -> None:
        self._here, self._worker = here, worker
        watches = here.is_main and groups_apart(here.place.topology) > 1
        self._trend: Trend | None = Trend() if watches else None

    def __call__(self, loss: float) -> None:
        """A backward has begun at this loss."""
        trend = self._trend
        if trend is None or not trend(loss):
            return
        self._trend = None
        why = explanation(self._here.place.topology, self._worker.momentum)
        latest = f"{trend.latest:.3g}" if math.isfinite(trend.latest) else "not finite"
        self._here.emit(
            Notice(str(self._here.me), f"the loss is rising: {latest} now, {trend.lowest:.3g} at its lowest. {why}")
        )
