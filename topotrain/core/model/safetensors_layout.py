"""Layout of a safetensors file that several processes write.

Header and offsets follow from the descriptions of the tensors alone. So each server writes its own elements at their
offsets without coordination, and a reader knows the header that it must find. The file is an ordinary safetensors file
(Hugging Face: 8 bytes of length, JSON, data).

Elements are numbered in the order of a server's memory. A tensor with strides that are not row-major there
(channels_last) is row-major in the file like all others, so its elements are scattered: `FileTensor.ordered` is false.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
"""The format's name of each dtype. The format has no complex128. Such a tensor is stored as pairs of float64."""

PAIRS = "complex128"
PAIRED = "complex"
"""Key of the file's metadata: JSON of the names of tensors that `torch.view_as_complex` makes complex again."""

_ITEM_BYTES = {
    **ITEM_BYTES,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,  # of buffers only
}
_LENGTH_BYTES, _ALIGN = 8, 64
MOST_HEADER = 100_000_000
"""Maximum bytes of a header that readers of the format accept."""


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """A tensor to store in a file.

    `shape` and `stride` are in elements. `dtype` is torch's name without "torch.".
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file. `begin` is the offset of its first byte."""

    described: TensorDescription
    begin: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _ITEM_BYTES[self.described.dtype]

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.described.shape)

    @property
    def end(self) -> int:
        """Offset of the byte after its last one."""
        return self.begin + self.count * self.itemsize

    @property
    def ordered(self) -> bool:
        """Whether the elements have the same order in memory as in the file."""
        return row_major(self.described.shape, self.described.stride)

    def bytes_of(self, lo: int, hi: int) -> tuple[int, int]:
        """Return the byte range of elements [lo, hi); only for an ordered tensor.

        Raises:
            ValueError: the elements are out of bounds.
        """
        if not 0 <= lo <= hi <= self.count:
            raise ValueError(f"{self.described.name}: elements {lo} to {hi} of {self.count}")
        return self.begin + lo * self.itemsize, self.begin + hi * self.itemsize


@dataclass(frozen=True, slots=True)
class FlatFile:
    """A whole file: its header, its tensors by name, and its size in bytes."""

    header: bytes
    entries: Mapping[str, FileTensor]
    size: int


def lay_out(tensors: Iterable[TensorDescription], metadata: Mapping[str, str]) -> FlatFile:
    """Lay out a file of tensors.

    Raises:
        ValueError: a name is used twice, the format does not support a dtype, or the header is too long.
    """
    # Larger elements first, so that all are aligned without gaps, which the format forbids.
    ordered = sorted(tensors, key=lambda tensor: -_ITEM_BYTES.get(tensor.dtype, 0))
    paired = [tensor.name for tensor in ordered if tensor.dtype == PAIRS]
    pairs = {PAIRED: json.dumps(paired)} if paired else {}
    header: dict[str, object] = {"__metadata__": {**metadata, **pairs}}
    at = 0
    begins: list[int] = []
    for tensor in ordered:
        if tensor.name in header:
            raise ValueError(f"tensor {tensor.name!r} is named twice")
        if tensor.dtype not in NAMES:
            raise ValueError(f"tensor {tensor.name!r}: the format of the file does not support {tensor.dtype}")
        if not dense(tensor.shape, tensor.stride):
            raise ValueError(f"tensor {tensor.name!r}: strides {tensor.stride} leave gaps in a shape of {tensor.shape}")
        end = at + math.prod(tensor.shape) * _ITEM_BYTES[tensor.dtype]
        shape = [*tensor.shape, 2] if tensor.dtype == PAIRS else list(tensor.shape)
        header[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": [at, end]}
        begins.append(at)
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # A complex128 tensor at an address that is no multiple of 16 crashes torch's kernels, and readers map the file.
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGN)
    if len(text) > MOST_HEADER:
        raise ValueError(f"{len(ordered)} tensors: a header of {len(text)} bytes, at most {MOST_HEADER}")
    first = _LENGTH_BYTES + len(text)
    entries = {tensor.name: FileTensor(tensor, first + begin) for tensor, begin in zip(ordered, begins, strict=True)}
    return FlatFile(len(text).to_bytes(_LENGTH_BYTES, "little") + text, entries, first + at)


def dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether elements of these strides fill their memory exactly once."""
    # From the smallest stride up, whatever the order of the dimensions is.
    expected = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: pair[1]):
        if size != 1 and step != expected:
            return math.prod(shape) == 0
        expected *= size
    return True


def row_major(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether elements are contiguous, with the last dimension fastest."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride)):
        if size != 1 and step != expected:
            return math.prod(shape) == 0
        expected *= size
    return True
