"""Changes to a model and to torch for the time of a capture."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch
from torch import nn

from topotrain.parallel.capture.source_location import is_leaf

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MAKERS = (
    *("zeros", "ones", "empty", "full", "eye", "arange", "linspace"),
    *("rand", "randn", "randint", "randperm", "normal"),
)


class CaptureRecorder:
    """Base of the tracer: gets reports of what a capture changes in torch."""

    def __init__(self) -> None:
        self.by_mode = False  # the forward depends on the mode of a module

    def mode_read(self) -> None:
        """Note that the forward depends on the mode of a module."""
        self.by_mode = True

    def recorded(self, original: _Function) -> _Function:
        """Wrap len, or a function that makes tensors, to record its calls as nodes."""
        raise NotImplementedError


class TrainingMode(int):
    """A module's `training` during a capture: 0 or 1. It reports tests of its value."""

    # An int, because Python does not let bool be subclassed.
    def __new__(cls, training: bool, recorder: CaptureRecorder) -> Self:
        """Make the number."""
        return super().__new__(cls, training)

    def __init__(self, training: bool, recorder: CaptureRecorder) -> None:
        self._recorder = recorder

    def __bool__(self) -> bool:
        self._recorder.mode_read()
        return self != 0


@contextmanager
def prepared(model: nn.Module, tracer: CaptureRecorder, training: bool) -> Iterator[None]:
    """Set the mode of all modules, and record functions that make new tensors."""
    modules = list(model.modules())
    modes = [module.training for module in modules]
    mode = TrainingMode(training, tracer)
    # Layers of torch pass `training` on to functions that take nothing but a bool.
    inside = {id(inner) for leaf in modules if is_leaf(leaf) for inner in leaf.modules()}
    places = {id(space): space for space in map(_globals, modules) if space is not None}
    # Only where the user's file has no `len` of its own.
    lens = [space for space in places.values() if "len" not in space]
    makers = {name: getattr(torch, name) for name in _MAKERS}
    try:
        for module in modules:
            module.__dict__["training"] = training if id(module) in inside else mode
        for name, maker in makers.items():
            setattr(torch, name, tracer.recorded(maker))
        for space in lens:
            space["len"] = tracer.recorded(len)
        yield
    finally:
        for module, was in zip(modules, modes, strict=True):
            module.__dict__["training"] = was
        for name, maker in makers.items():
            setattr(torch, name, maker)
        for space in lens:
            del space["len"]


def _globals(module: nn.Module) -> dict[str, Any] | None:
    """Return the global names of the file that defines the forward of a user's module."""
    # The capture replaces `len` there, because Python does not let a Proxy answer len() with another Proxy.
    if is_leaf(module) or type(module).__module__.startswith("torch."):
        return None
    return getattr(inspect.unwrap(type(module).forward), "__globals__", None)
