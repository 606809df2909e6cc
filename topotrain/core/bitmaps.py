"""Bitmaps as they travel: the buckets, pieces or parameters of a message."""

from collections.abc import Mapping, Sequence

from topotrain.config.sharding import Bucket

NO_REVISION = 255  # in Commit.revisions: this worker has no gradient in the bucket


def bits_to_int(bits: bytes) -> int:
    """A bitmap as it travels -> a Python int, bit i for item i."""
    return int.from_bytes(bits, "little")


def int_to_bits(value: int, count: int) -> bytes:
    """A bitmap over `count` items as it travels."""
    return value.to_bytes((count + 7) // 8, "little")


def per_bucket(buckets: Sequence[Bucket], bits: int) -> list[tuple[Bucket, int]]:
    """A bitmap over the pieces of these buckets as one bitmap per bucket."""
    found = []
    for bucket in buckets:
        found.append((bucket, bits & ((1 << len(bucket.pieces)) - 1)))
        bits >>= len(bucket.pieces)
    return found


def per_piece(buckets: Sequence[Bucket], found: Mapping[int, int]) -> int:
    """One bitmap over the pieces of all buckets: the inverse of `per_bucket`."""
    bits = shift = 0
    for at, bucket in enumerate(buckets):
        bits |= found.get(at, 0) << shift
        shift += len(bucket.pieces)
    return bits
