"""Tensors compared bit by bit."""

import zlib

import torch

# Integer dtypes by element size.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place. torch has no public name for it."""
    return int(tensor._version)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and layout have the same bits."""
    return torch.equal(integers(a), integers(b))


def sum_of_bits(flat: torch.Tensor) -> int:
    """Return 64 bits that hardly any other 1-D tensor has, of memory aligned to 8."""
    bits = integers(flat).reshape(-1)
    # Additions of 8 bytes take as long as to read the memory, and those of fewer ten times as long.
    wide = bits.numel() // (8 // bits.element_size()) * (8 // bits.element_size())
    total = int(bits[:wide].view(torch.int64).sum()) + int(bits[wide:].sum())
    # A sum does not see an order, and few changes of sign.
    some = bits[:: max(1, bits.numel() // 64)].contiguous()
    return (total ^ zlib.crc32(some.numpy().tobytes()) << 16) & (1 << 64) - 1


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
    """Return the sum of all elements' bits as integers. One other bit changes the sum."""
    bits = integers(tensor)
    return int(bits.sum(dtype=bits.dtype))
