"""Hooks of a script on parameters, called with the mean of a worker group."""

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch


class _AfterMean:
    """A script's hook, called with the group's mean, not in the backward of a share."""

    def __init__(self, hook: Callable[[torch.Tensor], torch.Tensor | None], index: int, hooks: "ScriptHooks") -> None:
        self.hook, self._index, self._hooks = hook, index, ref(hooks)

    def __call__(self, value: torch.Tensor) -> torch.Tensor | None:
        hooks = self._hooks()
        if hooks is None or hooks.is_private():
            return self.hook(value)
        hooks.held.add(self._index)
        return None


class ScriptHooks:
    """The hooks of a script on parameters, registered at any time.

    Args:
        is_private: whether a backward is this worker's own, in which they are called as in any script.
    """

    def __init__(self, is_private: Callable[[], bool]) -> None:
        self.is_private = is_private
        self.own: set[int] = set()  # the numbers of the path's own hooks
        self.held: set[int] = set()  # parameters of which hooks were held back in this backward
        self.of: dict[int, tuple[dict[int, Any], dict[int, Any]]] = {}  # by parameter: of its gradient, and behind it
        self._kept: dict[int, tuple[dict[int, Any], dict[int, Any]]] = {}
        self._last: list[int] = []  # the number of each last hook

    def watch(self, index: int, tensor: torch.Tensor) -> None:
        """Look at the hooks of this parameter, which has one of the path."""
        # torch has no public name for its hooks.
        self._kept[index] = tensor._backward_hooks, tensor._post_accumulate_grad_hooks  # type: ignore[assignment]

    def look(self) -> None:
        """Hold back the hooks that the script has registered since the last look."""
        last = [next(reversed(hooks), -1) for both in self._kept.values() for hooks in both]
        if last == self._last:
            return
        self._last = last
        self.of = {index: both for index, both in self._kept.items() if any(hooks.keys() - self.own for hooks in both)}
        for index, both in self.of.items():
            for hooks in both:
                for key in hooks.keys() - self.own:
                    if not isinstance(hooks[key], _AfterMean):
                        hooks[key] = _AfterMean(hooks[key], index, self)

    def on_gradient(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Call the hooks of a gradient before it is added up; return what they make of it."""
        for key, held in list(self.of[index][0].items()):
            made = None if key in self.own else held.hook(gradient)
            gradient = gradient if made is None else made
        return gradient

    def behind(self, index: int, tensor: torch.Tensor) -> None:
        """Call the hooks behind the accumulation of a parameter's gradient."""
        for key, held in list(self.of.get(index, ({}, {}))[1].items()):
            if key not in self.own:
                held.hook(tensor)
