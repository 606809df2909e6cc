"""The gradients of a worker that shares its replica with others of its group."""

import torch

from topotrain.config.sharding import Bucket, SliceMap
from topotrain.extensions.outer_optimizer.groups.group_reduction import GroupReduction
from topotrain.training.parameters.flat_parameters import ModelBuffers, ModelParts
from topotrain.training.parameters.gradient_hooks import GradientPath, MeanPath
from topotrain.training.worker_stats import StepBatches


class GroupPath(MeanPath):
    """Gives the script the mean of its group, and the servers what it has learned.

    The workers of the group have the same values, so each pushes its share of the difference.

    Args:
        parts, buffers, slice_map, batches: as for `GradientPath`.
        reduction: adds up the group's gradients.
        difference: pushes this worker's share.
    """

    def __init__(
        self,
        parts: ModelParts,
        buffers: ModelBuffers,
        reduction: GroupReduction,
        slice_map: SliceMap,
        batches: StepBatches,
        difference: GradientPath,
    ) -> None:
        self._reduction, self._difference = reduction, difference
        reduction.open(slice_map, buffers.flats, batches)
        super().__init__(parts, buffers, reduction, slice_map, batches)

    def _sum(self, bucket: Bucket, present: int, mean: torch.Tensor) -> None:
        """Note which pieces have a mean. The optimizer here takes them as they are."""
        self._union[bucket.id] |= present

    # --- local steps -----------------------------------------------------------------------------------------------

    def end_backwards(self) -> None:
        """The script calls step(). A backward that raised is over for the others, too."""
        self._give_up()
        self._reduce_own({i: p.grad for i, p in enumerate(self._tensors) if p.grad is not None})

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
