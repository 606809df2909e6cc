"""The bytes of the messages of a step.

They come from the product's own messages and their encoding. Nothing here knows how long a message is. Each is made
once with fields of the right length, and encoded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from topotrain.comm.transport.frame import HEADER_BYTES
from topotrain.config.job import Cluster, Compression
from topotrain.config.sharding import Bucket, SliceMap, Space
from topotrain.core import protocol as m
from topotrain.core.protocol import NO_REVISION, Message, encode
from topotrain.extensions.compression.encoded_sizes import encoded_bytes, has_codec, of_replies

_ONE_BATCH = (0, 0, 0)
"""`Commit.marks` of a step that has read one batch, or consecutive ones."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """Messages from one process to another.

    Attributes:
        messages: their number; in a mean step this may be a part of one.
        nbytes: with headers.
        payload: the bytes of tensors among them.
    """

    messages: float = 0.0
    nbytes: float = 0.0
    payload: float = 0.0

    def __add__(self, other: "Parcel") -> "Parcel":
        return Parcel(self.messages + other.messages, self.nbytes + other.nbytes, self.payload + other.payload)

    def times(self, factor: float) -> "Parcel":
        """Return so many of these parcels."""
        return Parcel(self.messages * factor, self.nbytes * factor, self.payload * factor)


NOTHING = Parcel()


def total(parcels: Sequence[Parcel]) -> Parcel:
    """Return all of these as one parcel."""
    return Parcel(
        sum(each.messages for each in parcels),
        sum(each.nbytes for each in parcels),
        sum(each.payload for each in parcels),
    )


def framed(message: Message, body: int = 0) -> Parcel:
    """Return a message as it travels, with a tensor of so many bytes."""
    _, meta = encode(message)
    return Parcel(1.0, float(HEADER_BYTES + len(meta) + body), float(body))


def bits(count: int) -> bytes:
    """Return a bitmap over so many items."""
    return m.int_to_bits(0, count)


@dataclass(frozen=True, slots=True)
class BucketShape:
    """The facts of a bucket that determine the bytes of its messages.

    Attributes:
        pushed, mean, values: bytes of its gradient, of the group's mean, and of its new values, as they travel.
        nbytes: of its elements.
        elements: with padding.
        pieces: of parameters.
        trained: whether some parameter in it has a gradient.
        fragment: the number of the optimizer that updates it.
    """

    pushed: int
    mean: int
    values: int
    nbytes: int
    elements: int
    pieces: int
    trained: bool
    fragment: int


class BucketShapes:
    """The shapes of all buckets of a model.

    Args:
        slice_map: of the model.
        cluster: says how bodies are encoded.
    """

    def __init__(self, slice_map: SliceMap, cluster: Cluster) -> None:
        self.map = slice_map
        # A worker with an optimizer of its own pushes what has changed, and not what has a gradient.
        self._pushes_all = cluster.outer is not None
        self._kind, self._ratio = cluster.compression, cluster.compression_ratio
        self._replies = of_replies(cluster.compression)
        # Workers that change their parameters themselves cannot add differences to them.
        differences = cluster.n_push == cluster.n_fetch == 1
        self._values = self._replies if differences else Compression.kNone
        self.all = tuple(self._shape(bucket) for bucket in slice_map.buckets)
        """By number of the bucket."""

    def _shape(self, bucket: Bucket) -> BucketShape:
        slice_map, count, space = self.map, bucket.hi - bucket.lo, self.map.spaces[bucket.space]
        trained = self._pushes_all or any(
            slice_map.parameters[slice_map.segments[piece.segment].parameter].trainable for piece in bucket.pieces
        )
        size = count * space.itemsize
        pushed, mean, values = (self._body(kind, space, count) for kind in (self._kind, self._replies, self._values))
        return BucketShape(pushed, mean, values, size, count, len(bucket.pieces), trained, space.optimizer)

    def _body(self, kind: Compression, space: Space, count: int) -> int:
        """Return the bytes of so many elements as they travel."""
        if has_codec(kind, space.dtype):
            return encoded_bytes(kind, count, self._ratio)
        return count * space.itemsize

    def of_shard(self, shard: int) -> tuple[BucketShape, ...]:
        """The shapes of one server's buckets."""
        return tuple(self.all[bucket.id] for bucket in self.map.buckets_of(shard))


# --- the messages of one server's buckets ----------------------------------------------------------------------------
#
# Servers with equal buckets have equal messages, and thousands of servers have few kinds of buckets.


@lru_cache(maxsize=4096)
def push(shape: BucketShape) -> Parcel:
    """A worker's gradient of a bucket."""
    return framed(m.Push(0, 0, 0, 1.0, bits(shape.pieces)), shape.pushed) if shape.trained else NOTHING


@lru_cache(maxsize=4096)
def mean(shape: BucketShape) -> Parcel:
    """The group's mean of a bucket."""
    return framed(m.ReducedGradient(0, 0, 0, bits(shape.pieces)), shape.mean) if shape.trained else NOTHING


@lru_cache(maxsize=4096)
def values(shape: BucketShape) -> Parcel:
    """New values of a bucket."""
    return framed(m.Values(0, 0, 0), shape.values)


@lru_cache(maxsize=4096)
def override(shape: BucketShape) -> Parcel:
    """A bucket's gradient as the script has left it."""
    return framed(m.GradientOverride(0, 0), shape.nbytes) if shape.trained else NOTHING


@lru_cache(maxsize=1024)
def backward_end(buckets: int) -> Parcel:
    """The end of a worker's backward."""
    return framed(m.BackwardEnd(0, 0, 1.0, bits(buckets)))


@lru_cache(maxsize=1024)
def backward_reduced(buckets: int) -> Parcel:
    """The end of a reduction."""
    return framed(m.BackwardReduced(0, 0, bits(buckets)))


@lru_cache(maxsize=1024)
def commit(revisions: int, pieces: int) -> Parcel:
    """A worker's commit."""
    marks = bytes((NO_REVISION,)) * revisions
    return framed(m.Commit(0, 1, 1.0, 1.0, False, 0.0, 2.0, True, marks, bits(pieces), bits(pieces), b"", _ONE_BATCH))


APPLIED = framed(m.Applied(0, 0, 0, False, -1.0))
VOTE = framed(m.StepVote(0, 0, True, 0.0, False, 0))
DECISION = framed(m.StepDecision(0, 0, 0, False, 0.0))
FETCH = framed(m.Fetch(0))
