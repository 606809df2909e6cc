"""Tensors as ranges of a server's buffers, for the transfer of its state.

A tensor that is a view of a buffer is sent as a range, and the content of the range is sent once (`state_transfer`). So
two messages that are views of the same memory are views of the same memory in the standby, too. Only parts of buffers
that are in use are sent.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from topotrain.core.model.schema import FlatBuffers

RAW = -1  # as `space`: a buffer of bytes that belongs to no space


@dataclass(frozen=True, slots=True)
class BufferRange:
    """Elements [lo, hi) of buffer `name` in a space. The whole buffer has `size`."""

    name: str
    space: int
    lo: int
    hi: int
    size: int

    def of(self, flats: FlatBuffers) -> torch.Tensor:
        """Return this range of other buffers. Raises ValueError if they have none."""
        flat = flats.raw(self.name, self.size) if self.space == RAW else flats.flat(self.name, self.space)
        if not 0 <= self.lo <= self.hi <= flat.numel() == self.size:
            raise ValueError(f"elements {self.lo} to {self.hi} of {self.size} in {self.name!r}")
        return flat[self.lo : self.hi]


class BufferViews:
    """Finds tensors in buffers, and records the ranges that were found."""

    def __init__(self, flats: FlatBuffers) -> None:
        # Empty buffers have no address of their own.
        held = [(flat.data_ptr(), key, flat) for key, flat in flats.held() if flat.numel()]
        self._held = sorted(held, key=lambda each: each[0])
        self._starts = [start for start, _, _ in self._held]
        self._wanted: dict[tuple[str, int], list[tuple[int, int]]] = {}

    def find(self, tensor: torch.Tensor) -> BufferRange | None:
        """Return the range of a tensor, or None if it has memory of its own."""
        at = bisect_right(self._starts, tensor.data_ptr()) - 1
        if at < 0 or tensor.dim() != 1 or not tensor.is_contiguous() or not tensor.numel():
            return None
        start, (name, space), flat = self._held[at]
        lo = (tensor.data_ptr() - start) // flat.itemsize
        # Memory after the end of the buffer, or seen as another dtype: the tensor is sent by itself.
        if tensor.dtype != flat.dtype or lo + tensor.numel() > flat.numel():
            return None
        # Only recorded ranges are sent, since large parts of the buffers may be out of use.
        self._wanted.setdefault((name, space), []).append((lo, lo + tensor.numel()))
        return BufferRange(name, space, lo, lo + tensor.numel(), flat.numel())

    def wanted(self) -> Iterator[tuple[BufferRange, torch.Tensor]]:
        """Yield all ranges in use, each element once."""
        for (name, space), spans in sorted(self._wanted.items()):
            flat = next(flat for _, key, flat in self._held if key == (name, space))
            for lo, hi in _joined(spans):
                yield BufferRange(name, space, lo, hi, flat.numel()), flat[lo:hi]


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for lo, hi in sorted(spans):
        if found and lo <= found[-1][1]:
            found[-1] = (found[-1][0], max(hi, found[-1][1]))
        else:
            found.append((lo, hi))
    return found
