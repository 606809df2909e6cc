"""Checks of gradients: finite, and unchanged while a step reads them."""

from collections.abc import Sequence

import torch

from topotrain.config.sharding import in_steps_of
from topotrain.config.topology import Address, Role
from topotrain.core.client.client_context import StepOutcome
from topotrain.core.model.tensor_bits import version_of
from topotrain.core.server.nonfinite import NO_WORKER, all_finite
from topotrain.training.parameters.flat_parameters import ModelParts
from topotrain.training.worker_stats import SkippedStep

Gradients = Sequence[torch.Tensor | None]  # by parameter


class NonfiniteGradients:
    """Finds gradients that are not finite, for one worker."""

    def __init__(self, me: Address, parts: ModelParts) -> None:
        self._me, self._parts = me, parts

    def find(self, gradients: Gradients) -> str:
        """The name of a parameter with such a gradient, or ""."""
        for described, gradient in zip(self._parts.parameters, gradients, strict=True):
            if gradient is not None and not all_finite(gradient.reshape(-1)):
                return described.name
        return ""

    def skipped(self, step: int, outcome: StepOutcome, mine: Gradients) -> SkippedStep | None:
        """The step as skipped, if it was; `mine` are this worker's own gradients of it."""
        refused = dict(outcome.refused)
        if not refused or not (outcome.found_inf or self._me.index in refused):
            return None
        # This worker before others. NOBODY is the smallest number, and is taken only if no worker is known.
        by = self._me.index if self._me.index in refused else max(refused)
        parameter = self._parts.parameters[refused[by]].name if refused[by] >= 0 else ""
        if by != NO_WORKER:
            return SkippedStep(step, str(Address(Role.WORKER, self._me.group, by)), parameter)
        # The servers saw only the sum, but this worker can still look at its own part.
        own = self.find(mine)
        return SkippedStep(step, str(self._me) if own else "", own or parameter)


class HeldGradients:
    """Gradients that a lazily committed step (`pull: kLazy`) still reads."""

    def __init__(self, parts: ModelParts) -> None:
        self._parts = parts
        self._held: list[tuple[int, torch.Tensor, int]] = []  # parameter, gradient, its version

    def hold(self, number: int) -> None:
        """The step of this optimizer is about to be committed."""
        described = enumerate(self._parts.parameters)
        gradients = ((i, self._parts.tensors[i].grad) for i, known in described if in_steps_of(known.optimizer, number))
        self._held = [(index, gradient, version_of(gradient)) for index, gradient in gradients if gradient is not None]

    def release(self) -> None:
        """The step is over. Raises RuntimeError if the script has changed a gradient."""
        for index, gradient, version in self._held:
            if version_of(gradient) != version:
                raise RuntimeError(
                    f"the gradient of {self._parts.parameters[index].name} was changed after step(), but with pull: "
                    f"kLazy it may still be read then: use zero_grad(set_to_none=True), the default, or pull: kStep"
                )
        self._held = []
