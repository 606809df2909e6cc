"""Radial-directional average of tensors.

Decoupled DiLoCo (Douillard et al., 2026) merges with it. The average of tensors D with weights w has

* the length sum(w |D|) / sum(w), where a tensor of zeros counts with length 0, and
* the direction of sum(w D / |D|), without the tensors of zeros.

The differences of several workers are nearly orthogonal, and the mean of M such tensors is shorter than each of them by
the root of M. So a learning rate that suits one M is too small for a larger one. This average is as long as its parts.

It is a sum of the tensors times factors. The factors need the lengths of the tensors and of the sum of their
directions, which are sums over elements: a tensor may lie on several servers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from topotrain.config.sharding import ALIGN
from topotrain.core.server.ordered_sum import ScratchBuffers

CANCELLED = 1e-6
"""Directions with a mean that is shorter than this cancel each other.

Of a shorter one float32 keeps only rounding.
"""

Products = Mapping[tuple[int, int], float]
"""The inner products of tensors, by their numbers (a, b) with a <= b."""

_CHUNK = 1 << 14
"""Elements in one sum: so few that torch does not divide them among threads.

The number of threads must not decide a bit.
"""


def direction_factors(
    lengths: Mapping[int, float], weights: Mapping[int, float], dtype: torch.dtype
) -> dict[int, float]:
    """Return the factor of each tensor in the weighted mean of directions.

    Tensors of zeros are left out.
    """
    total = exact_sum(weights.values())
    # The inverse of a shorter one is infinite in this dtype, so it counts as zero.
    least = torch.finfo(wide(dtype)).tiny
    return {key: weights[key] / total / length for key, length in lengths.items() if weights[key] and length > least}


def average_factors(
    factors: Mapping[int, float], lengths: Mapping[int, float], weights: Mapping[int, float], squared: float
) -> dict[int, float] | None:
    """Return the factor of each tensor in the average. None: the average is the mean.

    Args:
        factors: the result of `direction_factors`.
        squared: the square of the length of the sum of the tensors times these factors.
    """
    # Of one tensor both are its multiple, and the mean has no rounding of a length.
    if len(factors) < 2 or not all(map(math.isfinite, (squared, *lengths.values()))):
        return None
    total = exact_sum(weights.values())
    if squared <= (CANCELLED * exact_sum(weights[key] for key in factors) / total) ** 2:
        return None
    length = exact_sum(weights[key] * lengths[key] for key in factors) / total
    scale = length / math.sqrt(squared)
    return {key: factor * scale for key, factor in factors.items()}


def squared_length(factors: Mapping[int, float], products: Products) -> float:
    """Return the square of the length of a sum of tensors times factors."""
    keys = sorted(factors)
    pairs = ((a, b) for a in keys for b in keys if a <= b)
    return exact_sum((1 if a == b else 2) * factors[a] * factors[b] * products[a, b] for a, b in pairs)


def exact_sum(numbers: Iterable[float]) -> float:
    """Return the sum of numbers, the same in any order. NaN: it is not finite."""
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):
        return math.nan


# --- on elements -----------------------------------------------------------------------------------------------------


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of this dtype are added up."""
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype


def block_products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the inner products of the blocks of `ALIGN` elements of two 1-D tensors.

    Slices are cut between blocks, so the result does not depend on the cuts.
    """
    found = torch.empty(-(-left.numel() // ALIGN), dtype=torch.float64)
    for first in range(0, left.numel(), _CHUNK):
        # Products of two float32 are exact in float64 only.
        part = left[first : first + _CHUNK].double()
        product = part * (part if right is left else right[first : first + _CHUNK].double())
        begin, whole = first // ALIGN, product.numel() // ALIGN
        torch.sum(product[: whole * ALIGN].view(-1, ALIGN), 1, out=found[begin : begin + whole])
        if whole * ALIGN < product.numel():
            found[-1] = product[whole * ALIGN :].sum()
    return found


def inner_product(blocks: Sequence[torch.Tensor]) -> float:
    """Return the sum of the results of `block_products` of adjacent slices."""
    if not blocks:
        return 0.0
    joined = torch.cat(list(blocks))
    return exact_sum(float(joined[first : first + _CHUNK].sum()) for first in range(0, joined.numel(), _CHUNK))


def write_sum(parts: Iterable[tuple[float, torch.Tensor]], out: torch.Tensor, scratch: ScratchBuffers) -> None:
    """Write the sum of 1-D tensors times factors, added in this order, into `out`."""
    total: torch.Tensor | None = None
    for factor, part in parts:
        mine = part.to(wide(part.dtype))  # the tensor itself, if it is not short
        if total is None:
            total = torch.mul(mine, factor, out=out if out.dtype is mine.dtype else scratch.like(0, mine))
        else:
            # In two steps: a kernel that does both rounds otherwise at the end of a tensor.
            total.add_(torch.mul(mine, factor, out=scratch.like(1, mine)))
    if total is None:
        out.zero_()
    elif total is not out:
        out.copy_(total)
