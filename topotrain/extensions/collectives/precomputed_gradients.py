"""Gradient sources of jobs in which a collective adds up the gradients.

Nothing is summed and nothing divided here. Each bucket of the shard's gradient comes once: from the worker beside the
server, as the script left it (`EditedTotals`), or from the relay of the server, where no worker sees a mean
(`RelayedTotals`). All workers still commit the step, and must agree.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from topotrain.config.sharding import Bucket
from topotrain.config.topology import Address
from topotrain.core.protocol import (
    BackwardEnd,
    Commit,
    GradientOverride,
    ProtocolError,
    Push,
    bits_to_int,
    check_bits,
    per_bucket,
)
from topotrain.core.server.gradients.backward_means import BackwardsOfStep, check_ordinal
from topotrain.core.server.gradients.gradient_source import (
    GradientSource,
    ReducedBucket,
    SourceSettings,
    check_revisions,
)
from topotrain.core.server.nonfinite import nonfinite_workers


@dataclass(frozen=True, slots=True)
class Gateway:
    """A server that takes all gradients of one worker, also those of other shards.

    Attributes:
        server: the server.
        worker: its worker.
        buckets: the number of buckets of the whole model.
    """

    server: Address
    worker: Address
    buckets: int

    def check_sender(self, sender: Address) -> None:
        """Raise ProtocolError for gradients of another worker."""
        if sender != self.worker:
            raise ProtocolError(f"{self.server} takes gradients of {self.worker} only, not of {sender}")


class PrecomputedGradients(GradientSource):
    """The sums of a worker group's collective for the current step of one shard.

    Args:
        settings: as for `GradientSource`.
        gateway: the server, where topotrain's own collective goes through it; None with torch.distributed.
    """

    words: Mapping[str, str] = {"edited": "which parameters have a gradient"}

    def __init__(self, settings: SourceSettings, gateway: Gateway | None) -> None:
        self._gateway = gateway
        super().__init__(settings)

    def _reset(self) -> None:
        super()._reset()
        self._backwards = BackwardsOfStep()
        self._sums: dict[int, torch.Tensor | None] = {}  # by bucket
        self._nonfinite: dict[int, int] = {}
        self._gathered = False

    # --- arrivals ------------------------------------------------------------------------------------------------

    def check(self, sender: Address, message: BackwardEnd | Commit) -> None:
        if self._gateway is None:
            if isinstance(message, Commit):  # the end of a backward names buckets that no server reads
                super().check(sender, message)
        elif isinstance(message, BackwardEnd):
            self._gateway.check_sender(sender)
            check_bits(message.pushed, self._gateway.buckets, sender, "the buckets of a backward")
        else:
            # The gateway's own worker commits pushes of the whole model.
            own = sender == self._gateway.worker
            check_revisions(sender, message, self._gateway.buckets if own else len(self._buckets))

    def check_ordinal(self, worker: int, ordinal: int) -> None:
        """Raise StepError when a worker that has called step() left out this backward."""
        if self.visible:
            check_ordinal(self.commits, worker, ordinal)

    def push(self, worker: int, message: Push, body: torch.Tensor | None) -> tuple[ReducedBucket, ...]:
        """Raise ProtocolError: the collective adds up the workers' parts."""
        raise ProtocolError(f"a push of worker {worker}: a collective adds up the gradients of this group")

    def end(self, worker: int, message: BackwardEnd) -> tuple[ReducedBucket, ...]:
        """As `GradientSource.end`, for the worker beside this server."""
        self.check_ordinal(worker, message.ordinal)
        backward = self._backwards.begin(self.step, message.ordinal)
        backward.ends.setdefault(worker, message)
        if self._gateway is None:  # torch.distributed has no message to the servers when sums are complete
            self.reduced(message.ordinal)
        return ()

    def reduced(self, ordinal: int) -> None:
        """Note that the worker beside this server has all means of this backward."""
        self._backwards.close(self._backwards.begin(self.step, ordinal))

    def commit(self, worker: int, message: Commit) -> None:
        # The first commit counts: a repeated one must not be compared with backwards that have been closed since.
        if worker not in self.commits:
            super().commit(worker, message)
            if self.visible:
                self._backwards.check_commit(worker, message)

    @property
    def waits(self) -> bool:
        return self._backwards.any_open or super().waits

    # --- the staged step -----------------------------------------------------------------------------------------

    def nonfinite_workers(self) -> dict[int, int]:
        # No worker is named: its part is not known here.
        for bucket in self._buckets:
            if self.present(bucket):
                self._nonfinite |= nonfinite_workers(bucket, self.present(bucket), self.gradient(bucket), {})
        return self._nonfinite

    def sum_all(self) -> None:
        # A shard calls this for its vote and again for each whole parameter: the copy is made once.
        for bucket in self._buckets if not self._gathered else ():
            if self.present(bucket):
                self._buffers.view("mean", bucket).copy_(self.gradient(bucket))
        self._gathered = True

    def gradient(self, bucket: Bucket) -> torch.Tensor:
        gradient = self._sums[bucket.id]
        assert gradient is not None
        return gradient


class EditedTotals(PrecomputedGradients):
    """The worker beside the server sends the sums, as its script left them.

    The commits name them in `edited`, with a bit for each piece that has a gradient.
    """

    def edit(self, message: GradientOverride, body: torch.Tensor) -> None:
        """Keep a bucket's gradient. It must stay as it is until the step is applied."""
        self._sums.setdefault(message.bucket, body)

    def _complete(self) -> bool:
        # Any commit would do: all workers must name the same pieces (`words`), or the step fails.
        wanted = per_bucket(self._buckets, bits_to_int(self.commits[0].edited))
        if not all(bucket.id in self._sums for bucket, mask in wanted if mask):
            return False
        self._present = [mask for _, mask in wanted]
        return True


class RelayedTotals(PrecomputedGradients):
    """The relay of the server provides the sums.

    Args:
        settings, gateway: as for `PrecomputedGradients`.
        on_arrival: a sum is applied when it is there.
    """

    def __init__(self, settings: SourceSettings, gateway: Gateway, on_arrival: bool) -> None:
        self._on_arrival = on_arrival
        super().__init__(settings, gateway)

    def give(self, number: int, present: int, total: torch.Tensor | None) -> ReducedBucket | None:
        """Keep a bucket's sum, or return it to be applied now.

        The sum must stay as it is until the step is applied.

        Args:
            number: the bucket.
            present: the pieces that have a gradient.
            total: the sum, or None if no worker has a gradient.
        """
        if number in self._sums:
            return None
        self._sums[number] = total
        if total is None or not present:
            return None
        at = number - self._first
        # Applied on arrival, so a sum that is not finite must be found now: later there is no step to refuse.
        if self._on_arrival and self._settings.checked:
            found = nonfinite_workers(self._buckets[at], present, total, {})
            self._nonfinite |= found
            present = 0 if found else present
        self._present[at] = present
        return ReducedBucket(number, present, total) if self._on_arrival else None

    def _complete(self) -> bool:
        return len(self._sums) == len(self._buckets)

    def nonfinite_workers(self) -> dict[int, int]:
        # On arrival the sums are applied already, and were checked one by one.
        return self._nonfinite if self._on_arrival else super().nonfinite_workers()
