"""Where every element of named tensors stands in one safetensors file that several processes write.

Rule: pure, and the same in every process: header and offsets follow from the descriptions alone. So each server writes
its own elements at their place without asking anybody, and whoever reads knows what header he has to find. The file is
an ordinary one: plain PyTorch loads it (format: Hugging Face safetensors, 8 bytes of length, JSON, data).

Elements are counted as they lie in a server's memory. A tensor whose strides are not row-major there (channels_last)
stands in the file row by row like every other, so its elements are scattered: `FileTensor.ordered` is false.
"""

import ctypes
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from topotrain.config.sharding import ITEM_BYTES

NAMES = {
    "bool": "BOOL",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "complex128": "F64",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
"""The format's name of each dtype. It knows no complex128: such a tensor stands there as pairs of float64."""

PAIRS = "complex128"
PAIRED = "complex"
"""The file's metadata under this word: JSON of the names that `torch.view_as_complex` makes complex again."""

_ITEM_BYTES = {
    **ITEM_BYTES,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,  # of buffers only
}
_ALIGN = 8
MOST_HEADER = 100_000_000
"""Bytes of a header that readers of the format accept."""


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """A tensor to be laid out; `shape` and `stride` count elements, `dtype` is torch's name without "torch."."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file: `begin` is its first byte there."""

    told: TensorDescription
    begin: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _ITEM_BYTES[self.told.dtype]

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.told.shape)

    @property
    def end(self) -> int:
        """The byte behind the last one."""
        return self.begin + self.count * self.itemsize

    @property
    def ordered(self) -> bool:
        """Whether the elements lie in memory in the order of the file."""
        return row_major(self.told.shape, self.told.stride)

    def bytes_of(self, lo: int, hi: int) -> tuple[int, int]:
        """The bytes of elements [lo, hi); only for an ordered one. Raises ValueError out of bounds."""
        if not 0 <= lo <= hi <= self.count:
            raise ValueError(f"{self.told.name}: elements {lo} to {hi} of {self.count}")
        return self.begin + lo * self.itemsize, self.begin + hi * self.itemsize


@dataclass(frozen=True, slots=True)
class FlatFile:
    """A whole file: its first bytes, each tensor's place by name, and its size in bytes."""

    header: bytes
    entries: Mapping[str, FileTensor]
    size: int


def lay_out(tensors: Iterable[TensorDescription], metadata: Mapping[str, str]) -> FlatFile:
    """Give every tensor its place: larger elements first, so that all are aligned, else in the order given.

    Raises ValueError for a name that is used twice, a dtype that the format does not know, and too long a header.
    """
    ordered = sorted(tensors, key=lambda told: -_ITEM_BYTES.get(told.dtype, 0))
    paired = [told.name for told in ordered if told.dtype == PAIRS]
    header: dict[str, object] = {"__metadata__": {**metadata, **said_of(paired)}}
    at = 0
    begins: list[int] = []
    for told in ordered:
        if told.name in header:
            raise ValueError(f"tensor {told.name!r} is named twice")
        if told.dtype not in NAMES:
            raise ValueError(f"tensor {told.name!r}: the format of the file knows no {told.dtype}")
        if not dense(told.shape, told.stride):
            raise ValueError(f"tensor {told.name!r}: strides {told.stride} leave gaps in a shape of {told.shape}")
        end = at + math.prod(told.shape) * _ITEM_BYTES[told.dtype]
        shape = [*told.shape, 2] if told.dtype == PAIRS else list(told.shape)
        header[told.name] = {"dtype": NAMES[told.dtype], "shape": shape, "data_offsets": [at, end]}
        begins.append(at)
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    if len(text) > MOST_HEADER:
        raise ValueError(f"{len(ordered)} tensors: a header of {len(text)} bytes, at most {MOST_HEADER}")
    first = _ALIGN + len(text)
    entries = {told.name: FileTensor(told, first + begin) for told, begin in zip(ordered, begins, strict=True)}
    return FlatFile(len(text).to_bytes(_ALIGN, "little") + text, entries, first + at)


def said_of(paired: Sequence[str]) -> dict[str, str]:
    """The metadata of a file in which these tensors stand as pairs."""
    return {PAIRED: json.dumps(list(paired))} if paired else {}


def dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements of these strides fill their memory exactly once, in whatever order of dimensions."""
    expected = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: pair[1]):
        if size != 1 and step != expected:
            return math.prod(shape) == 0
        expected *= size
    return True


def row_major(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements of these strides lie one after the other, the last dimension fastest."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride)):
        if size != 1 and step != expected:
            return math.prod(shape) == 0
        expected *= size
    return True


class TensorMemory(Protocol):
    """What `bytes_of` needs of a tensor: this module is read without torch."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        ...

    def data_ptr(self) -> int:
        """Its first byte."""
        ...


def bytes_of(tensor: TensorMemory) -> memoryview:
    """The memory of a contiguous tensor on the CPU, as bytes that can be written; the tensor must live as long."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
