"""Local steps of plain SGD between pushes (`n_push` and `n_fetch`).

This is Downpour's own scheme (Dean et al., 2012, section 4.1).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from topotrain.config.job import Cluster
from topotrain.training.gradients.local_steps import LocalSteps
from topotrain.training.parameters.device_parameters import ParameterHolder
from topotrain.training.parameters.flat_parameters import ModelParts


class LocalSgd(LocalSteps):
    """The local steps of one worker; of the optimizer they use the rates only."""

    def __init__(self, parts: ModelParts, holder: ParameterHolder, optimizer: Optimizer, cluster: Cluster) -> None:
        self._parts, self._holder, self._optimizer = parts, holder, optimizer
        self._n_push, self._n_fetch = cluster.n_push, cluster.n_fetch
        self.is_used = cluster.n_push > 1 or cluster.n_fetch > 1
        self._summed: set[int] = set()

    @property
    def has_sum(self) -> bool:
        """Whether there are gradients that were not pushed yet."""
        return bool(self._summed)

    def pushes(self, step: int) -> bool:
        """Whether this step (from 1) pushes."""
        return step % self._n_push == 0

    def fetches(self, step: int) -> bool:
        """Whether this step (from 1) fetches."""
        return step % self._n_fetch == 0

    def step(self, inv_scale: float, number: int = 0) -> None:
        """Make a step of plain SGD, and add the gradients, times a factor, to the sum."""
        # At each step: a scheduler may have changed the rates.
        rate = {id(p): float(group["lr"]) for group in self._optimizer.param_groups for p in group["params"]}
        for index, tensor in enumerate(self._parts.tensors):
            if tensor.grad is None:
                continue
            # The scaled gradient stays as it is: the script may look at it after the step.
            gradient = tensor.grad if inv_scale == 1.0 else tensor.grad * inv_scale
            self._holder.room("accrued", index).add_(gradient)
            self._summed.add(index)
            self._holder.value(index).add_(gradient, alpha=-rate.get(id(tensor), 0.0))
        self._holder.stepped()

    @contextmanager
    def sum_as_gradient(self) -> Iterator[None]:
        """Inside, `.grad` is the sum, so that it is pushed. Afterwards the sum is zero."""
        # The script may still look at the gradient of its last backward.
        own = [tensor.grad for tensor in self._parts.tensors]
        for index in range(len(own)):
            self._holder.set_gradient(index, self._holder.room("accrued", index) if index in self._summed else None)
        try:
            yield
        finally:
            for index, gradient in enumerate(own):
                self._holder.set_gradient(index, gradient)
        for index in self._summed:
            self._holder.room("accrued", index).zero_()
        # Not reached if the push fails, so that no gradient is lost.
        self._summed.clear()
