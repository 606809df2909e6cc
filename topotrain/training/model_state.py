"""`tt.state_dict`: the present state of a model, for files that a script writes."""

from typing import Any

import torch
from torch import nn

from topotrain.config.job import ConfigError
from topotrain.training import context as process
from topotrain.training.parameters.divided_model import DividedModel


def state_dict(model: nn.Module) -> dict[str, Any] | None:
    """A copy of `model.state_dict()` on the main worker, None on the others.

    A split model is gathered first.

    Then all workers of the main worker's group call it, at the same point of the script: after the same step. Those of
    other groups may. The values are the ones that the main worker has just pulled, and its group with it. Those of a
    split model lie on the CPU in a nameless file of the workspace, as there may be no room for them in memory.

    In an ordinary process: the copy.

    Raises:
        ConfigError: the split model is another one; a worker of the group goes on without the call.
    """
    here = process.current()
    if here is not None and here.split is not None and not here.split.over:
        return _gathered(here, here.split, model)
    if here is not None and not here.is_main:
        return None
    held = model.state_dict()
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in held.items()}


def _gathered(here: process.Context, cut: DividedModel, model: nn.Module) -> dict[str, Any] | None:
    if not cut.is_of(model):
        raise ConfigError("tt.state_dict", type(model).__name__, "must be the model that tt.prepare split")
    if here.me.group:
        return None
    found = cut.gather("tt.state_dict")
    return None if found is None else {name: value for first, value in found.items() for name in cut.names[first]}
