"""With backup workers: give a batch again if its step came too late.

A batch is kept until it has counted. The script must not change it meanwhile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from topotrain.config.job import ConfigError
from topotrain.core.client.client_context import StepOutcome
from topotrain.extensions.backup_workers.backup_client import BackupWorkersClient
from topotrain.training.context import Context, PrepareExtension
from topotrain.training.data.distributed_loader import BatchReplay, BatchSource, PassReplay
from topotrain.training.data.map_dataset import LoadedBatch
from topotrain.training.worker import Worker
from topotrain.training.worker_extension import WorkerExtension


class LateSteps(WorkerExtension):
    """One worker's steps where the group may make a step without it.

    Args:
        worker: this worker.
        client: the client's part of the feature.
    """

    def __init__(self, worker: Worker, client: BackupWorkersClient) -> None:
        self._worker, self._client = worker, client
        self._verdict: bool | None = None  # whether the batch that was given last counts; None: not known yet
        self._losses = worker.tally.loss_state()  # after the last step

    def counts_given(self) -> bool | None:
        """Whether the batch that was given last has counted.

        False: the batch came too late, and has to be given again. None: no step was made with it, or this method has
        returned the answer before.
        """
        # The answer is consumed: each verdict concerns one batch, and a second call must not replay the next batch.
        verdict, self._verdict = self._verdict, None
        return verdict

    def finish_epoch(self, epoch: int) -> None:
        """End an epoch of this worker: wait for all workers, and receive their values."""
        self._worker.advance(self._client.catch_up(epoch))
        self._worker.end_epoch()

    # --- calls by the worker

    def before_clip(self) -> None:
        raise RuntimeError(
            f"cluster.backup = {self._backup}: the servers cannot clip, since a step's workers are decided before "
            f"their gradients are added up; clip none, or use cluster.backup: 0"
        )

    def before_step(self) -> None:
        """Check that the step consists of one batch, which can be given again."""
        batches, backwards = len(self._worker.batches), self._worker.path.backwards
        if batches != 1 or backwards != 1:
            raise RuntimeError(
                f"cluster.backup = {self._backup} needs one batch of the loader and one backward for each "
                f"optimizer.step(), this one has {batches} and {backwards}: a step that comes too late is "
                f"done again (no gradient accumulation, no batches ahead; or cluster.backup: 0)"
            )

    @property
    def _backup(self) -> int:
        return self._worker.job.cluster.backup

    def after_commit(self, outcome: StepOutcome | None) -> None:
        self._verdict = outcome is None or not outcome.late
        if not self._verdict:
            # The batch is computed again and counts then, so its loss must not be reported twice.
            self._worker.tally.drop_step(self._worker.batches.last_samples, self._losses)

    def step_reported(self) -> None:
        self._losses = self._worker.tally.loss_state()

    def leave_epoch(self, epoch: int) -> bool:
        # The script has left the loop while its last batch was late, so nothing computes that batch again.
        if self.counts_given() is False:
            self._worker.tally.drop_batch()
        self._worker.batches.forget()
        self._client.through(epoch)
        return True

    def rejoin(self, taken: int) -> StepOutcome:
        return self._client.catch_up()


class ReplayBatches(PassReplay):
    """The batches that one pass gives a second time.

    Args:
        steps: knows which batches counted.
        epoch: of the pass.
    """

    def __init__(self, steps: LateSteps, epoch: int) -> None:
        self._steps, self._epoch = steps, epoch
        self._kept: tuple[LoadedBatch, list[tuple[torch.Tensor, int]]] | None = None

    def next(self, fresh: BatchSource) -> LoadedBatch:
        """Return the next batch; `fresh` gives one that was not given before.

        Raises StopIteration when all workers have used the epoch.
        """
        if self._steps.counts_given() is False and self._kept is not None:
            # The data itself was kept, because a dataset need not give the same data twice.
            found, tensors = self._kept
            if any(tensor._version != version for tensor, version in tensors):
                raise RuntimeError(
                    "the script has changed a batch of its loader in place, and with cluster.backup above 0 one that "
                    "comes too late is given again: work on a copy (batch = batch - mean instead of batch -= mean)"
                )
            return found
        # The kept batch is freed before the next one is drawn, so that only one is in memory.
        self._kept = None
        try:
            found = fresh()
        except StopIteration:
            # Late workers still do batches of this epoch, and the next epoch begins with the values after those.
            self._steps.finish_epoch(self._epoch)
            raise
        self._kept = found, [(tensor, tensor._version) for tensor in _tensors(found[2])]
        return found


@dataclass(frozen=True, slots=True)
class LateBatchReplay(BatchReplay):
    """Gives late batches again; as `distributed_loader.BatchReplay` has it."""

    steps: LateSteps

    def begin(self, epoch: int) -> ReplayBatches:
        """Return the batches of one pass."""
        return ReplayBatches(self.steps, epoch)

    def interleaved(self) -> None:
        """As `BatchReplay.interleaved`: a late step has one batch."""
        accepted = "must be 0: the script reads two loaders at once, and a step has batches of both"
        raise ConfigError("cluster.backup", "above 0", accepted)


class BackupExtension(PrepareExtension):
    """With backup workers a batch that came too late is given again."""

    def batch_replay(self, here: Context, worker: Worker) -> BatchReplay | None:
        if not here.place.job.cluster.backup:
            return None
        steps = LateSteps(worker, worker.client.extension(BackupWorkersClient))
        worker.attach(steps)
        return LateBatchReplay(steps)


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
