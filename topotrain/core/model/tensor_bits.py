"""Tensors compared bit by bit."""

import torch

# Integer dtypes by element size.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place. torch has no public name for it."""
    return int(tensor._version)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and layout have the same bits."""
    return torch.equal(integers(a), integers(b))


def differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a bool for each element of two 1-D tensors: whether their bits differ."""
    found = integers(a) != integers(b)
    return found.any(dim=-1) if a.is_complex() else found


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of each element as an integer; of a complex one, as two."""
    # Compared as numbers, NaN differs from itself, and -0.0 equals 0.0.
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.view(_BITS[real.element_size()])


def bit_sum(tensor: torch.Tensor) -> int:
    """Return the sum of the bits of all elements as integers, modulo their size. One other bit is another sum."""
    bits = integers(tensor)
    return int(bits.sum(dtype=bits.dtype))
