"""Gradients that a lazily committed step (`pull: kLazy`) still reads."""

import torch

from topotrain.training.parameters.flat_parameters import ModelParts


class HeldGradients:
    """Finds a script that changes such a gradient in place."""

    def __init__(self, parts: ModelParts) -> None:
        self._parts = parts
        self._held: list[tuple[int, torch.Tensor, int]] = []  # parameter, gradient, its version

    def hold(self) -> None:
        """The step is about to be committed."""
        gradients = ((index, tensor.grad) for index, tensor in enumerate(self._parts.tensors))
        self._held = [(index, gradient, gradient._version) for index, gradient in gradients if gradient is not None]

    def release(self) -> None:
        """The step is over. Raises RuntimeError if the script has changed a gradient."""
        for index, gradient, version in self._held:
            if gradient._version != version:
                raise RuntimeError(
                    f"the gradient of {self._parts.parameters[index].name} was changed after step(), but with pull: "
                    f"kLazy it may still be read then: use zero_grad(set_to_none=True), the default, or pull: kStep"
                )
        self._held = []
