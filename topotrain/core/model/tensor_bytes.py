"""The memory of a tensor as bytes, for files that are read and written in place."""

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a launcher finds the newest snapshot without torch
    from torch import Tensor


def bytes_of(tensor: "Tensor") -> memoryview:
    """Return a contiguous CPU tensor's memory as writable bytes; it must outlive them."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
