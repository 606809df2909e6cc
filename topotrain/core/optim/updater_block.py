"""SINGA's updater block: optimizer, learning rate, and clipping of gradients."""

import re
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import torch
from torch.optim import Optimizer

from topotrain.config.job import AdaDelta, Adam, AdamMax, ConfigError, Updater, UpdaterType
from topotrain.core.optim import lr_schedules
from topotrain.core.optim.delayed_nesterov import DelayedNesterov

_NOT_OF_A_SCRIPT = (UpdaterType.kUserUpdater, UpdaterType.kDelayedNesterov)


def build(updater: Updater, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> Optimizer:
    """Build the optimizer of an updater block, at the learning rate of step 0.

    `set_lr` changes the rate later. The rules are torch's: Adam and AdaMax correct their bias (Kingma and Ba, 2015),
    momentum multiplies the sum of gradients and not of steps, `delta` is added to the root. Parameters with equal
    scales form one group, which keeps its `lr_scale`.

    Raises:
        ConfigError: the type or schedule is the user's own, or a block is missing.
    """
    scaled: dict[tuple[float, float], list[tuple[str, torch.nn.Parameter]]] = {}
    for name, parameter in named_parameters:
        # The first pattern that matches counts.
        scale = next(((p.lr_scale, p.wd_scale) for p in updater.param if re.search(p.match, name)), (1.0, 1.0))
        scaled.setdefault(scale, []).append((name, parameter))
    cls, settings = _rule(updater)
    rate = lr_schedules.lr(updater, 0)
    groups: list[dict[str, Any]] = [
        {
            "params": [parameter for _, parameter in members],
            "lr": rate * lr_scale,
            "weight_decay": updater.weight_decay * wd_scale,
            "lr_scale": lr_scale,
        }
        for (lr_scale, wd_scale), members in scaled.items()
    ]
    return cls(groups, lr=rate, **settings)  # type: ignore[call-arg]


def set_lr(optimizer: Optimizer, updater: Updater, step: int) -> None:
    """Set the learning rate of `step`, counted from 0, in an optimizer of `build`."""
    rate = lr_schedules.lr(updater, step)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]


def follow_schedule(optimizer: Optimizer, updater: Updater, done: int = 0) -> Callable[..., None]:
    """Set the rate of the step after `done` steps. Returns a hook for after each step."""
    steps = count(done + 1)

    def after_step(*_: Any) -> None:
        set_lr(optimizer, updater, next(steps))

    set_lr(optimizer, updater, done)
    return after_step


def clip_bounds(updater: Updater | None) -> tuple[float, float] | None:
    """Return the bounds of every gradient element (clip_low and clip_high), or None."""
    if updater is None or updater.clip_low >= updater.clip_high:
        return None
    return updater.clip_low, updater.clip_high


def clip(updater: Updater, parameters: Iterable[torch.Tensor]) -> None:
    """Clip whole gradients in place as the servers of a job clip their parts."""
    # The order of the servers: the norm of the whole gradient first, and then each element in the update.
    found = [parameter for parameter in parameters if parameter.grad is not None]
    if updater.clip_norm:
        torch.nn.utils.clip_grad_norm_(found, updater.clip_norm)
    bounds = clip_bounds(updater)
    if bounds is not None:
        for parameter in found:
            assert parameter.grad is not None
            parameter.grad.clamp_(*bounds)


def _rule(updater: Updater) -> tuple[type[Optimizer], dict[str, Any]]:
    match updater.type:
        case UpdaterType.kSGD:
            return torch.optim.SGD, {"momentum": updater.momentum}
        case UpdaterType.kNesterov:
            if updater.momentum == 0:
                raise ConfigError("updater.momentum", updater.momentum, "must be > 0 for kNesterov")
            return torch.optim.SGD, {"momentum": updater.momentum, "nesterov": True}
        case UpdaterType.kDelayedNesterov:
            return DelayedNesterov, {"momentum": updater.momentum, "delay": updater.delay}
        case UpdaterType.kAdaGrad:
            return torch.optim.Adagrad, {"eps": updater.delta}
        case UpdaterType.kRMSProp:
            if updater.rmsprop_conf is None:
                raise ConfigError("updater.rmsprop_conf", None, "is required by kRMSProp, such as { rho: 0.9 }")
            return torch.optim.RMSprop, {"alpha": updater.rmsprop_conf.rho, "eps": updater.delta}
        case UpdaterType.kAdaDelta:
            return torch.optim.Adadelta, {"rho": (updater.adadelta_conf or AdaDelta()).rho, "eps": updater.delta}
        case UpdaterType.kAdam:
            adam = updater.adam_conf or Adam()
            return torch.optim.Adam, {"betas": (adam.beta1, adam.beta2), "eps": updater.delta}
        case UpdaterType.kAdamMax:
            adamax = updater.adammax_conf or AdamMax()
            return torch.optim.Adamax, {"betas": (adamax.beta1, adamax.beta2), "eps": updater.delta}
    accepted = ", ".join(t.value for t in UpdaterType if t not in _NOT_OF_A_SCRIPT)
    raise ConfigError("updater.type", updater.type, f"must be one of {accepted}; or pass prepare() an optimizer")
