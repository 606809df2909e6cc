"""The description of a model, and the flat buffers of one shard."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from topotrain.config.job import Grads, Job, Slicing
from topotrain.config.sharding import Bucket, Parameter, SchemaError, Segment, SliceMap, cut, describe, parse
from topotrain.config.slice_size import slice_bytes
from topotrain.config.topology import Topology
from topotrain.core.protocol import MAX_TEXT, ProtocolError, SchemaPart


class BufferMemory(Protocol):
    """Where flat buffers are: in private memory, or in memory that transports share."""

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros, 1-D."""
        ...


class PrivateMemory:
    """Memory of this process alone."""

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros, 1-D."""
        return torch.zeros(numel, dtype=dtype)


MAX_SCHEMA_PARTS = 1024
MOST_BYTES, MOST_BUCKETS = 1 << 40, 1 << 20
"""Limits of a model. A larger description would fill a server's memory."""

COMPILED = "_orig_mod"
"""The name under which a module of torch.compile holds the module that it wraps."""


def plain_name(name: str) -> str:
    """The name of a parameter, a buffer or a module as it is without torch.compile."""
    return name.replace(f"{COMPILED}.", "")


@dataclass(frozen=True, slots=True)
class ModelBuffer:
    """A buffer of the model that is not a parameter, such as BatchNorm statistics.

    `dtype` is torch's name. `owners` are the workers of each group that hold it, as in `sharding.Parameter`.
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
    def sending_worker(self) -> int:
        """The worker of a group that sends it to the servers."""
        return self.owners[0] if self.owners else 0


@dataclass(frozen=True, slots=True)
class Schema:
    """The model and its optimizer, which all processes of the job must agree on."""

    parameters: tuple[Parameter, ...]
    buffers: tuple[ModelBuffer, ...]
    optimizer: str
    digest: str

    def parts(self) -> list[SchemaPart]:
        """Return the description as messages."""
        text = self.text()
        # A quarter, because a character has up to four bytes in UTF-8 and the limit is in bytes.
        cuts = [text[i : i + MAX_TEXT // 4] for i in range(0, len(text), MAX_TEXT // 4)]
        return [SchemaPart(i, len(cuts), part) for i, part in enumerate(cuts)]

    def text(self) -> str:
        """Return the description as one JSON text."""
        buffers = [[b.name, b.dtype, b.count, *([list(b.owners)] if b.owners else [])] for b in self.buffers]
        return json.dumps([describe(self.parameters), buffers, self.optimizer, self.digest])


def parse_schema(text: str) -> Schema:
    """Read a `Schema.text`. Raises ProtocolError for other texts and too large models."""
    try:
        parameters, buffers, optimizer, digest = json.loads(text)
        known = tuple(_buffer(*row) for row in buffers)
        schema = Schema(parse(parameters), known, str(optimizer), str(digest))
        _check_sizes(schema)
        return schema
    except (ValueError, TypeError, OverflowError, RecursionError, SchemaError) as error:
        raise ProtocolError(f"not the description of a model: {error}") from error


def _check_sizes(schema: Schema) -> None:
    # First, since negative sizes would make room for others in the sum.
    if min((buffer.count for buffer in schema.buffers), default=0) < 0:
        raise SchemaError("a buffer with a negative number of elements")
    nbytes = sum(buffer.nbytes for buffer in schema.buffers)
    nbytes += sum(p.count * torch_dtype(p.dtype).itemsize for p in schema.parameters)
    if nbytes > MOST_BYTES:
        raise SchemaError(f"a model of {nbytes} bytes: must have at most {MOST_BYTES}")


def _buffer(name: object, dtype: object, count: Any, owners: Sequence[Any] = ()) -> ModelBuffer:
    return ModelBuffer(str(name), str(dtype), int(count), tuple(map(int, owners)))


def difference(mine: Schema, theirs: Schema, me: str, them: str) -> str:
    """Return the first difference of two descriptions in words, or ""."""
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
    more = ("" if item.trainable else ", frozen") + (f", stored on server {item.home}" if item.home >= 0 else "")
    return f"{item.name} of shape {item.shape}, {item.dtype}{more}{_held(item.owners)}"


def _held(owners: tuple[int, ...]) -> str:
    if not owners:
        return ""
    return f", held by worker{'s' * (len(owners) > 1)} {' and '.join(map(str, owners))}"


def torch_dtype(name: str) -> torch.dtype:
    """Return torch.float32 for "float32". Raises ProtocolError for another name."""
    # The name comes from a peer, and torch has attributes that are no dtypes.
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(f"{name!r} is not a dtype")
    return dtype


class SchemaParts:
    """Assembles a description from its parts, in any order."""

    def __init__(self) -> None:
        self._parts: dict[int, str] = {}
        self._count = 0

    def take(self, message: SchemaPart) -> Schema | None:
        """Keep a part. Returns the description when it is complete."""
        if not 0 <= message.part < message.parts <= MAX_SCHEMA_PARTS:
            raise ProtocolError(f"part {message.part} of {message.parts} of a model's description")
        # Parts of two different descriptions must not be joined.
        if self._count not in (0, message.parts):
            raise ProtocolError(f"a model's description of {self._count} parts, and of {message.parts}")
        self._count = message.parts
        self._parts[message.part] = message.text
        if len(self._parts) < message.parts:
            return None
        return parse_schema("".join(self._parts[i] for i in range(message.parts)))

    def state_dict(self) -> dict[str, Any]:
        return {"parts": self._parts, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._parts, self._count = dict(state["parts"]), state["count"]


class FlatBuffers:
    """Named flat buffers over a range of every space, and views of buckets in them.

    Args:
        slice_map: the slice map of the model.
        shard: the shard of the ranges. None: the whole of every space (a worker's buffers).
        memory: where the buffers are.
    """

    def __init__(self, slice_map: SliceMap, shard: int | None, memory: BufferMemory) -> None:
        self._map = slice_map
        self._shard = shard
        self._memory = memory
        self._flat: dict[tuple[str, int], torch.Tensor] = {}
        self._views: dict[tuple[str, int], torch.Tensor] = {}

    def of_shard(self, shard: int) -> "FlatBuffers":
        """Return other buffers, for one shard of the model, in the same memory."""
        return FlatBuffers(self._map, shard, self._memory)

    def range(self, space: int) -> tuple[int, int]:
        """Return the range of elements of a space that these buffers hold."""
        if self._shard is None:
            return 0, self._map.spaces[space].length
        return self._map.ranges[space][self._shard]

    def flat(self, name: str, space: int) -> torch.Tensor:
        """Return the buffer of a name in a space. It is allocated and zeroed at first use."""
        # Used again at every step: fresh memory costs several times the copy into it, for its pages must be mapped.
        flat = self._flat.get((name, space))
        if flat is None:
            lo, hi = self.range(space)
            made = self._memory.allocate(hi - lo, torch_dtype(self._map.spaces[space].dtype))
            # `setdefault`, because two reader threads may make the same buffer at a time, and both must use one of
            # them.
            flat = self._flat.setdefault((name, space), made)
        return flat

    def raw(self, name: str, count: int) -> torch.Tensor:
        """Return a buffer of `count` bytes, 1-D uint8, zeroed, that belongs to no space."""
        held = self._flat.get((name, -1))
        return (
            held if held is not None else self._flat.setdefault((name, -1), self._memory.allocate(count, torch.uint8))
        )

    def held(self) -> list[tuple[tuple[str, int], torch.Tensor]]:
        """Return all buffers by name and space (-1: no space)."""
        return list(self._flat.items())

    def put(self, name: str, space: int, flat: torch.Tensor) -> None:
        """Use a given tensor as the buffer of a name. It may replace an earlier buffer."""
        self._flat[(name, space)] = flat
        for bucket in self._map.buckets:
            if bucket.space == space:
                # A view keeps the memory that it was made of.
                self._views.pop((name, bucket.id), None)

    def view(self, name: str, bucket: Bucket) -> torch.Tensor:
        """Return a bucket's part of a buffer, 1-D."""
        # Cached, because slicing a tensor costs more than a dictionary lookup.
        view = self._views.get((name, bucket.id))
        if view is None:
            lo, _ = self.range(bucket.space)
            view = self._views[(name, bucket.id)] = self.flat(name, bucket.space)[bucket.lo - lo : bucket.hi - lo]
        return view

    def segment(self, name: str, segment: Segment) -> torch.Tensor:
        """Return a segment's part of a buffer.

        It is 1-D, or of the parameter's own shape where tensors are kept whole.
        """
        lo, _ = self.range(segment.space)
        flat = self.flat(name, segment.space)[segment.lo - lo : segment.hi - lo]
        if self._map.slicing is not Slicing.kTensor:
            return flat
        parameter = self._map.parameters[segment.parameter]
        return flat.as_strided(parameter.shape, parameter.stride)


def bucket_of(buckets: Sequence[Bucket], number: int) -> Bucket:
    """Return a bucket of a shard. Raises ProtocolError for another's."""
    # The buckets of a shard are consecutive.
    if not buckets or not buckets[0].id <= number <= buckets[-1].id:
        raise ProtocolError(f"bucket {number} is not mine")
    return buckets[number - buckets[0].id]


@dataclass(frozen=True, slots=True)
class BucketValues:
    """The buckets of a shard, and their values in its buffers."""

    flats: FlatBuffers
    buckets: Sequence[Bucket]

    def values(self, number: int) -> torch.Tensor:
        """Return the values of a bucket, 1-D. Raises ProtocolError for another's."""
        return self.flats.view("values", bucket_of(self.buckets, number))


def typed(body: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a body as elements like `like`. Raises ProtocolError for another size."""
    # A body that came as a view of shared memory is bytes. One that was placed has the dtype of its place.
    if body.nbytes != like.nbytes:
        raise ProtocolError(f"a body of {body.nbytes} bytes, expected {like.nbytes}")
    return body if body.dtype == like.dtype else body.view(like.dtype)


def slice_map_for(parameters: Sequence[Parameter], topology: Topology) -> SliceMap:
    """Return the slice map of a job's model, the same for workers and servers.

    Raises:
        SchemaError: as `cut`, or an owner does not exist in a group.
    """
    _check_owners(parameters, topology.workers_per_group)
    groups = topology.server_groups if topology.synced else 1
    size = slice_bytes(topology)
    nbytes = sum(parameter.count * torch_dtype(parameter.dtype).itemsize for parameter in parameters)
    # Before the cut, which would make so many objects.
    if nbytes // size > MOST_BUCKETS:
        raise SchemaError(f"a model of {nbytes} bytes in slices of {size}: must be at most {MOST_BUCKETS}")
    return cut(parameters, topology.shards, groups, topology.cluster.slicing, bucket_bytes=size)


def _check_owners(parameters: Sequence[Parameter], workers: int) -> None:
    for parameter in parameters:
        if parameter.owners and parameter.owners[-1] >= workers:
            accepted = f"must be 0 to {workers - 1}: a group of the job has {workers} worker{'s' * (workers > 1)}"
            raise SchemaError(f"parameter {parameter.name!r}: owners = {parameter.owners}: {accepted}")


def effective(job: Job, parameters: Sequence[Parameter]) -> Job:
    """Return the job as it is carried out on this model. Splitting means `kHidden`."""
    # A worker cannot get the mean of a parameter that it does not hold.
    split = job.splits or any(parameter.owners for parameter in parameters)
    return replace(job, grads=Grads.kHidden) if split and job.grads is Grads.kVisible else job
