"""The gradient source in which the sum is taken once per step."""

from collections.abc import Collection
from dataclasses import replace

import torch

from topotrain.config.sharding import Bucket
from topotrain.core.protocol import NO_REVISION, Push, bits_to_int, per_bucket
from topotrain.core.server.component_state import State
from topotrain.core.server.gradients.gradient_source import (
    GradientSource,
    ReducedBucket,
    SourceSettings,
    StepError,
    ages_of,
    other_batches,
)
from topotrain.core.server.gradients.unit_sums import HeldPushes
from topotrain.core.server.nonfinite import NO_WORKER, look, nonfinite_segment
from topotrain.core.server.ordered_sum import Part


class CommittedPushes(GradientSource):
    """Adds up the pushes that the workers' commits name, when all have committed.

    A push replaces the worker's earlier push of the bucket.
    """

    # The sum of a worker's backwards is what counts. One without a backward has a part of zero.
    may_differ: Collection[str] = ("backwards",)

    def __init__(self, settings: SourceSettings) -> None:
        # The script of a group of one may still change a gradient that is read in its memory. With several workers a
        # changed gradient is an error.
        stays = settings.reader is None or settings.workers > 1
        self._looks_early = settings.checked and stays
        self._expected: set[tuple[int, int]] = set()  # keys of `_looked` that need no look at the next push
        super().__init__(settings)

    def _reset(self) -> None:
        super()._reset()
        self._pushes: dict[int, HeldPushes] = {}  # by bucket
        self._unsummed: set[int] = set()  # places of buckets with parts that have not been added up
        self._looked: dict[tuple[int, int], tuple[int | None, bool]] = {}  # by (place of bucket, worker)

    def forget(self, worker: int) -> None:
        super().forget(worker)
        for pushes in self._pushes.values():
            pushes.pop(worker, None)
        self._looked = {key: seen for key, seen in self._looked.items() if key[1] != worker}

    def push(self, worker: int, message: Push, body: torch.Tensor | None) -> tuple[ReducedBucket, ...]:
        """Keep a worker's gradient of a bucket, unless a later one is here."""
        pushes = self._pushes.setdefault(message.bucket, {})
        old = pushes.get(worker)
        # The simulated transport delivers pushes in another order; the real ones never do.
        if old is None or old[0].ordinal < message.ordinal:
            pushes[worker] = (message, body)
            self.sums.note(body)
            if self._looks_early and body is not None:  # while it is in the processor's cache
                at = message.bucket - self._first
                expected = (at, worker) in self._expected
                present = bits_to_int(message.present)
                self._looked[at, worker] = (None, False) if expected else look(self._buckets[at], present, body)
        self._expected.clear()
        return ()

    def found_finite(self, worker: int, bucket: int) -> bool:
        """Whether a worker's last push of a bucket, and sums with it, are finite."""
        return self._looked.get((bucket - self._first, worker)) == (None, False)

    def expect_finite(self, worker: int, bucket: int) -> None:
        """Another copy has found this in the next push: it need not be looked at."""
        self._expected.add((bucket - self._first, worker))

    def renew(self, bucket: int, workers: Collection[int]) -> None:
        """A sum of these workers is about to take the place of what they have pushed."""
        at, pushes = bucket - self._first, self._pushes.get(bucket, {})
        for worker in workers:
            pushes.pop(worker, None)
            self._looked.pop((at, worker), None)

    def _check_ages(self, first: int, worker: int) -> None:
        """As `GradientSource._check_ages`. Several backwards of a batch count as one."""
        commits = self.commits[first], self.commits[worker]
        # A worker without any backward has none to learn from, if its share has the weight 0.
        ages = {frozenset(ages_of(each)) for each in commits if each.backwards or each.weight > 0}
        if len(ages) > 1:
            raise StepError(other_batches(first, commits[0], worker, commits[1]))

    @property
    def begun(self) -> bool:
        return bool(self._pushes) or super().begun

    # --- the staged step -----------------------------------------------------------------------------------------

    def _complete(self) -> bool:
        # On a transport that reorders, a commit may overtake its pushes.
        if not all(map(self._has_all, self.commits)):
            return False
        self._find_present(self.commits)
        return True

    def withdraw_sums(self) -> bool:
        """Remove the sums that the committed step cannot be made of.

        Returns whether there were any.
        """
        if not self.sums.any or not all(map(self._has_all, self.commits)):
            return False
        withdraw = self.sums.withdraw
        found = [withdraw(self._pushes.get(b.id, {}), self._parts(at)) for at, b in enumerate(self._buckets)]
        self.sums.clear()
        return any(found)

    def _has_all(self, worker: int) -> bool:
        """Whether every push that a worker's commit names is here."""
        revisions = self.commits[worker].revisions
        for at, bucket in enumerate(self._buckets):
            held = self._pushes.get(bucket.id, {}).get(worker)
            if revisions[at] != NO_REVISION and (held is None or held[0].ordinal < revisions[at]):
                return False
        return True

    def _find_present(self, workers: Collection[int]) -> None:
        """Fill `_present` for a step of these workers. Nothing is added up yet."""
        for at, (bucket, dropped) in enumerate(per_bucket(self._buckets, bits_to_int(self.first.dropped))):
            self._present[at] = 0
            for worker in workers:
                if self.commits[worker].revisions[at] != NO_REVISION:
                    self._present[at] |= bits_to_int(self._pushes[bucket.id][worker][0].present)
            # Before the dropped pieces are taken out: the others of the bucket still need the sum.
            if self._present[at]:
                self._unsummed.add(at)
            self._present[at] &= ~dropped

    def _parts(self, at: int) -> dict[int, Part]:
        held = self._pushes.get(self._buckets[at].id, {})
        # A worker without a gradient in this bucket is a part, too: its weight counts in the divisor.
        parts: dict[int, Part] = {}
        for worker, commit in self.commits.items():
            has = commit.revisions[at] != NO_REVISION
            parts[worker] = (commit.weight, held[worker][1] if has else None)
        return parts

    def nonfinite_workers(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for at in sorted(self._unsummed):
            bucket, large = self._buckets[at], False
            parts = self._parts(at)
            for worker, (weight, part) in parts.items():
                if weight > 0 and part is not None:
                    segment, is_large = self._look(at, worker, part)
                    large = large or is_large
                    if segment is not None:
                        found[worker] = segment
            if large and len(parts) > 1:  # finite parts may have an infinite sum
                total = torch.empty_like(self._buffers.view("mean", bucket))
                self._mean.write({worker: part for worker, part in parts.items() if worker not in found}, total)
                segment = nonfinite_segment(bucket, self._present[at], total)
                found |= {} if segment is None else {NO_WORKER: segment}
        return found

    def _look(self, at: int, worker: int, part: torch.Tensor) -> tuple[int | None, bool]:
        """`nonfinite.look`, which may have been asked when the part arrived."""
        seen = self._looked.get((at, worker)) if self._looks_early else None
        if seen is not None:
            return seen
        bucket = self._buckets[at]
        return look(bucket, bits_to_int(self._pushes[bucket.id][worker][0].present), part)

    def refuse(self, workers: Collection[int]) -> bool:
        for worker in workers:
            # The commit stays, because its batches are applied with the step.
            self.commits[worker] = replace(self.commits[worker], weight=0.0)
        self._find_present([worker for worker in self.commits if worker not in workers])
        return any(commit.weight > 0 for commit in self.commits.values())

    # --- the gradient --------------------------------------------------------------------------------------------

    def sum_all(self) -> None:
        # Only for a reader of the whole gradient: a norm, a check, or an optimizer of whole tensors.
        for at in self._unsummed:
            self._mean.write(self._parts(at), self._buffers.view("mean", self._buckets[at]))
        self._unsummed.clear()

    def gradient(self, bucket: Bucket) -> torch.Tensor:
        at = bucket.id - self._first
        if at in self._unsummed:
            # Summed when the update reads it, so that the sum is still in the processor's cache.
            return self._mean.passing(self._parts(at))
        return self._buffers.view("mean", bucket)

    # --- a second copy -------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        own = {"pushes": self._pushes, "unsummed": self._unsummed, "looked": self._looked}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        super().load_state_dict(state)
        self._pushes = {bucket: dict(by) for bucket, by in state["pushes"].items()}
        self._unsummed, self._looked = set(state["unsummed"]), dict(state["looked"])
