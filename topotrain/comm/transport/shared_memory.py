"""Shared memory on one host, to which frames refer instead of carrying a payload.

* A payload that lies in a region of the sender's `ProcessMemory` is never copied: the receiver sees the same bytes.
* A region is a memfd. It has no name, and is freed with its last user, also after SIGKILL.
* A region is sealed against truncation, so a reference that was checked once can never fault.
"""

import fcntl
import mmap
import os
import stat
import threading
import weakref
from bisect import bisect_right
from collections.abc import Sequence

import torch

from topotrain.comm.private_views import PrivateViews
from topotrain.comm.transport import TransportError
from topotrain.core.protocol import ProtocolError

ALIGN = 64  # bytes
ARENA = 1 << 20  # bytes; smaller allocations share regions of this size
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class OwnRegion:
    """One memfd of this process, mapped: `bytes` is all of it, `tensor` gives parts."""

    def __init__(self, number: int, fd: int, nbytes: int) -> None:
        self.id, self.fd, self.nbytes = number, fd, nbytes
        self._map = _mapped(fd, nbytes)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used = 0
        weakref.finalize(self, os.close, fd)

    def reserve(self, nbytes: int) -> int | None:
        """Return the offset of an unused part, a multiple of ALIGN; None without room."""
        offset = self._used
        if offset + nbytes > self.nbytes:
            return None
        # Aligned, so that two tensors never share a cache line.
        self._used += -(-nbytes // ALIGN) * ALIGN
        return offset

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `numel` elements from byte `offset` on, 1-D."""
        # `frombuffer` refuses an empty range.
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        # A storage of its own: `torch.save` writes the whole storage of a view.
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)


class ProcessMemory:
    """The shared memory of one process, and the regions of peers that it maps.

    Memory is never reused: it is kept until every tensor over it and this object are gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made = 0
        self._arena: OwnRegion | None = None
        self._sorted: tuple[list[int], list[OwnRegion]] = (
            [],
            [],
        )  # by address; replaced, never changed: no lock to read
        self._seen: weakref.WeakValueDictionary[tuple[int, int], torch.Tensor] = weakref.WeakValueDictionary()
        self._files: dict[tuple[int, int], int] = {}  # descriptors of those that are still there

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros, 1-D, at a multiple of ALIGN bytes."""
        nbytes = numel * dtype.itemsize
        with self._lock:
            if nbytes >= ARENA:
                return self._make(nbytes).tensor(0, numel, dtype)
            offset = None if self._arena is None else self._arena.reserve(nbytes)
            if self._arena is None or offset is None:
                self._arena, offset = self._make(ARENA), 0
                self._arena.reserve(nbytes)
            return self._arena.tensor(offset, numel, dtype)

    def adopt(self, fd: int, nbytes: int) -> OwnRegion:
        """Map a memfd made by `unsized_memfd`; all processes pass the same `nbytes`.

        Raises:
            TransportError: it has another size, or cannot be sealed.
        """
        # The descriptor stays the caller's; the region closes its copy.
        own = os.dup(fd)
        try:
            # The first process gives it its size.
            if os.fstat(own).st_size == 0:
                os.ftruncate(own, nbytes)  # a later process asks for the same size, which is no change
            # No peer may shrink the file: a read beyond its end kills the process with SIGBUS. Without F_SEAL_SEAL,
            # because the next process adds these seals again.
            fcntl.fcntl(own, fcntl.F_ADD_SEALS, _SEALS)
            size = os.fstat(own).st_size
        except OSError as error:
            os.close(own)
            raise TransportError(f"shared memory of {nbytes} bytes cannot be set up: {error}") from error
        if size != nbytes:
            os.close(own)
            raise TransportError(f"shared memory of {size} bytes, this process needs {nbytes}: do the models differ?")
        with self._lock:
            return self._add(own, nbytes)

    def find(self, tensor: torch.Tensor) -> tuple[OwnRegion, int] | None:
        """Return the own region that contains the tensor, and its byte offset, or None."""
        address = tensor.data_ptr()
        bases, regions = self._sorted
        # The last region that begins at or before the tensor.
        at = bisect_right(bases, address) - 1
        if not address or at < 0 or address + tensor.nbytes > bases[at] + regions[at].nbytes:
            return None
        return regions[at], address - bases[at]

    def private_views(self, tensors: Sequence[torch.Tensor]) -> PrivateViews:
        """Map the memory of these tensors, which lie in regions, once more and privately.

        Raises:
            TransportError: the memory cannot be mapped.
        """
        with self._lock:
            regions = [(mapped, self._files[key]) for key, mapped in self._seen.items()]
        regions.sort(key=lambda each: each[0].data_ptr())
        bases = [mapped.data_ptr() for mapped, _ in regions]
        parts = []
        for tensor in tensors:
            at = bisect_right(bases, tensor.data_ptr()) - 1
            offset = tensor.data_ptr() - bases[at]
            assert offset + tensor.nbytes <= regions[at][0].nbytes
            parts.append((regions[at][1], offset, tensor.nbytes))
        return PrivateViews(parts)

    def map(self, fd: int, nbytes: int) -> torch.Tensor:
        """Map a peer's region as 1-D uint8; take `fd`."""
        kept = False
        try:
            info = os.fstat(fd)
            # An unsealed file could shrink after the check of its size.
            sealed = stat.S_ISREG(info.st_mode) and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or not 0 < nbytes == info.st_size:
                raise ProtocolError(f"a region of {nbytes} bytes that is {info.st_size} bytes, or not sealed")
            with self._lock:
                # Connections of one process share one mapping. The inode identifies the memory.
                known = self._seen.get((info.st_dev, info.st_ino))
                if known is None:
                    known = torch.frombuffer(_mapped(fd, nbytes), dtype=torch.uint8)
                    self._seen[info.st_dev, info.st_ino] = known
                    self._files[info.st_dev, info.st_ino], kept = fd, True
                    weakref.finalize(known, os.close, fd)
                return known
        except OSError as error:
            raise ProtocolError(f"a region that cannot be mapped: {error}") from error
        finally:
            if not kept:
                os.close(fd)

    def _make(self, nbytes: int) -> OwnRegion:
        fd = unsized_memfd()
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        except OSError as error:
            os.close(fd)
            raise TransportError(f"no shared memory of {nbytes} bytes: {error}") from error
        return self._add(fd, nbytes)

    def _add(self, fd: int, nbytes: int) -> OwnRegion:
        try:
            region = OwnRegion(self._made, fd, nbytes)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise TransportError(f"no shared memory of {nbytes} bytes: {error}") from error
        self._made += 1
        info = os.fstat(fd)
        # Connections inside this process name its own regions, too.
        self._seen[info.st_dev, info.st_ino], self._files[info.st_dev, info.st_ino] = region.bytes, fd
        regions = sorted([*self._sorted[1], region], key=lambda r: r.bytes.data_ptr())
        # One assignment: `find` reads it without the lock, on every send.
        self._sorted = ([r.bytes.data_ptr() for r in regions], regions)
        return region


def unsized_memfd() -> int:
    """Return a memfd of size 0, for processes that share it by `ProcessMemory.adopt`."""
    return os.memfd_create("topotrain", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _mapped(fd: int, nbytes: int) -> mmap.mmap:
    # Populated now: a fresh page costs several times the copy that it is needed for.
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
