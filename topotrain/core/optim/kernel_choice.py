"""Choice of torch's optimizer kernels: fused kernels are used only after a trial.

A kernel that runs without an error may still be wrong. For example, the vectorized part of torch 2.13's fused SGD
leaves bfloat16 and float16 values unchanged. So a fused kernel first does a few steps beside the plain loop
(`foreach=False, fused=False`): in this process, for this class, these options, this dtype and this device.
"""

import inspect
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from functools import lru_cache
from typing import Any

import torch
from torch.optim import Optimizer

from topotrain.config.job import ConfigError

OWN_ERRORS = (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, AttributeError, AssertionError)
"""Errors that an optimizer raises for wrong settings or wrong state."""

SIZES = (1, 63, 64, 65, 4099)
"""Elements of the trial tensors: for full vectors, remainders, and the parts of several threads."""

STEPS = 3

TOLERANCE = 4
"""Allowed difference of two kernels, in units of the dtype's epsilon at the largest magnitude of a tensor.

Kernels round in different places. In float32 the last bits differ. In bfloat16 and float16 the plain loop rounds after
every operation and a fused kernel once. Three steps of torch's correct kernels differ by less than 2 such units.
"""

_PLAIN = {"foreach": False, "fused": False}
_FUSED = {"foreach": False, "fused": True}

# Options other than 0 are tried at these values. A weight decay of 1e-4 would have no visible effect in bfloat16, and a
# schedule that changes a momentum needs no new trial.
# The rate also stands in place of rate 0, with which a warm-up begins.
_TRIED_AT: Mapping[str, float] = {
    "lr": 0.5,
    "weight_decay": 0.25,
    "lr_decay": 0.25,
    "momentum": 0.9,
    "dampening": 0.5,
}
_BETAS = (0.9, 0.99)


Kind = tuple[torch.dtype, str]  # (dtype, type of the device)


class KernelVerdict(Enum):
    """The result of a trial of a fused kernel."""

    RIGHT = auto()
    WRONG = auto()
    UNSEEN = auto()  # no such kernel, or steps with these options are too small for the dtype


def kinds(params: Iterable[torch.Tensor]) -> tuple[Kind, ...]:
    """Return the dtypes and devices of these parameters, each once."""
    return tuple({(value.dtype, value.device.type): None for value in params})


def choose(cls: Any, group: Mapping[str, Any], kinds: Iterable[Kind]) -> dict[str, bool | None]:
    """Return the kernel options of a parameter group, {} if the script has chosen.

    Raises:
        ConfigError: the script has set fused=True, and that kernel is wrong.
    """
    if group.get("fused"):
        check_named(cls, group, kinds)
    if "fused" not in group or group["fused"] is not None or group.get("foreach") is not None:
        return {}
    right = not group.get("differentiable") and all(verdict(cls, group, *kind) is KernelVerdict.RIGHT for kind in kinds)
    # None and not False: torch's own default may choose `foreach`.
    return {"fused": right or None}


def check_named(cls: Any, group: Mapping[str, Any], kinds: Iterable[Kind]) -> None:
    """Check a kernel that the script has chosen.

    Raises:
        ConfigError: fused=True, and that kernel was found to be wrong on this machine.
    """
    for dtype, device in kinds if group.get("fused") else ():
        if verdict(cls, group, dtype, device) is KernelVerdict.WRONG:
            where = f"in {str(dtype).removeprefix('torch.')} on this machine (torch {torch.__version__}, {device})"
            wrong = f"{where} the fused kernel of {cls.__name__} does not compute what torch's plain loop computes"
            raise ConfigError("optimizer.fused", True, f"must be left out or False: {wrong}")


def verdict(cls: Any, group: Mapping[str, Any], dtype: torch.dtype, device: str) -> KernelVerdict:
    """Return the verdict on the fused kernel of a class with a group's options."""
    # Tried once per process: `_try` is cached, and a schedule changes none of the values that are tried.
    settings = tried_settings(cls, group, _TRIED_AT)
    try:
        return _try(cls, settings, dtype, device)
    except TypeError:  # a setting of a user's own class is not hashable
        return KernelVerdict.UNSEEN


@lru_cache(maxsize=64)
def _options(cls: Any) -> frozenset[str]:
    return frozenset(inspect.signature(cls).parameters) - {"params", *_PLAIN}


def tried_settings(cls: Any, group: Mapping[str, Any], values: Mapping[str, float]) -> tuple[tuple[str, Any], ...]:
    """Return the settings of a group, without its kernel options, for a trial.

    values: of settings that are not 0, in place of the group's. A schedule may change these at every step.
    """
    known = _options(cls)
    return tuple((name, _tried(name, value, values)) for name, value in sorted(group.items()) if name in known)


def _tried(name: str, value: Any, values: Mapping[str, float]) -> Any:
    if name == "lr":
        return values[name]
    if name == "betas" and isinstance(value, tuple | list) and len(value) == len(_BETAS):
        return tuple(tried if beta else 0.0 for beta, tried in zip(value, _BETAS, strict=True))
    return values[name] if name in values and value else value


@lru_cache(maxsize=256)
def _try(cls: Any, settings: tuple[tuple[str, Any], ...], dtype: torch.dtype, device: str) -> KernelVerdict:
    try:
        plain = _Trial(cls, dict(settings) | _PLAIN, dtype, device)
        fused = _Trial(cls, dict(settings) | _FUSED, dtype, device)
        for _ in range(STEPS):
            plain.step()
            fused.step()
        if not plain.agrees(fused):
            return KernelVerdict.WRONG
        # Values that have not moved would agree with a kernel that does nothing.
        return KernelVerdict.RIGHT if plain.moved() else KernelVerdict.UNSEEN
    # A class without such a kernel, or settings that it refuses: the user sees that error where the optimizer is made.
    except (*OWN_ERRORS, NotImplementedError):
        return KernelVerdict.UNSEEN


def give_gradients(values: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> None:
    """Set the `.grad` that an optimizer reads, of each tensor."""
    for value, gradient in zip(values, gradients, strict=True):
        value.grad = gradient


class _Trial:
    """An optimizer over a few small tensors.

    All magnitudes are near 1 and the rate is large, so a step is much larger than the rounding of the shortest dtype.
    """

    def __init__(self, cls: Any, settings: dict[str, Any], dtype: torch.dtype, device: str) -> None:
        # A generator of its own: the script's random numbers must not change.
        self._chance = torch.Generator().manual_seed(1)
        self._dtype, self._device = dtype, device
        self._signs = [torch.rand(size, generator=self._chance).sub(0.5).sign() for size in SIZES]
        self._uphill = 1.0 if settings.get("maximize") else -1.0
        self._begin = [self._near_one(sign) for sign in self._signs]
        self._values = [value.clone() for value in self._begin]
        self._optimizer: Optimizer = cls(self._values, **settings)

    def _near_one(self, signs: torch.Tensor) -> torch.Tensor:
        return (signs * (torch.rand(len(signs), generator=self._chance) + 0.5)).to(self._device, self._dtype)

    def step(self) -> None:
        # Away from 0 in each step: no cancellation, so errors stay within the dtype's precision.
        give_gradients(self._values, [self._near_one(signs).mul_(self._uphill) for signs in self._signs])
        self._optimizer.step()

    def moved(self) -> bool:
        """Return whether every element has changed by more than the tolerance."""
        pairs = zip(self._begin, self._values, strict=True)
        return all(bool(((a - b).abs() > 2 * _allowed(b)).all()) for a, b in pairs)

    def agrees(self, other: "_Trial") -> bool:
        """Return whether values and state are equal up to rounding."""
        for mine, theirs in zip(self._values, other._values, strict=True):
            left, right = self._optimizer.state[mine], other._optimizer.state[theirs]
            if not _close(mine, theirs) or not all(_close(left.get(n), right.get(n)) for n in {*left, *right}):
                return False
        return True


def _allowed(like: torch.Tensor) -> float:
    return float(like.abs().max()) * TOLERANCE * torch.finfo(like.dtype).eps


def _close(left: Any, right: Any) -> bool:
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return bool(left == right)
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool(((left - right).abs() <= _allowed(left)).all())  # False also for NaN
