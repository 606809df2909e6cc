"""With backup workers: a batch is kept until it has counted, and given again where it came too late.

Rule: the data itself is kept, for a dataset need not give the same again; so the script must not have changed it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from topotrain.training.context import Context, PrepareExtension
from topotrain.training.data.distributed_loader import BatchReplay, BatchSource, DrawnBatch
from topotrain.training.worker import Worker


class BatchOutcomes(Protocol):
    """Who knows what became of the batches that the script was given."""

    def counts_given(self) -> bool | None:
        """Whether the one that was given last has counted; False: it has to be given again.

        None: that is not known yet, or was told before.
        """
        ...

    def through(self, epoch: int) -> None:
        """Nothing is left of an epoch for this worker. Waits until that is so for all."""
        ...


class ReplayBatches:
    """What one pass gives a second time.

    Args:
        account: see there.
        epoch: of the pass.
    """

    def __init__(self, account: BatchOutcomes, epoch: int) -> None:
        self._account, self._epoch = account, epoch
        self._kept: tuple[DrawnBatch, list[tuple[torch.Tensor, int]]] | None = None

    def next(self, fresh: BatchSource) -> DrawnBatch:
        """The next batch; `fresh` gives one that was not given before. StopIteration once all workers are through."""
        if self._account.counts_given() is False and self._kept is not None:
            found, tensors = self._kept
            if any(tensor._version != version for tensor, version in tensors):
                raise RuntimeError(
                    "the script has changed a batch of its loader in place, and with cluster.backup above 0 one that "
                    "comes too late is given again: work on a copy (batch = batch - mean instead of batch -= mean)"
                )
            return found
        self._kept = None
        try:
            found = fresh()
        except StopIteration:
            self._account.through(self._epoch)
            raise
        self._kept = found, [(tensor, tensor._version) for tensor in _tensors(found[2])]
        return found


@dataclass(frozen=True, slots=True)
class LateBatchReplay:
    """Gives batches again whose contribution came too late; as `distributed_loader.BatchReplay` has it."""

    account: BatchOutcomes

    def begin(self, epoch: int) -> ReplayBatches:
        """The pass of this epoch begins."""
        return ReplayBatches(self.account, epoch)


class BackupExtension(PrepareExtension):
    """With backup workers a batch that came too late is given again."""

    def batch_replay(self, here: Context, worker: Worker) -> BatchReplay | None:
        """As `PrepareExtension` has it."""
        return LateBatchReplay(worker) if here.place.job.cluster.backup else None


def _tensors(data: Any) -> Iterator[torch.Tensor]:
    """The tensors in a batch, however it is put together."""
    if isinstance(data, torch.Tensor):
        if not data.is_inference():  # which counts no versions
            yield data
    elif isinstance(data, dict):
        for part in data.values():
            yield from _tensors(part)
    elif isinstance(data, list | tuple):
        for part in data:
            yield from _tensors(part)
