"""The worker of a group that sends the values of an assigned bucket."""

from topotrain.config.sharding import Bucket, SliceMap


def sender_of(slice_map: SliceMap, bucket: Bucket) -> int:
    """Return the index of the worker that decides on a bucket's new values, and sends them.

    It is the first one that holds the bucket, as in a broadcast from rank 0. The workers of a group may draw other
    random numbers, so their values need not be the same.
    """
    owners = slice_map.spaces[bucket.space].owners
    return owners[0] if owners else 0
