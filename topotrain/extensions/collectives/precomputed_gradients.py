"""One group's step on one shard where the gradient comes added up: a collective has made it, and one party hands it in.

Rule: nothing is summed and nothing divided here. Of the shard's gradient each bucket comes once: as an Edit of the one
worker that stands beside the server, or, where no worker sees a mean (`grads: kHidden`, `apply: kOnArrival`), from the
gateway itself. All workers still commit the step, and must agree.
"""

from typing import Any

import torch

from topotrain.config.sharding import Bucket
from topotrain.core.bitmaps import bits_to_int, per_bucket
from topotrain.core.protocol import BackwardEnd, Commit, GradientOverride, ProtocolError, Push
from topotrain.core.server.commit_agreement import agree
from topotrain.core.server.gradient_staging import GradientStaging, ReducedBucket


class PrecomputedGradients(GradientStaging):
    """What one worker group's collective has brought for the current step to one shard.

    Args:
        args, more: as for `GradientStaging`.
        totals: every bucket is given by `give`; else those come as Edits that the commits name in `edited`, a bit for
            each piece that has a gradient.
        foreign: the collective is not ours: when a backward's sum is there, nobody says so.
    """

    def __init__(self, *args: Any, totals: bool, foreign: bool, **more: Any) -> None:
        self._totals, self._foreign = totals, foreign
        super().__init__(*args, **more)

    def _reset(self) -> None:
        super()._reset()
        self._given: dict[int, torch.Tensor | None] = {}
        self._gathered = False

    def push(self, worker: int, message: Push, body: torch.Tensor) -> list[ReducedBucket]:
        """Nobody's own part has a place here. Raises ProtocolError."""
        raise ProtocolError(f"a push of worker {worker}, whose gradients are added up elsewhere")

    def end(self, worker: int, message: BackwardEnd) -> list[ReducedBucket]:
        """The worker beside this server has ended a backward."""
        super().end(worker, message)
        if self._foreign:
            self.reduced(message.ordinal)
        return []

    def reduced(self, ordinal: int) -> None:
        """The worker beside this server has all means of this backward: it waits for nobody any more."""
        self._close(self._reduction(ordinal))

    def check(self, worker: int, ordinal: int) -> None:
        """Raise StepError when a worker that has called step() left out this backward."""
        self._check_ordinal(worker, ordinal)

    def edit(self, message: GradientOverride, body: torch.Tensor) -> None:
        """A bucket's gradient; it stays as it is until the step is applied."""
        self._given.setdefault(message.bucket, body)

    def give(self, number: int, present: int, total: torch.Tensor | None) -> None:
        """A bucket's gradient with its pieces, or None where nobody has one; it stays until the step is applied."""
        at = number - self._first
        if number in self._given:
            return
        self._given[number] = total
        if total is not None and present:
            if self._arrived is not None and self._checked and self._suspect(at, present, total, {}):
                present = 0
            self._present[at] = present
            if self._arrived is not None:
                self._arrived(self._buckets[at], present, total)

    def commit(self, worker: int, message: Commit) -> None:
        """A worker called `optimizer.step()`. Raises StepError when the group's workers disagree."""
        for other, theirs in self.commits.items():
            agree(other, theirs, worker, message, {"edited": "which parameters have a gradient"})
        super().commit(worker, message)

    def try_stage(self) -> bool:
        """True once, when all workers have committed the step and its gradient is here."""
        if self.staged or len(self.commits) < self._workers:
            return False
        self.staged = self._all_given() if self._totals else self._all_edits()
        return self.staged

    def _all_given(self) -> bool:
        return len(self._given) == len(self._buckets)

    def _all_edits(self) -> bool:
        wanted = per_bucket(self._buckets, bits_to_int(self.commits[0].edited))
        if not all(bucket.id in self._given for bucket, mask in wanted if mask):
            return False
        self._present = [mask for _, mask in wanted]
        return True

    def spoilers(self) -> dict[int, int]:
        """As `GradientStaging.spoilers`; whose part it was is not known here."""
        for bucket in self._buckets if self._arrived is None else ():
            if self.present(bucket):
                self._suspect(bucket.id - self._first, self.present(bucket), self.gradient(bucket), {})
        return self._suspects

    def sum_all(self) -> None:
        """Put the staged step's gradient into one buffer, where a segment of it lies in one piece."""
        for bucket in self._buckets if not self._gathered else ():
            if self.present(bucket):
                self._view("mean", bucket).copy_(self.gradient(bucket))
        self._gathered = True

    def gradient(self, bucket: Bucket) -> torch.Tensor:
        """The staged step's gradient of a bucket, 1-D, valid for the pieces in `present`."""
        gradient = self._given[bucket.id]
        assert gradient is not None
        return gradient
