"""Private mappings of shared memory: this process alone sees its writes to them.

A private mapping shows what other mappings of the memory write, until this process writes to a page. The page is then a
copy (copy on write), which no other process sees and which shows nothing of others, until it is given back.
`/proc/self/pagemap` tells which pages are copies.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from topotrain.core.transport_contract import TransportError

_PRIVATE, _ACCESS = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
_NO_RESERVE, _FIXED, _NO_ACCESS = 0x4000, 0x10, 0x0  # of mmap(2), which Python's module does not name
# Bits of the last byte of an entry of pagemap.
_PRESENT_OR_SWAPPED, _OF_A_FILE = 0xC0, 0x20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class PrivateViews:
    """Private mappings of parts of memory, by number.

    Each part has pages of its own, also where the parts share pages: what is written to one is never in another.

    Args:
        parts: (file descriptor, offset, size in bytes) of each part. The size is above 0.

    Raises:
        TransportError: the memory cannot be mapped, here or in `tensor`.
    """

    def __init__(self, parts: Sequence[tuple[int, int, int]]) -> None:
        page = mmap.PAGESIZE
        self._spans = spans = [(fd, offset // page, -(-(offset + nbytes) // page)) for fd, offset, nbytes in parts]
        self._ends = np.fromiter(accumulate(end - begin for _, begin, end in spans), np.int64, len(spans))
        self._firsts = [0, *self._ends.tolist()]
        # One range of addresses, so that one look finds the copies of all parts.
        nbytes = max(1, self._firsts[-1]) * page
        self._base = base = _map(None, nbytes, _PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE, -1, 0, _NO_ACCESS)
        memory = (ctypes.c_char * nbytes).from_address(base)
        # When the last tensor over it is gone. Not at the exit of the process, where threads may still read.
        weakref.finalize(memory, _libc.munmap, base, nbytes).atexit = False
        self._memory = memory
        self._offsets = [f * page + o % page for f, (_, o, _) in zip(self._firsts, parts, strict=False)]

    def tensor(self, number: int, like: torch.Tensor) -> torch.Tensor:
        """Map a part as a tensor with its own storage, and the dtype and layout of `like`."""
        # Not before: limits of a process count it, and the parameter may still have other memory.
        fd, begin, end = self._spans[number]
        address = self._base + self._firsts[number] * mmap.PAGESIZE
        _map(address, (end - begin) * mmap.PAGESIZE, _PRIVATE | _FIXED, fd, begin * mmap.PAGESIZE)
        flat = torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=self._offsets[number])
        return flat.as_strided(like.shape, like.stride())

    def written(self) -> list[int]:
        """Return the numbers of the parts with private pages; all, if these are unknown."""
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
                raw = os.pread(pagemap.fileno(), 8 * self._firsts[-1], self._base // mmap.PAGESIZE * 8)
        except OSError:
            raw = b""
        if len(raw) < 8 * self._firsts[-1]:
            return list(range(len(self._ends)))
        entries = np.frombuffer(raw, np.uint8)[7::8]
        # Before the second test: nearly all pages are of the file.
        copies = np.flatnonzero((entries & _OF_A_FILE) == 0)
        copies = copies[(entries[copies] & _PRESENT_OR_SWAPPED) != 0]
        return np.unique(np.searchsorted(self._ends, copies, side="right")).tolist() if len(copies) else []

    def give_back(self, number: int) -> None:
        """Show the shared memory again. The writes of this process to the part are lost."""
        first, end = self._firsts[number], self._firsts[number + 1]
        _libc.madvise(self._base + first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE, mmap.MADV_DONTNEED)


def give_back_freed() -> None:
    """Return freed memory of this process to the system, where the C library can."""
    # glibc keeps freed memory of tensors up to 32 MB for the next ones.
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def _map(address: int | None, nbytes: int, flags: int, fd: int, offset: int, access: int = _ACCESS) -> int:
    found = _libc.mmap(address, nbytes, access, flags, fd, offset)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise TransportError(f"shared memory cannot be mapped privately: {os.strerror(ctypes.get_errno())}")
    return int(found)
