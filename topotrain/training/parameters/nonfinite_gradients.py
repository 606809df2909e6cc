"""Gradients that are not finite: their parameters, and the steps that they skip."""

from collections.abc import Sequence

import torch

from topotrain.config.topology import Address
from topotrain.core.client.client_types import StepOutcome
from topotrain.core.model.finite import all_finite
from topotrain.core.server.nonfinite import NOBODY
from topotrain.training.parameters.flat_parameters import ModelParts
from topotrain.training.worker_stats import SkippedStep

Gradients = Sequence[torch.Tensor | None]  # by parameter


class NonfiniteGradients:
    """Finds them for one worker."""

    def __init__(self, me: Address, parts: ModelParts) -> None:
        self._me, self._parts = me, parts

    def find(self, gradients: Gradients) -> str:
        """The name of a parameter with such a gradient, or ""."""
        for described, gradient in zip(self._parts.parameters, gradients, strict=True):
            if gradient is not None and not all_finite(gradient.reshape(-1)):
                return described.name
        return ""

    def skipped(self, step: int, outcome: StepOutcome, mine: Gradients) -> SkippedStep | None:
        """The step as skipped, if it was; `mine` are this worker's own gradients of it.

        The worker itself is named before others. If only the sum is known, no worker is, unless it is this one.
        """
        refused = dict(outcome.refused)
        if not refused or not (outcome.found_inf or self._me.index in refused):
            return None
        by = self._me.index if self._me.index in refused else max(refused)
        parameter = self._parts.parameters[refused[by]].name if refused[by] >= 0 else ""
        if by != NOBODY:
            return SkippedStep(step, str(self._me._replace(index=by)), parameter)
        own = self.find(mine)
        return SkippedStep(step, str(self._me) if own else "", own or parameter)
