"""Fused kernels with lists of tensors that stay the same from step to step.

`Optimizer.step()` collects the lists at every step, which takes longer than the kernel if tensors are small. Here they
are collected once, and a step is one call of torch's kernel for each parameter group. The kernel takes each tensor by
itself, as in `step()`, so all bits are those of `step()`.

torch has no public name for these kernels. So each process compares them with `step()` before it uses them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.optim import Optimizer

from topotrain.core.optim.kernel_choice import OWN_ERRORS, give_gradients

_SIZES = (5, 64, 83)
_STEPS = 3

Group = Mapping[str, Any]
State = Mapping[torch.Tensor, dict[str, Any]]


class GroupLists(ABC):
    """The tensors of one parameter group that have gradients, in lists of one kernel."""

    def __init__(self, group: Group, state: State) -> None:
        self.values = [value for value in group["params"] if value.grad is not None]
        self.gradients = [value.grad for value in self.values]
        self.states = [state[value] for value in self.values]

    def entries(self, name: str) -> list[torch.Tensor]:
        """Return an entry of the state of each tensor. Raises KeyError if one has none."""
        return [state[name] for state in self.states]

    @abstractmethod
    def takes(self, group: Group) -> bool:
        """Whether the lists are those for the present settings of the group."""

    @abstractmethod
    def run(self, group: Group) -> None:
        """Update the tensors with the present settings of the group."""


class SgdLists(GroupLists):
    """Lists of `torch.optim.SGD`."""

    def __init__(self, group: Group, state: State) -> None:
        super().__init__(group, state)
        self._momenta = self.entries("momentum_buffer") if group["momentum"] else []

    def takes(self, group: Group) -> bool:
        # A schedule may begin with momentum 0, where there are no buffers.
        return bool(group["momentum"]) == bool(self._momenta)

    def run(self, group: Group) -> None:
        torch._fused_sgd_(
            self.values,
            self.gradients,
            self._momenta,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=False,
        )


class AdamLists(GroupLists):
    """Lists of `torch.optim.Adam` and `AdamW`."""

    def __init__(self, group: Group, state: State, decoupled: bool) -> None:
        super().__init__(group, state)
        self._means, self._squares = self.entries("exp_avg"), self.entries("exp_avg_sq")
        self._amsgrad = bool(group["amsgrad"])
        self._largest = self.entries("max_exp_avg_sq") if self._amsgrad else []
        # The counts of steps become views of one tensor, so that one addition is enough for all.
        self._counts = torch.stack(self.entries("step"))
        self._steps = list(self._counts.unbind())
        for held, step in zip(self.states, self._steps, strict=True):
            held["step"] = step
        self._kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_

    def takes(self, group: Group) -> bool:
        return bool(group["amsgrad"]) == self._amsgrad

    def run(self, group: Group) -> None:
        self._counts.add_(1)
        first, second = group["betas"]
        self._kernel(
            self.values,
            self.gradients,
            self._means,
            self._squares,
            self._largest,
            self._steps,
            lr=group["lr"],
            beta1=first,
            beta2=second,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=self._amsgrad,
            maximize=group["maximize"],
        )


class FusedLists:
    """The lists of one optimizer, for steps in which the same tensors have gradients.

    The optimizer must have made a step with all of these gradients.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        cls: Any = type(optimizer)
        self._lists = _lists_of(optimizer) if _agrees(cls) else []

    @property
    def is_empty(self) -> bool:
        """Whether there are no lists, for any settings of these kernels."""
        return not self._lists

    def step(self) -> bool:
        """Do a step. False: nothing was done, and `Optimizer.step` must do it."""
        groups = self._optimizer.param_groups
        if not self._lists or not all(
            group["fused"] and (lists is None or lists.takes(group))
            for lists, group in zip(self._lists, groups, strict=True)
        ):
            return False
        for lists, group in zip(self._lists, groups, strict=True):
            if lists is not None:
                lists.run(group)
        return True


def _lists_of(optimizer: Optimizer) -> list[GroupLists | None]:
    """Return the lists of each group; [] if `step()` must be used.

    None stands for a group without a gradient.
    """
    if not all(map(_is_plain, optimizer.param_groups)):
        return []
    try:
        return [_group_lists(optimizer, group) for group in optimizer.param_groups]
    except KeyError:  # a tensor without state, which `step()` makes
        return []


def _is_plain(group: Group) -> bool:
    values = [value for value in group["params"] if value.grad is not None]
    # A kernel takes the dtype of the first tensor for all of them.
    kinds = {(value.dtype, value.grad.dtype, value.device.type) for value in values}
    same = len(kinds) < 2 and all(device == "cpu" for *_, device in kinds)
    return bool(group["fused"]) and same and not group["differentiable"]


def _group_lists(optimizer: Optimizer, group: Group) -> GroupLists | None:
    if all(value.grad is None for value in group["params"]):
        return None
    if type(optimizer) is torch.optim.SGD:
        return SgdLists(group, optimizer.state)
    # Since torch 2.7 AdamW is an Adam with a setting that says so.
    decoupled = type(optimizer) is torch.optim.AdamW or group.get("decoupled_weight_decay", False)
    return AdamLists(group, optimizer.state, decoupled)


@lru_cache(maxsize=16)
def _agrees(cls: Any) -> bool:
    """Whether the kernels of a class with lists compute the bits of its `step()`."""
    if cls not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        return False
    extra = {"momentum": 0.9, "nesterov": True} if cls is torch.optim.SGD else {"amsgrad": True}
    # A generator of its own: the script's random numbers must not change.
    chance = torch.Generator().manual_seed(3)
    begin = [torch.randn(size, generator=chance) for size in _SIZES]
    sides = [[value.clone() for value in begin] for _ in range(2)]
    try:
        left, right = (cls([{"params": side, **extra}], lr=0.1, weight_decay=0.1, fused=True) for side in sides)
        _give_gradients(sides, chance)
        left.step()
        right.step()
        lists = _lists_of(right)
        for _ in range(_STEPS):
            _give_gradients(sides, chance)
            left.step()
            for found in lists:
                assert found is not None
                found.run(right.param_groups[0])
    except OWN_ERRORS:  # another torch: no such kernel, or another signature
        return False
    return bool(lists) and all(map(torch.equal, *sides))


def _give_gradients(sides: list[list[torch.Tensor]], chance: torch.Generator) -> None:
    """Give both sides the same gradients, in the same tensors at each step."""
    if sides[0][0].grad is None:
        gradients = [torch.empty_like(value) for value in sides[0]]
        for side in sides:
            give_gradients(side, gradients)
    for value in sides[0]:
        assert value.grad is not None
        value.grad.copy_(torch.randn(value.shape, generator=chance))
