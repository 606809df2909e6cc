"""What a server is home to: the model's description, and one shard's flat buffers with views of each bucket.

Buffers are allocated once, by name, and reused at every step: fresh memory costs several times the copy. Where they
lie (ordinary memory, or memory shared with the workers of the host) is decided by whoever gives `allocate`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from topotrain.config.job import Grads, Job, Slicing
from topotrain.config.sharding import Bucket, Parameter, SchemaError, Segment, SliceMap, cut, describe, parse
from topotrain.config.topology import Topology
from topotrain.core.protocol import MAX_TEXT, ProtocolError, SchemaPart

Allocate = Callable[[int, torch.dtype], torch.Tensor]

MAX_SCHEMA_PARTS = 1024
MOST_BYTES, MOST_BUCKETS = 1 << 40, 1 << 20
"""Of a model: beyond this its description alone would fill a server's memory."""
SENT_BYTES, SLOW_BYTES = 1 << 20, 1 << 16
SEEN_BYTES = 1 << 22
"""Most bytes of a bucket: one that travels, on a slow link, and one that residents of a host see in shared memory.

What several workers send is complete only when the last one's part is there, and until the first bucket is, nothing can
come back: on a slow link, where a megabyte takes a tenth of a second, that wait decides the speed.
"""


@dataclass(frozen=True, slots=True)
class ModelBuffer:
    """A model buffer that is no parameter (BatchNorm statistics): `count` elements of `dtype` (torch's name).

    `owners` as in `sharding.Parameter`: the workers of each group that hold it; empty: all do.
    """

    name: str
    dtype: str
    count: int
    owners: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * torch_dtype(self.dtype).itemsize

    @property
    def speaker(self) -> int:
        """The worker of a group who leaves it at the servers."""
        return self.owners[0] if self.owners else 0


@dataclass(frozen=True, slots=True)
class Schema:
    """The model and its optimizer as every process of the job must see them."""

    parameters: tuple[Parameter, ...]
    buffers: tuple[ModelBuffer, ...]
    optimizer: str
    digest: str

    def parts(self) -> list[SchemaPart]:
        """The description as messages."""
        text = self.text()
        cuts = [text[i : i + MAX_TEXT // 4] for i in range(0, len(text), MAX_TEXT // 4)]
        return [SchemaPart(i, len(cuts), part) for i, part in enumerate(cuts)]

    def text(self) -> str:
        """One JSON text."""
        buffers = [[b.name, b.dtype, b.count, *([list(b.owners)] if b.owners else [])] for b in self.buffers]
        return json.dumps([describe(self.parameters), buffers, self.optimizer, self.digest])


def parse_schema(text: str) -> Schema:
    """The inverse of `Schema.text`. Raises ProtocolError."""
    try:
        parameters, buffers, optimizer, digest = json.loads(text)
        known = tuple(_buffer(*row) for row in buffers)
        schema = Schema(parse(parameters), known, str(optimizer), str(digest))
        _check_sizes(schema)
        return schema
    except (ValueError, TypeError, OverflowError, RecursionError, SchemaError) as error:
        raise ProtocolError(f"not the description of a model: {error}") from error


def _check_sizes(schema: Schema) -> None:
    if min((buffer.count for buffer in schema.buffers), default=0) < 0:
        raise SchemaError("a buffer of fewer than no elements")
    nbytes = sum(buffer.nbytes for buffer in schema.buffers)
    nbytes += sum(p.count * torch_dtype(p.dtype).itemsize for p in schema.parameters)
    if nbytes > MOST_BYTES:
        raise SchemaError(f"a model of {nbytes} bytes: must have at most {MOST_BYTES}")


def _buffer(name: object, dtype: object, count: Any, owners: Sequence[Any] = ()) -> ModelBuffer:
    return ModelBuffer(str(name), str(dtype), int(count), tuple(map(int, owners)))


def difference(mine: Schema, theirs: Schema, me: str, them: str) -> str:
    """In words, the first thing in which two descriptions differ; empty if they do not."""
    if mine == theirs:
        return ""
    rows: list[tuple[str, Sequence[Any], Sequence[Any]]] = [
        ("parameter", mine.parameters, theirs.parameters),
        ("buffer", mine.buffers, theirs.buffers),
    ]
    for what, left, right in rows:
        if len(left) != len(right):
            return f"{them} has {len(right)} {what}s, {me} has {len(left)}"
        for a, b in zip(left, right, strict=True):
            if a != b:
                return f"{what} {a.name}: {me} has {_words(a)}, {them} has {_words(b)}"
    if mine.optimizer != theirs.optimizer:
        return f"the optimizers differ: {me} has {mine.optimizer[:300]}, {them} has {theirs.optimizer[:300]}"
    return f"the cuts into slices differ between {me} and {them}"


def _words(item: Parameter | ModelBuffer) -> str:
    if isinstance(item, ModelBuffer):
        return f"{item.name} with {item.count} elements of {item.dtype}{_held(item.owners)}"
    more = ("" if item.trainable else ", frozen") + (f", at home on server {item.home}" if item.home >= 0 else "")
    return f"{item.name} of shape {item.shape}, {item.dtype}{more}{_held(item.owners)}"


def _held(owners: tuple[int, ...]) -> str:
    if not owners:
        return ""
    return f", held by worker{'s' * (len(owners) > 1)} {' and '.join(map(str, owners))}"


def torch_dtype(name: str) -> torch.dtype:
    """torch.float32 for "float32". Raises ProtocolError for a name that is no dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(f"{name!r} is no dtype")
    return dtype


class SchemaParts:
    """Puts the parts of a description together, in whatever order they come."""

    def __init__(self) -> None:
        self._parts: dict[int, str] = {}
        self._count = 0

    def take(self, message: SchemaPart) -> Schema | None:
        """Keep a part; the whole when it is complete."""
        if not 0 <= message.part < message.parts <= MAX_SCHEMA_PARTS:
            raise ProtocolError(f"part {message.part} of {message.parts} of a model's description")
        if self._count not in (0, message.parts):
            raise ProtocolError(f"a model's description of {self._count} parts, and of {message.parts}")
        self._count = message.parts
        self._parts[message.part] = message.text
        if len(self._parts) < message.parts:
            return None
        return parse_schema("".join(self._parts[i] for i in range(message.parts)))


class FlatBuffers:
    """Named flat buffers over a range of every space, and views of a bucket in them.

    Args:
        slice_map: the map.
        shard: whose range; None for the whole of every space (a worker's buffers).
        allocate: allocate(numel, dtype) -> 1-D tensor.
    """

    def __init__(self, slice_map: SliceMap, shard: int | None, allocate: Allocate) -> None:
        self._map = slice_map
        self._shard = shard
        self._allocate = allocate
        self._flat: dict[tuple[str, int], torch.Tensor] = {}
        self._views: dict[tuple[str, int], torch.Tensor] = {}

    def range(self, space: int) -> tuple[int, int]:
        """The elements of a space that this object holds."""
        if self._shard is None:
            return 0, self._map.spaces[space].length
        return self._map.ranges[space][self._shard]

    def flat(self, name: str, space: int) -> torch.Tensor:
        """The buffer of a name in a space; made, and zeroed, when first asked for.

        The readers of several roads may ask at the same time: they must get one and the same buffer.
        """
        flat = self._flat.get((name, space))
        if flat is None:
            lo, hi = self.range(space)
            made = self._allocate(hi - lo, torch_dtype(self._map.spaces[space].dtype))
            flat = self._flat.setdefault((name, space), made)
        return flat

    def raw(self, name: str, count: int) -> torch.Tensor:
        """A buffer of `count` bytes, 1-D uint8, over no space; made, and zeroed, when first asked for."""
        held = self._flat.get((name, -1))
        return held if held is not None else self._flat.setdefault((name, -1), self._allocate(count, torch.uint8))

    def held(self) -> list[tuple[tuple[str, int], torch.Tensor]]:
        """All buffers that were made or given, by name and space (-1: over no space)."""
        return list(self._flat.items())

    def put(self, name: str, space: int, flat: torch.Tensor) -> None:
        """Use a given tensor as the buffer of a name, also in place of one that was used before."""
        self._flat[(name, space)] = flat
        for bucket in self._map.buckets:
            if bucket.space == space:
                self._views.pop((name, bucket.id), None)

    def view(self, name: str, bucket: Bucket) -> torch.Tensor:
        """A bucket's part of a buffer, 1-D. Views are made once: slicing costs more than a dictionary."""
        view = self._views.get((name, bucket.id))
        if view is None:
            lo, _ = self.range(bucket.space)
            view = self._views[(name, bucket.id)] = self.flat(name, bucket.space)[bucket.lo - lo : bucket.hi - lo]
        return view

    def segment(self, name: str, segment: Segment) -> torch.Tensor:
        """A segment's part of a buffer: 1-D, or with the parameter's own shape where tensors are kept whole."""
        lo, _ = self.range(segment.space)
        flat = self.flat(name, segment.space)[segment.lo - lo : segment.hi - lo]
        if self._map.slicing is not Slicing.kTensor:
            return flat
        parameter = self._map.parameters[segment.parameter]
        return flat.as_strided(parameter.shape, parameter.stride)


def typed(body: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A body as it came (bytes where the road shows memory) as elements of `like`'s dtype and size.

    Raises ProtocolError when the sizes differ.
    """
    if body.nbytes != like.nbytes:
        raise ProtocolError(f"a body of {body.nbytes} bytes, expected {like.nbytes}")
    return body if body.dtype == like.dtype else body.view(like.dtype)


def slice_map_for(parameters: Sequence[Parameter], topology: Topology) -> SliceMap:
    """The map of a job's model: workers and servers must compute the same, so both ask here.

    What travels is cut finer than what is only named: a pipeline wants many pieces, a processor few calls. Raises
    SchemaError as `cut` does, and for an owner that no group has.
    """
    _check_owners(parameters, topology.workers_per_group)
    groups = topology.server_groups if topology.synced else 1
    size = topology.cluster.slice_bytes or _slice_bytes(topology)
    nbytes = sum(parameter.count * torch_dtype(parameter.dtype).itemsize for parameter in parameters)
    if nbytes // size > MOST_BUCKETS:
        raise SchemaError(f"a model of {nbytes} bytes in slices of {size}: must be at most {MOST_BUCKETS}")
    return cut(parameters, topology.shards, groups, topology.cluster.slicing, bucket_bytes=size)


def _check_owners(parameters: Sequence[Parameter], workers: int) -> None:
    for parameter in parameters:
        if parameter.owners and parameter.owners[-1] >= workers:
            accepted = f"must be 0 to {workers - 1}: a group of the job has {workers} worker{'s' * (workers > 1)}"
            raise SchemaError(f"parameter {parameter.name!r}: owners = {parameter.owners}: {accepted}")


def effective(job: Job, parameters: Sequence[Parameter]) -> Job:
    """The job as it is carried out on this model.

    Where one model is split over the workers of a group, gradients are pushed home and stay there (`grads: kHidden`):
    nobody could show a worker the mean of what it does not hold.
    """
    split = job.splits or any(parameter.owners for parameter in parameters)
    return replace(job, grads=Grads.kHidden) if split and job.grads is Grads.kVisible else job


def _slice_bytes(topology: Topology) -> int:
    if all(topology.sees_memory(group) for group in range(topology.worker_groups)):
        return SEEN_BYTES
    link = topology.cluster.link
    return SLOW_BYTES if link is not None and link.bandwidth is not None and link.bandwidth <= 1000 else SENT_BYTES
