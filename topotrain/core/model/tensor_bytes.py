"""The memory of a tensor as bytes, for files that are read and written in place."""

import ctypes

import torch


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as writable bytes.

    The tensor must live as long as the result.
    """
    if not tensor.nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
