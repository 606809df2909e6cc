"""Nesterov momentum of every N-th gradient, as an optimizer of torch."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class DelayedNesterov(Optimizer):
    """Delayed Nesterov momentum (Asynchronous Local-SGD: Liu et al., 2024).

    Where gradients of several workers arrive one by one, and late, momentum of each makes the values overshoot. With a
    `delay` of N the momentum is that of the mean of N gradients. Each gradient g changes a value by

        value <- value - lr / N * g

    and every N-th one, with the mean G of the last N, also by

        buffer <- momentum * buffer + G
        value  <- value - lr * momentum * buffer

    This is the paper's algorithm with its parameter c at the default 0: all momentum is applied at once. After N
    gradients the values have moved as by one step of Nesterov momentum with their mean. With N = 1 every step has the
    bits of torch.optim.SGD(nesterov=True) without a fused kernel. All elements are treated alike.

    Args:
        params: as of every optimizer of torch.
        lr: the learning rate.
        momentum: above 0.
        delay: N.
        weight_decay: times the value, added to the gradient.

    Raises:
        ValueError: a setting is out of its bounds.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.9,
        delay: int = 1,
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or weight_decay < 0:
            raise ValueError(f"lr = {lr}, weight_decay = {weight_decay}: must be >= 0")
        if momentum <= 0:
            raise ValueError(f"momentum = {momentum}: must be > 0")
        if delay < 1 or int(delay) != delay:
            raise ValueError(f"delay = {delay}: must be a whole number >= 1")
        super().__init__(params, {"lr": lr, "momentum": momentum, "delay": delay, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one step. closure: computes the gradients, as in every optimizer of torch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    self._step(value, value.grad, group)
        return loss

    def _step(self, value: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, delay, momentum = self.state[value], group["delay"], group["momentum"]
        if group["weight_decay"]:
            gradient = gradient.add(value, alpha=group["weight_decay"])
        if "step" not in state:
            state["step"] = torch.zeros(())
        state["step"] += 1
        if delay == 1:
            move = mean = gradient
        else:
            # The memory of the sum stays: it is as large as the model.
            if "sum" not in state:
                state["sum"] = gradient.clone()
            else:
                state["sum"].add_(gradient)
            move, mean = gradient / delay, state["sum"]
        if int(state["step"]) % delay == 0:
            if delay > 1:
                mean.div_(delay)
            # The first one as in torch's SGD, where the buffer is a copy and no sum with zeros.
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = mean.clone()
            else:
                state["momentum_buffer"].mul_(momentum).add_(mean)
            move = move.add(state["momentum_buffer"], alpha=momentum)
            if delay > 1:
                mean.zero_()
        value.add_(move, alpha=-group["lr"])
