"""Rounds of kernels: which elements of a tensor an optimizer computes alike.

A vectorized kernel takes a tensor in rounds of some elements, and what is left at the end one by one. Some kernels
round differently there: the compiler has made one fused multiplication and addition of two operations, or a short
dtype is rounded after every operation. So tensors that lie side by side may be updated as one only where that moves no
element from the end of a tensor into a round.

In float32 and float64 the plain loops of torch have no such end, and the fused kernels of SGD with momentum, Adam and
AdamW do. Each process tests it, because it depends on the processor and on torch's build.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from topotrain.config.sharding import ALIGN
from topotrain.core.optim.kernel_choice import OWN_ERRORS, Kind, give_gradients, tried_settings

ROUNDS = (1, 16)
"""Numbers of elements that are tried. `ALIGN` needs no trial: slices are cut there already."""

STEPS = 4

# In other dtypes the loops of torch have an end, so that a trial would be wasted.
_WIDE = (torch.float32, torch.float64)
# More elements at the ends than rounds have, since less than one in a hundred of them differs in one step.
_SIZES = (31,) * 24 + (15,) * 24 + (63,) * 8 + (1,) * 8 + (33, 64, 4099)
# No powers of two, with which products are exact: then both ways of rounding agree.
_TRIED_AT = {"lr": 0.037, "weight_decay": 0.013, "lr_decay": 0.013, "momentum": 0.9, "dampening": 0.3}


def common_round(cls: Any, group: Mapping[str, Any], kinds: Sequence[Kind]) -> int:
    """Return the number of elements in a round of an optimizer's kernel.

    Two tensors may be updated as one if that number divides the distance from the first to the second, and the size of
    the first. With the result 1 all elements are computed alike.
    """
    if group.get("differentiable"):
        return ALIGN
    kernels = tuple((name, group[name]) for name in ("foreach", "fused") if name in group)
    settings = (*tried_settings(cls, group, _TRIED_AT), *kernels)
    try:
        return max((_round(cls, settings, *kind) for kind in kinds), default=ALIGN)
    except TypeError:  # a setting is not hashable
        return ALIGN


@lru_cache(maxsize=256)
def _round(cls: Any, settings: tuple[tuple[str, Any], ...], dtype: torch.dtype, device: str) -> int:
    if dtype not in _WIDE or device != "cpu":
        return ALIGN
    try:
        return next((each for each in ROUNDS if _agrees(cls, dict(settings), dtype, each)), ALIGN)
    except (*OWN_ERRORS, NotImplementedError):
        return ALIGN


def _agrees(cls: Any, settings: dict[str, Any], dtype: torch.dtype, each: int) -> bool:
    """Return whether tensors of multiples of `each` elements may be updated as one."""
    sizes = [math.ceil(size / each) * each for size in _SIZES]
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += math.ceil(size / ALIGN) * ALIGN
    places = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    # Between the tensors are zeros, as in a flat buffer, and they must stay: what is there is summed and sent, too.
    used = torch.zeros(total, dtype=torch.bool)
    for place in places:
        used[place] = True
    # A generator of its own: the script's random numbers must not change.
    chance = torch.Generator().manual_seed(2)
    joined = torch.where(used, torch.randn(total, generator=chance, dtype=dtype), 0)
    apart = joined.clone()
    gradient = torch.zeros_like(joined)
    sides = ([joined], [gradient]), ([apart[place] for place in places], [gradient[place] for place in places])
    optimizers = [_with_gradients(cls, settings, *side) for side in sides]
    for _ in range(STEPS):
        gradient.copy_(torch.where(used, torch.randn(total, generator=chance, dtype=dtype), 0))
        for optimizer in optimizers:
            optimizer.step()
    return torch.equal(joined, apart)


def _with_gradients(
    cls: Any, settings: dict[str, Any], values: list[torch.Tensor], gradients: list[torch.Tensor]
) -> torch.optim.Optimizer:
    give_gradients(values, gradients)
    made: torch.optim.Optimizer = cls(values, **settings)
    return made
