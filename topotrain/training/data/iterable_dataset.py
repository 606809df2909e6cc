"""One pass over an IterableDataset, a stream that every worker reads as a whole.

With several workers the random numbers of a stream come from (seed, epoch). So all read the same stream, and can read
it again when another group left a part of it. A stream that is different every time is read at most once, and missing
batches are reported.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from topotrain.training.data.batch_ranges import left_below, nth
from topotrain.training.data.data_client import DataClient
from topotrain.training.data.data_fingerprint import content
from topotrain.training.data.map_dataset import (
    PLAIN,
    BatchPosition,
    DataPlan,
    EpochReader,
    LeaseIterator,
    LoadedBatch,
    LoaderCopy,
    ResumePoint,
    ResumeRecorder,
    progress_of,
)
from topotrain.training.data.sampling import epoch_seed, leading, length_of, share_of_loaded
from topotrain.training.rng_state import RngState
from topotrain.training.worker_stats import BatchAccounting

_END = object()


def is_own(plan: DataPlan, opening: ResumePoint) -> bool:
    """Whether the stream shares the script's generators, as in the plain script."""
    return plan.alone and not opening.drawn


class _Reader:
    """Reads a stream's batches by number, forwards. `at` is the next one."""

    def __init__(
        self,
        inner: LoaderCopy,
        plan: DataPlan,
        epoch: int,
        opening: ResumePoint,
        compare: Callable[[Any], object] = lambda _: None,
    ) -> None:
        """`compare`: is given the first batch."""
        self.at, self._compare = 0, compare
        self._ended = False
        seed, noted = epoch_seed(plan.seed, epoch), opening.dice if opening.drawn == "dice" else None
        # Processes of the loader have generators of their own. Without them the stream would share the script's.
        own = is_own(plan, opening)
        self._generators: AbstractContextManager[object] = nullcontext()
        if not own and not inner.loader.num_workers:
            self._generators = RngState(seed if noted is None else noted)
        if not own and noted is None:
            inner.seed(seed)
        elif not own and noted is not None:
            inner.seed_from(noted)
        # `iter` may run code of the dataset, which may draw.
        with self._generators:
            self._batches = iter(inner.loader)

    def batch(self, number: int) -> Any:
        """Batch `number` >= `at` of the stream; _END beyond the last."""
        batch = _END
        while not self._ended and self.at <= number:
            with self._generators:
                batch = next(self._batches, _END)
            self._ended = batch is _END
            if not self.at and not self._ended:
                self._compare(batch)
            self.at += not self._ended
        return batch


class IterableEpoch(EpochReader):
    """One pass over a stream."""

    def __init__(
        self,
        inner: LoaderCopy,
        plan: DataPlan,
        client: DataClient,
        accounting: BatchAccounting,
        epoch: int,
        opening: ResumePoint = PLAIN,
        number: int = 0,
    ) -> None:
        """`number`: that of the loader, as `PassBegun` has it."""
        self._inner, self._plan, self._accounting, self._epoch = inner, plan, accounting, epoch
        self._opening, self._client, self._number = opening, client, number
        self._leases = LeaseIterator(client, epoch, -1, 0, accounting=accounting) if plan.mode == "lease" else None
        self._applied = self._seq = self._made = 0
        if self._leases is None:
            self._applied, self._seq, self._made = progress_of(client, opening, plan.stream(epoch))
        # The reader's `iter` uses another generator than the script's, which the plain loader's would have moved.
        if not is_own(plan, opening):
            inner.draw_seed()
        self._front: _Reader | None = _Reader(inner, plan, epoch, opening, self._compare)
        # For batches that went by: a reader cannot go back, and the front one must not lose its place.
        self._back: _Reader | None = None

    def next(self) -> LoadedBatch:
        if self._leases is None:
            place = self._place(self._seq)
            place = place._replace(made=self._made if self._seq < self._applied else 0)
            self._seq += 1
            unit = self._unit(place.number)
            if unit is _END:
                raise StopIteration
        else:
            place, unit = self._leased(self._leases)
        return (place, *unit)

    def catch_up(self, recorder: ResumeRecorder) -> None:
        # The script's generators are restored next, and the stream shares them: so it must be at its place by then.
        if self._opening.restored and self._front is not None and self._leases is None:
            self._front.batch(nth(self._opening.done, self._first(self._place(self._seq).number)) - 1)
        recorder.opened()

    def read_whole(self) -> None:
        # Processes of the loader have cut the first batches already.
        if not self._inner.loader.num_workers:
            self._plan = replace(self._plan, whole=True)
            self._inner.divide(self._plan)

    def send_draw(self) -> None:
        """Do nothing: all workers read the same stream, so there is no draw to send."""

    def leave(self) -> None:
        if self._leases is not None:
            self._leases.leave(None)
        self.end()

    def end(self) -> None:
        self._front = self._back = None

    def _place(self, seq: int) -> BatchPosition:
        plan = self._plan
        return BatchPosition(plan.stream(self._epoch), seq, 0, plan.group + seq * plan.groups, False)

    def _leased(self, leases: LeaseIterator) -> tuple[BatchPosition, Any]:
        while True:
            # It may wait, because everything before the lease was read.
            if leases.at >= leases.last and not leases.ask(wait=True):
                raise StopIteration
            place = leases.take()
            went_by = place.number < self._units_read()
            unit = self._unit(place.number)
            if unit is not _END:
                return place, unit
            # This worker has read the batch before, so the stream is shorter when it is read again.
            if went_by:
                self._accounting.lost(place.stream, leases.last - place.number)
                leases.drop_rest()
            else:
                leases.end_at(self._units_read())

    def _units_read(self) -> int:
        read = left_below(self._opening.done, self._front.at) if self._front else 0
        return -(-read // self._plan.workers) if self._plan.in_rounds else read

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
        # The last round has fewer batches than workers. The others repeat its first one at weight 0.
        if mine is _END:
            return _END if plan.own_streams else (0, self._counted(first)[1])
        return self._counted(mine)

    def _first(self, unit: int) -> int:
        return unit * self._plan.workers if self._plan.in_rounds else unit

    def _batch(self, position: int) -> Any:
        """The batch at this position of what is to be read in this pass."""
        if self._front is None:
            return _END
        number = nth(self._opening.done, position)
        if number >= self._front.at:
            return self._front.batch(number)
        if self._back is None or number < self._back.at:
            self._back = _Reader(LoaderCopy(self._inner.original, self._plan), self._plan, self._epoch, self._opening)
        return self._back.batch(number)

    def _compare(self, batch: Any) -> None:
        """Tell the other workers what the first batch of the stream is."""
        if self._plan.groups * self._plan.workers > 1:
            found = batch[2] if self._inner.collates else content(batch)
            self._client.begin_pass(self._epoch, self._number, content=found)

    def _counted(self, batch: Any) -> tuple[int, Any]:
        plan = self._plan
        if self._inner.collates:
            samples, data, _ = batch
            return samples, data
        if plan.workers == 1 or plan.in_rounds:
            return leading(batch) or 1, batch
        samples = length_of(batch)
        data, samples = share_of_loaded(batch, samples, plan.bounds(samples), plan.min_share)
        return samples, data
