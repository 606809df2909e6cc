"""Whether the numbers of a tensor are finite."""

from math import isfinite

import torch

_SQUARED = frozenset([torch.float32, torch.float64])  # the sum of squares of others soon is too large for them


def reals(x: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor: of complex elements both parts, in one row."""
    return torch.view_as_real(x.resolve_conj()).reshape(-1) if x.is_complex() else x


def all_finite(x: torch.Tensor) -> bool:
    """Whether all elements are finite."""
    x = reals(x)
    # A sum is many times cheaper than a test of each element. A sum of squares is as fast as the memory, but it is too
    # large for its dtype long before an element is.
    if x.dim() == 1 and x.dtype in _SQUARED and isfinite(torch.dot(x, x).item()):
        return True
    if isfinite(x.sum().item()):
        return True
    if x.dtype is torch.float16 and bool(torch.isfinite(x.sum(dtype=torch.float32))):
        return True  # the sum was too large for the elements' dtype
    return bool(torch.isfinite(x).all())
