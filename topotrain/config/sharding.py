"""Map parameters to servers: flat spaces, slices, segments, buckets and pieces.

* The map is a pure function of schema and counts. So every process computes the same map, and only its digest travels.
* A cut falls on a multiple of ALIGN elements from a parameter's start, and a kernel works on one segment. Only then
  does a vectorized update of a slice give the bits of the update of the whole tensor.
* Frozen parameters are assigned to servers too, since a script may unfreeze them later.
* An empty parameter has no element and therefore no segment.

Where one model is split over the workers of a group (`split`), a parameter has owners, the workers that hold it. A
space has parameters of the same owners only. So a worker needs memory, and messages, for its own spaces alone.

A space has parameters of the same optimizers only, most often of one. So each step takes whole buckets.
"""

import heapq
import json
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from topotrain.config.job import Slicing

T = TypeVar("T")

ALIGN = 64
"""Elements in one unit of alignment."""

MAX_ELEMENTS = 1 << 40
"""A schema may come from a peer: no parameter may be larger than this."""

ITEM_BYTES = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("float32", "int32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of one element of each dtype that a parameter may have."""


_SHARED = 1 << 16
"""More than any number of an optimizer."""


def shared_by(optimizers: Collection[int]) -> int:
    """Return the `Parameter.optimizer` of all parameters of just these optimizers."""
    first = min(optimizers)
    return first if len(optimizers) == 1 else first + _SHARED * sum(1 << each for each in optimizers)


def in_steps_of(number: int, optimizer: int) -> bool:
    """Whether a step of `optimizer` updates parameters of this `Parameter.optimizer`."""
    return number == optimizer if number < _SHARED else bool(number // _SHARED >> optimizer & 1)


def first_of(number: int) -> int:
    """Return the first optimizer of what has this number (`Parameter.optimizer`)."""
    return number % _SHARED


class SchemaError(ValueError):
    """An error in a model's parameters, or in the text that describes them."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the schema; tied weights are one parameter with aliases.

    `shape` and `stride` count elements, `dtype` is torch's name without "torch.". `home` is the shard that the script
    chose for the whole tensor, -1: any. `owners` are the workers of each group that hold it, ascending. Empty: all.
    `optimizer` is the number of the job's optimizer that updates it, or `shared_by` several. Raises SchemaError.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    trainable: bool
    aliases: tuple[str, ...] = ()
    home: int = -1
    owners: tuple[int, ...] = ()
    optimizer: int = 0

    def __post_init__(self) -> None:
        for what, numbers in (("shape", self.shape), ("stride", self.stride)):
            # `type`, because isinstance would accept True and False as numbers. A schema may come from a peer.
            if not all(type(n) is int and 0 <= n <= MAX_ELEMENTS for n in numbers):
                raise SchemaError(f"parameter {self.name!r}: {what} = {numbers}: must be whole numbers >= 0")
        if len(self.shape) != len(self.stride):
            raise SchemaError(f"parameter {self.name!r}: stride = {self.stride}: must be as long as {self.shape}")
        if self.count > MAX_ELEMENTS:
            raise SchemaError(f"parameter {self.name!r}: shape = {self.shape}: more than {MAX_ELEMENTS} elements")
        if self.dtype not in ITEM_BYTES:
            raise SchemaError(f"parameter {self.name!r}: dtype = {self.dtype}: must be one of {', '.join(ITEM_BYTES)}")
        if type(self.home) is not int or self.home < -1:
            raise SchemaError(f"parameter {self.name!r}: home = {self.home}: must be a shard's number, or -1 for any")
        if type(self.optimizer) is not int or self.optimizer < 0:
            raise SchemaError(f"parameter {self.name!r}: optimizer = {self.optimizer}: must be an optimizer's number")
        if not all(type(n) is int and n >= 0 for n in self.owners) or list(self.owners) != sorted(set(self.owners)):
            raise SchemaError(f"parameter {self.name!r}: owners = {self.owners}: must be workers' numbers, ascending")

    @property
    def count(self) -> int:
        """Number of elements; 1 for a zero-dimensional parameter."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.count * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Space:
    """All parameters of one dtype, one optimizer and the same owners, laid end to end.

    Each parameter starts at a multiple of ALIGN. `length` counts elements, with padding. `owners` and `optimizer` as in
    `Parameter`.
    """

    index: int
    dtype: str
    itemsize: int
    length: int
    owners: tuple[int, ...] = ()
    optimizer: int = 0

    def on(self, worker: int) -> bool:
        """Whether worker number `worker` of a group holds the space."""
        return not self.owners or worker in self.owners

    @property
    def sending_worker(self) -> int:
        """The worker of a group that sends messages that only one may send."""
        return self.owners[0] if self.owners else 0


@dataclass(frozen=True, slots=True)
class Segment:
    """The intersection of a slice and a parameter, the unit of update.

    It has elements [lo, hi) of the space, without padding. `start` is its first element inside the parameter, a
    multiple of ALIGN.
    """

    id: int
    parameter: int  # index in `SliceMap.parameters`
    shard: int
    space: int  # index in `SliceMap.spaces`
    lo: int
    hi: int
    start: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [lo, hi) of a space in a bucket and a segment (ids), without padding."""

    bucket: int
    segment: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """The unit of every message: elements [lo, hi) of one space, padding included.

    `master` is the server group that masters it. `pieces` are its parts without the padding, in order.
    """

    id: int
    shard: int
    space: int
    lo: int
    hi: int
    master: int
    pieces: tuple[Piece, ...]

    def place(self, piece: Piece) -> slice:
        """Return where a piece of this bucket is in a tensor of the bucket."""
        return slice(piece.lo - self.lo, piece.hi - self.lo)


@dataclass(frozen=True)
class SliceMap:
    """The whole map; build it with `cut`.

    Ids are positions in `segments` and `buckets`, both ordered by shard. `offsets[parameter] = (space, first element)`.
    `ranges[space][shard] = (lo, hi)`, padding included.
    """

    parameters: tuple[Parameter, ...]
    spaces: tuple[Space, ...]
    offsets: tuple[tuple[int, int], ...]
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    segments: tuple[Segment, ...]
    buckets: tuple[Bucket, ...]
    shards: int
    groups: int
    slicing: Slicing

    def buckets_of(self, shard: int) -> tuple[Bucket, ...]:
        """Return the buckets of one shard; their ids are consecutive."""
        return self._buckets_by_shard[shard]

    def segments_of(self, shard: int) -> tuple[Segment, ...]:
        """Return the segments of one shard; their ids are consecutive."""
        return self._segments_by_shard[shard]

    def buckets_on(self, worker: int) -> tuple[Bucket, ...]:
        """Return the buckets of the spaces that a worker of each group holds."""
        return tuple(bucket for bucket in self.buckets if self.spaces[bucket.space].on(worker))

    def segments_of_parameter(self, parameter: int) -> tuple[Segment, ...]:
        """Return the segments of a parameter in element order: none if it is empty."""
        return self._segments_by_parameter[parameter]

    def pieces_of(self, segment: int) -> tuple[Piece, ...]:
        """Return the pieces of a segment (an id) in element order."""
        return self._pieces_by_segment[segment]

    @cached_property
    def shard_bytes(self) -> tuple[int, ...]:
        """Bytes of parameters (no padding) on each shard."""
        sizes = [0] * self.shards
        for segment in self.segments:
            sizes[segment.shard] += (segment.hi - segment.lo) * self.spaces[segment.space].itemsize
        return tuple(sizes)

    @property
    def imbalance(self) -> float:
        """Largest shard over the mean, minus one: 0 is perfect, 1 twice the fair share."""
        total = sum(self.shard_bytes)
        return max(self.shard_bytes) * self.shards / total - 1 if total else 0.0

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of schema and cuts, which decide all ids and boundaries."""
        cuts = [[b.shard, b.space, b.lo, b.hi, b.master] for b in self.buckets]
        # All that decides a boundary: processes of two versions must not agree by accident.
        text = json.dumps([ALIGN, self.shards, self.groups, self.slicing.value, self.offsets, self.ranges, cuts])
        return sha256(f"{describe(self.parameters)}\n{text}".encode()).hexdigest()

    @cached_property
    def _buckets_by_shard(self) -> tuple[tuple[Bucket, ...], ...]:
        return _grouped(((bucket.shard, bucket) for bucket in self.buckets), self.shards)

    @cached_property
    def _segments_by_shard(self) -> tuple[tuple[Segment, ...], ...]:
        return _grouped(((segment.shard, segment) for segment in self.segments), self.shards)

    @cached_property
    def _segments_by_parameter(self) -> tuple[tuple[Segment, ...], ...]:
        return _grouped(((segment.parameter, segment) for segment in self.segments), len(self.parameters))

    @cached_property
    def _pieces_by_segment(self) -> tuple[tuple[Piece, ...], ...]:
        pieces = ((piece.segment, piece) for bucket in self.buckets for piece in bucket.pieces)
        return _grouped(pieces, len(self.segments))


def cut(
    parameters: Iterable[Parameter],
    shards: int,
    groups: int = 1,
    slicing: Slicing = Slicing.kElement,
    bucket_bytes: int = 1 << 20,
) -> SliceMap:
    """Cut `parameters` over the servers of each server group, into buckets.

    `shards` is the number of servers in each of `groups` server groups. A bucket has at most `bucket_bytes` bytes.

    kElement cuts each space into equal ranges (their lengths differ by at most ALIGN). kTensor keeps tensors whole: the
    largest goes first, to the lightest shard (Graham, 1969), see `imbalance`. A parameter with a `home` is put on that
    shard, and then all tensors stay whole.

    Raises:
        SchemaError: a name is used twice, or a `home` does not exist.
        ValueError: a count is below 1, or a bucket smaller than ALIGN elements.
    """
    schema = tuple(parameters)
    _check_names(schema)
    _check_counts(schema, shards, groups, bucket_bytes)
    _check_homes(schema, shards)
    # One parameter on a chosen shard is enough: a cut through equal ranges would divide it.
    whole = slicing is Slicing.kTensor or any(parameter.home >= 0 for parameter in schema)
    homes = _lightest_first(schema, shards) if whole else [0] * len(schema)
    spaces, offsets = _lay_out(schema, homes)
    ranges = tuple(
        _whole(space, schema, offsets, homes, shards) if whole else _even(0, space.length, shards) for space in spaces
    )
    segments: list[Segment] = []
    buckets: list[Bucket] = []
    placed = [_placed(space, schema, offsets) for space in spaces]
    # Shard by shard, so that the ids of a shard's segments and buckets are consecutive.
    for shard in range(shards):
        for space in spaces:
            lo, hi = ranges[space.index][shard]
            mine = _segments(len(segments), shard, space.index, lo, hi, placed[space.index])
            segments += mine
            buckets += _buckets(len(buckets), shard, space, _sub_ranges(lo, hi, groups, space, bucket_bytes), mine)
    return SliceMap(schema, spaces, offsets, ranges, tuple(segments), tuple(buckets), shards, groups, slicing)


def describe(parameters: Iterable[Parameter]) -> str:
    """Return the schema as one line of JSON; equal schemas give the same text."""
    return json.dumps([_row(parameter) for parameter in parameters], separators=(",", ":"))


def _row(p: Parameter) -> list[Any]:
    # The short form comes first, so that models without owners keep the digests of earlier versions.
    row = [p.name, list(p.shape), list(p.stride), p.dtype, p.trainable, list(p.aliases)]
    if p.optimizer:
        return [*row, p.home, list(p.owners), p.optimizer]
    if p.owners:
        return [*row, p.home, list(p.owners)]
    return [*row, p.home] if p.home >= 0 else row


def parse(text: str) -> tuple[Parameter, ...]:
    """Parse the text of `describe`. Raises SchemaError for any other text."""
    # A schema from a peer is checked, not trusted. Deep nesting gives a RecursionError.
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"schema is not JSON: {error}") from None
    if not isinstance(rows, list):
        raise SchemaError("schema must be a list of parameters")
    parameters = tuple(_parameter(number, row) for number, row in enumerate(rows))
    _check_names(parameters)
    return parameters


def _parameter(number: int, row: Any) -> Parameter:
    kinds = [str, list, list, str, bool, list]
    # Exact types: True is no number here, although bool is a subclass of int.
    if not isinstance(row, list) or [type(value) for value in row] not in (
        kinds,
        [*kinds, int],
        [*kinds, int, list],
        [*kinds, int, list, int],
    ):
        accepted = "must be [name, shape, stride, dtype, trainable, aliases, home?, owners?, optimizer?]"
        raise SchemaError(f"schema entry {number}: {accepted}")
    name, shape, stride, dtype, trainable, aliases, *home = row
    # A schema is written in its shortest form, which names no optimizer 0.
    if len(home) > 2 and home[2] < 1:
        raise SchemaError(f"schema entry {number}: optimizer = {home[2]}: must be at least 1, or left out")
    optimizer = home.pop() if len(home) > 2 else 0
    owners = home.pop() if len(home) > 1 else []
    if not all(type(alias) is str for alias in aliases):
        raise SchemaError(f"schema entry {number}: aliases must be names")
    # `Parameter` checks the values.
    made = Parameter(name, tuple(shape), tuple(stride), dtype, trainable, tuple(aliases), *home)
    return replace(made, owners=tuple(owners), optimizer=optimizer) if owners or optimizer else made


def _check_names(parameters: Sequence[Parameter]) -> None:
    # A name is a key in checkpoints and final files, where one of two tensors would be lost.
    seen: set[str] = set()
    for name in (name for parameter in parameters for name in (parameter.name, *parameter.aliases)):
        if name in seen:
            raise SchemaError(f"parameter name {name!r} is used twice: tied weights are one parameter with aliases")
        seen.add(name)


def _check_counts(parameters: Sequence[Parameter], shards: int, groups: int, bucket_bytes: int) -> None:
    # A bucket has at least one unit of alignment.
    least = ALIGN * max((ITEM_BYTES[parameter.dtype] for parameter in parameters), default=1)
    for name, value, minimum in (("shards", shards, 1), ("groups", groups, 1), ("bucket_bytes", bucket_bytes, least)):
        if value < minimum:
            raise ValueError(f"{name} = {value}: must be a whole number >= {minimum}")


def _check_homes(parameters: Sequence[Parameter], shards: int) -> None:
    for parameter in parameters:
        if parameter.home >= shards:
            accepted = f"must be 0 to {shards - 1}: the job has {shards} server{'s' * (shards > 1)} in a group"
            raise SchemaError(f"parameter {parameter.name!r}: home = {parameter.home}: {accepted}")


def _padded(count: int) -> int:
    # Each parameter begins at an aligned element, so that no two share a cache line or a vector.
    return -(-count // ALIGN) * ALIGN


def _even(lo: int, hi: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Cut [lo, hi) into ranges that differ by at most ALIGN.

    Both bounds and all cuts are multiples of ALIGN.
    """
    units = (hi - lo) // ALIGN
    # Whole numbers only, so every process gets the same cuts.
    return tuple(pairwise(lo + ALIGN * (units * k // parts) for k in range(parts + 1)))


def _lightest_first(parameters: Sequence[Parameter], shards: int) -> list[int]:
    """Return the shard of each parameter: its home, else the lightest shard."""
    sizes = [parameter.nbytes for parameter in parameters]
    homes = [max(parameter.home, 0) for parameter in parameters]
    fixed = [0] * shards
    for parameter, size in zip(parameters, sizes, strict=True):
        if parameter.home >= 0:
            fixed[parameter.home] += size
    # Equal loads are ordered by shard, so every process chooses alike.
    loads = [(load, shard) for shard, load in enumerate(fixed)]
    heapq.heapify(loads)
    free = [index for index, parameter in enumerate(parameters) if parameter.home < 0]
    # The largest first. The index breaks ties, so every process has the same order.
    for index in sorted(free, key=lambda i: (-sizes[i], i)):
        load, homes[index] = loads[0]
        heapq.heapreplace(loads, (load + sizes[index], homes[index]))
    return homes


def _lay_out(
    parameters: Sequence[Parameter], homes: Sequence[int]
) -> tuple[tuple[Space, ...], tuple[tuple[int, int], ...]]:
    """Return spaces in order of first use, and each parameter's (space, offset)."""
    kinds = list(dict.fromkeys((parameter.dtype, parameter.owners, parameter.optimizer) for parameter in parameters))
    number = {kind: index for index, kind in enumerate(kinds)}
    lengths = [0] * len(kinds)
    offsets = [(0, 0)] * len(parameters)
    # By shard, so that each shard is one range. The sort is stable: inside a shard the order of definition stays, which
    # is mostly that of the forward.
    for index in sorted(range(len(parameters)), key=homes.__getitem__):
        space = number[parameters[index].dtype, parameters[index].owners, parameters[index].optimizer]
        offsets[index] = (space, lengths[space])
        lengths[space] += _padded(parameters[index].count)
    spaces = (Space(n, kind[0], ITEM_BYTES[kind[0]], lengths[n], *kind[1:]) for n, kind in enumerate(kinds))
    return tuple(spaces), tuple(offsets)


def _whole(
    space: Space,
    parameters: Sequence[Parameter],
    offsets: Sequence[tuple[int, int]],
    homes: Sequence[int],
    shards: int,
) -> tuple[tuple[int, int], ...]:
    """Return ranges of whole tensors; `_lay_out` has put each shard's side by side."""
    sizes = [0] * shards
    for parameter, (where, _), home in zip(parameters, offsets, homes, strict=True):
        if where == space.index:
            sizes[home] += _padded(parameter.count)
    return tuple(pairwise(accumulate(sizes, initial=0)))


def _placed(
    space: Space, parameters: Sequence[Parameter], offsets: Sequence[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """Return (first element, end without padding, parameter) of a space, in order."""
    # Without empty parameters: two of them could begin at the same element.
    here = (index for index, (where, _) in enumerate(offsets) if where == space.index and parameters[index].count)
    return sorted((offsets[index][1], offsets[index][1] + parameters[index].count, index) for index in here)


def _segments(
    first: int, shard: int, space: int, lo: int, hi: int, placed: Sequence[tuple[int, int, int]]
) -> list[Segment]:
    """Return the segments of one shard in one space, with ids from `first` on."""
    found: list[Segment] = []
    # The last parameter that begins at or before `lo`.
    at = max(0, bisect_right(placed, lo, key=lambda place: place[0]) - 1)
    while at < len(placed) and placed[at][0] < hi:
        begin, end, parameter = placed[at]
        a, b = max(begin, lo), min(end, hi)
        if a < b:
            found.append(Segment(first + len(found), parameter, shard, space, a, b, a - begin))
        at += 1
    return found


def _sub_ranges(lo: int, hi: int, groups: int, space: Space, bucket_bytes: int) -> list[tuple[int, int, int]]:
    """Return (lo, hi, master) of the buckets of one shard in one space."""
    # First among the masters, then into buckets of equal length, so that no small rest is sent alone.
    most = bucket_bytes // (ALIGN * space.itemsize) * ALIGN
    masters = enumerate(_even(lo, hi, groups))
    return [(a, b, master) for master, (c, d) in masters if c < d for a, b in _even(c, d, -(-(d - c) // most))]


def _buckets(
    first: int, shard: int, space: Space, bounds: Sequence[tuple[int, int, int]], segments: Sequence[Segment]
) -> list[Bucket]:
    """Return buckets with their pieces, with ids from `first` on."""
    found: list[Bucket] = []
    at = 0
    for number, (lo, hi, master) in enumerate(bounds, first):
        # Bounds and segments both ascend, so one pass over them is enough.
        while segments[at].hi <= lo:
            at += 1
        pieces: list[Piece] = []
        for segment in segments[at : bisect_right(segments, hi - 1, lo=at, key=lambda s: s.lo)]:
            pieces.append(Piece(number, segment.id, max(lo, segment.lo), min(hi, segment.hi)))
        found.append(Bucket(number, shard, space.index, lo, hi, master, tuple(pieces)))
    return found


def _grouped(items: Iterable[tuple[int, T]], count: int) -> tuple[tuple[T, ...], ...]:
    groups: list[list[T]] = [[] for _ in range(count)]
    for index, item in items:
        groups[index].append(item)
    return tuple(tuple(group) for group in groups)
