"""Changes to a model and to torch for the time of a capture.

Modules report that their mode is read, and functions that make tensors are recorded.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from topotrain.parallel.capture.source_location import is_leaf

_MAKERS = (
    *("zeros", "ones", "empty", "full", "eye", "arange", "linspace"),
    *("rand", "randn", "randint", "randperm", "normal"),
)


class CaptureRecorder(Protocol):
    """The part of a tracer that this module uses."""

    by_mode: bool

    def recorded(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]: ...


class TrainingMode(int):
    """A module's `training` during a capture: 0 or 1. It reports tests of its value."""

    tracer: CaptureRecorder

    def __bool__(self) -> bool:
        self.tracer.by_mode = True
        return self != 0


@contextmanager
def prepared(model: nn.Module, tracer: CaptureRecorder, training: bool) -> Iterator[None]:
    """Set the mode of all modules, and record functions that make new tensors.

    Everything is restored at the end of the block.
    """
    modules = list(model.modules())
    modes = [module.training for module in modules]
    mode = TrainingMode(training)
    mode.tracer = tracer
    inside = {id(inner) for leaf in modules if is_leaf(leaf) for inner in leaf.modules()}
    places = {id(space): space for space in map(_globals, modules) if space is not None}
    lens = [space for space in places.values() if "len" not in space]
    makers = {name: getattr(torch, name) for name in _MAKERS}
    try:
        for module in modules:
            module.__dict__["training"] = training if id(module) in inside else mode
        for name, maker in makers.items():
            setattr(torch, name, tracer.recorded(name, maker))
        for space in lens:
            space["len"] = tracer.recorded("len", len)
        yield
    finally:
        for module, was in zip(modules, modes, strict=True):
            module.__dict__["training"] = was
        for name, maker in makers.items():
            setattr(torch, name, maker)
        for space in lens:
            del space["len"]


def _globals(module: nn.Module) -> dict[str, Any] | None:
    """Return the global names of the file that defines the forward of a user's module.

    The capture replaces `len` there, because Python does not let a Proxy answer len() with another Proxy.
    """
    if is_leaf(module) or type(module).__module__.startswith("torch."):
        return None
    return getattr(inspect.unwrap(type(module).forward), "__globals__", None)
