"""Sums of units among the gradients of a step.

A unit's workers may send one plain sum of their gradients, which is the body of one of them. The others have none.
"""

from collections.abc import Mapping, Sequence

import torch

from topotrain.core.protocol import Push
from topotrain.core.server.ordered_sum import Part, Tree

HeldPushes = dict[int, tuple[Push, torch.Tensor | None]]
"""The pushes of a bucket by worker. Without a body: the gradient is in the sum of the worker's unit."""


class UnitSums:
    """Withdraws sums that the group's mean cannot be made of.

    The workers of the group have different weights then: each gradient is multiplied by its weight before it is added.

    Args:
        tree, divide: as for `ordered_sum.canonical_mean`.
    """

    def __init__(self, tree: Tree, divide: bool) -> None:
        self._tree, self._divide = tree, divide
        self._unusable: list[tuple[Push, int]] = []
        self.any = False
        """Whether there may be sums among the gradients of the step."""

    def note(self, body: torch.Tensor | None) -> None:
        """A worker's push has this body."""
        self.any = self.any or body is None

    def clear(self) -> None:
        """The step has no sums, or none that must be looked at again."""
        self.any = False

    def withdraw(self, pushes: HeldPushes, parts: Mapping[int, Part]) -> bool:
        """Remove the sums from the pushes of a bucket, if its mean needs weights.

        Returns whether there were any.
        """
        if not self._divide or len({weight for weight, _ in parts.values() if weight > 0}) <= 1:
            return False
        found = False
        for unit in self._tree:
            held = [worker for worker in unit if worker in pushes]
            if any(pushes[worker][1] is None for worker in held):
                found = True
                for worker in held:
                    push, body = pushes.pop(worker)
                    self._unusable += [] if body is None else [(push, worker)]
        return found

    def take_unusable(self) -> Sequence[tuple[Push, int]]:
        """Return (push, worker) of each sum that was withdrawn, once."""
        unusable, self._unusable = self._unusable, []
        return unusable
