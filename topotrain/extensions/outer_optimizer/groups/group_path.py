"""The gradients of a worker that shares its replica with others of its group."""

import torch

from topotrain.config.sharding import Bucket
from topotrain.extensions.outer_optimizer.groups.group_reduction import GroupReduction
from topotrain.training.gradients.gradient_hooks import GradientPath
from topotrain.training.gradients.mean_path import MeanPath
from topotrain.training.parameters.flat_parameters import ModelBuffers
from topotrain.training.worker_stats import StepBatches


class GroupPath(MeanPath):
    """Gives the script the mean of its group, and the servers what it has learned.

    The workers of the group have the same values, so each pushes its share of the difference.

    Args:
        buffers, batches: as for `GradientPath`.
        reduction: adds up the group's gradients.
        difference: pushes this worker's share.
    """

    def __init__(
        self, buffers: ModelBuffers, reduction: GroupReduction, batches: StepBatches, difference: GradientPath
    ) -> None:
        self._reduction, self._difference = reduction, difference
        reduction.open(buffers.map, buffers.flats, batches)
        super().__init__(buffers, reduction, batches)

    def _sum(self, bucket: Bucket, present: int, mean: torch.Tensor) -> None:
        """Note which pieces have a mean. The optimizer here takes them as they are."""
        self._union[bucket.id] |= present

    # --- local steps -----------------------------------------------------------------------------------------------

    def end_backwards(self) -> None:
        """The script calls step(). A backward that raised is over for the others, too."""
        self.reduce_own()
        changed = {i: t.grad for i, t in enumerate(self._tensors) if t.grad is not None and self._is_changed(i, t.grad)}
        for index, gradient in self._mirror.bring("grad", changed).items():
            self._buffers.view("grad", index).copy_(gradient)
        self._reduction.digest = self._digest(list(changed))
        # The end of a backward carries the digest, and there may be no other one.
        views = {index: self._buffers.view("grad", index).data_ptr() for index in changed}
        if any(self._is_own(i, gradient) and gradient.data_ptr() != views[i] for i, gradient in changed.items()):
            self.join()

    def end_step(self) -> None:
        """A local step is over."""
        self._reduction.step_over()
        super().after_step()

    # --- rounds ----------------------------------------------------------------------------------------------------

    def at_step(self, step: int, optimizer: int = 0) -> tuple[tuple[int, ...], int, int]:
        """Push this worker's share of the difference."""
        found = self._difference.at_step(step, optimizer)
        self.backwards = self._difference.backwards
        return found

    def after_step(self) -> None:
        """A round is told. The local step ends later."""
        self._difference.after_step()

    def go_to(self, step: int) -> None:
        """Continue at this round."""
        self._difference.go_to(step)
