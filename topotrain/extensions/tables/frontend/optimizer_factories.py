"""torch's optimizers without parameters, for `KVStore` and `tt.Embedding`."""

from typing import Any

import torch
from torch.optim import Optimizer

from topotrain.config.job import ConfigError


def SGD(lr: float, momentum: float = 0.0, **more: Any) -> Optimizer:
    """Return torch.optim.SGD without parameters."""
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
    try:
        # torch refuses an empty list of parameters. Only the class and the settings of the object are read.
        made: Optimizer = cls([torch.nn.Parameter(torch.zeros(1))], **numbers)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"tt.kvstore.{cls.__name__}", numbers, str(error)) from None
    return made
