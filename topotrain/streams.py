"""One pass over a stream (IterableDataset), which has no sampler to divide: every worker reads all, and keeps its part.

Rule: with several workers the dice that a stream throws come from (seed, epoch), so that all read the same stream and
can read it again when another group left a part of it. A stream that is different every time is read at most once,
and what is missing is told.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any

from topotrain.feeds import STATIC, Copied, DataPlan, Desk, Leases, Ledger, Place
from topotrain.sampling import Dice, epoch_seed, leading, share_of_loaded

_END = object()


class StreamFeed:
    """As `MapFeed`, for a stream. Leases are asked for on reading, when all before is read: every question may wait."""

    def __init__(self, inner: Copied, plan: DataPlan, desk: Desk, ledger: Ledger, epoch: int) -> None:
        self._inner, self._plan, self._ledger, self._epoch = inner, plan, ledger, epoch
        self._leases = Leases(desk, epoch, -1, 0) if plan.mode == "lease" else None
        self._places = (self._place(seq) for seq in count())
        self._again = False
        self._batches: Iterator[Any]
        self._open()

    def next(self) -> tuple[Place, int, Any]:
        """As `MapFeed.next`."""
        if self._leases is None:
            place = next(self._places)
            unit = self._unit(place.number)
            if unit is _END:
                raise StopIteration
        else:
            place, unit = self._leased(self._leases)
        return (place, *unit)

    def leave(self) -> None:
        """As `MapFeed.leave`."""
        if self._leases is not None:
            self._leases.leave(None)
        self._batches = iter(())

    def _place(self, seq: int) -> Place:
        plan = self._plan
        return Place((self._epoch << 32) | STATIC | plan.group, seq, 0, plan.group + seq * plan.groups, False)

    def _leased(self, leases: Leases) -> tuple[Place, Any]:
        while True:
            if leases.at >= leases.last and not leases.ask(wait=True):
                raise StopIteration
            place = leases.take()
            unit = self._unit(place.number)
            if unit is not _END:
                return place, unit
            if self._again:
                self._ledger.lost(place.stream, leases.last - place.number)
            else:
                leases.total = -(-self._at // self._plan.workers) if self._plan.in_rounds else self._at
            leases.at = leases.last

    def _open(self) -> None:
        """Begin to read the stream, once more if a batch is needed that went by."""
        self._at, self._ended = 0, False
        seed = epoch_seed(self._plan.seed, self._epoch)
        self._dice = Dice(seed)
        if self._plan.alone:
            self._batches = iter(self._inner.loader)
            return
        self._inner.reseed(seed)
        with self._dice:
            self._batches = iter(self._inner.loader)

    def _unit(self, number: int) -> Any:
        """(samples that count, data) of a unit of the epoch; _END beyond the last."""
        plan = self._plan
        if not plan.in_rounds:
            batch = self._batch(number)
            return batch if batch is _END else self._counted(batch)
        first = mine = self._batch(number * plan.workers)
        if first is _END:
            return _END
        if plan.index:
            mine = self._batch(number * plan.workers + plan.index)
        return (0, self._counted(first)[1]) if mine is _END else self._counted(mine)

    def _batch(self, number: int) -> Any:
        """Batch `number` of the stream; _END beyond the last."""
        if number < self._at:
            self._again = True
            self._open()
        while not self._ended:
            batch = self._read()
            if batch is _END:
                self._ended = True
                break
            self._at += 1
            if self._at > number:
                return batch
        return _END

    def _read(self) -> Any:
        if self._plan.alone or self._inner.loader.num_workers:
            return next(self._batches, _END)
        with self._dice:
            return next(self._batches, _END)

    def _counted(self, batch: Any) -> tuple[int, Any]:
        plan = self._plan
        if self._inner.collates:
            samples, data = batch
            return samples, data
        if plan.workers == 1 or plan.in_rounds:
            return leading(batch) or 1, batch
        data, samples = share_of_loaded(batch, plan.bounds, plan.min_share)
        return samples, data
