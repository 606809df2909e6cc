"""torch's optimizers without parameters, for `KVStore` and `tt.Embedding`.

MXNet's names of their numbers are accepted, too: `learning_rate`, `wd`, and for a store `rescale_grad`.
"""

import math
from typing import Any

import torch
from torch.optim import Optimizer

from topotrain.config.job import ConfigError

_NAMES = {"learning_rate": "lr", "wd": "weight_decay"}
_UNSET = ("clip_gradient", "lr_scheduler", "param_idx2name")  # of MXNet's, accepted as None
_ANYHOW = ("multi_precision", "lazy_update")  # a store does both, where they make a difference


def SGD(lr: float | None = None, momentum: float = 0.0, **more: Any) -> Optimizer:
    """Return torch.optim.SGD without parameters. `lr` is required."""
    if lr is None and "learning_rate" not in more:
        raise ConfigError("tt.kvstore.SGD", None, "must have lr")
    return _without_parameters(torch.optim.SGD, lr=lr, momentum=momentum, **more)


def Adam(lr: float = 1e-3, **more: Any) -> Optimizer:
    """Return torch.optim.Adam without parameters."""
    return _without_parameters(torch.optim.Adam, lr=lr, **more)


def SparseAdam(lr: float = 1e-3, **more: Any) -> Optimizer:
    """torch.optim.SparseAdam: its moments change only for rows with a gradient."""
    return _without_parameters(torch.optim.SparseAdam, lr=lr, **more)


def Adagrad(lr: float = 1e-2, **more: Any) -> Optimizer:
    """Return torch.optim.Adagrad without parameters."""
    return _without_parameters(torch.optim.Adagrad, lr=lr, **more)


def _without_parameters(cls: Any, **numbers: Any) -> Optimizer:
    rescale = numbers.pop("rescale_grad", 1.0)
    if not isinstance(rescale, int | float) or not math.isfinite(rescale):
        raise ConfigError(f"tt.kvstore.{cls.__name__} rescale_grad", rescale, "must be a number")
    # MXNet's names come last, and count before a default.
    numbers = {
        _NAMES.get(name, name): value
        for name, value in numbers.items()
        if name not in _ANYHOW and not (name in _UNSET and value is None)
    }
    try:
        # torch refuses an empty list of parameters. Only the class and the settings of the object are read.
        made: Any = cls([torch.nn.Parameter(torch.zeros(1))], **numbers)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"tt.kvstore.{cls.__name__}", numbers, str(error)) from None
    made.rescale_grad = rescale
    return made  # type: ignore[no-any-return]
