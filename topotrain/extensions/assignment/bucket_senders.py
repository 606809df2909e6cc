"""The worker of a group that sends the values of an assigned bucket."""

from topotrain.config.sharding import Bucket, SliceMap


def sender_of(slice_map: SliceMap, bucket: Bucket, workers: int) -> int:
    """Return the index of the worker that sends a bucket's new values.

    All workers that hold the bucket have the same values. The buckets are divided among them.
    """
    owners = slice_map.spaces[bucket.space].owners or range(workers)
    return owners[bucket.id % len(owners)]
