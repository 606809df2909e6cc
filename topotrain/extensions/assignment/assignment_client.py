"""A worker's messages about the values that it assigns."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from topotrain.config.sharding import Bucket, SliceMap
from topotrain.core.client.client import Client
from topotrain.core.model.tensor_bits import differing, same_bits
from topotrain.core.protocol import int_to_bits
from topotrain.extensions.assignment.assignment_messages import AssignedBucket, AssignedElements, Assignment


@dataclass(frozen=True, slots=True)
class AssignmentPlace:
    """The place of an assignment in the script; the fields are those of `Assignment`."""

    stream: int
    batch: int
    number: int
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class ChangedBucket:
    """A bucket with changed values.

    Attributes:
        pieces: a bit for each piece that has changed.
        values: the new values of the whole bucket.
        elements: a bit for each element that has changed, packed. None: all elements of the pieces count.
    """

    bucket: Bucket
    pieces: bytes
    values: torch.Tensor
    elements: torch.Tensor | None


def sender_of(slice_map: SliceMap, bucket: Bucket) -> int:
    """Return the index of the worker that decides on a bucket's new values.

    It is the first one that holds the bucket, as in a broadcast from rank 0, and sends them. The workers of a group may
    draw other random numbers, so their values need not be the same.
    """
    owners = slice_map.spaces[bucket.space].owners
    return owners[0] if owners else 0


def changed_bucket(
    bucket: Bucket, pieces: Iterable[int], new: torch.Tensor, old: torch.Tensor, apart: bool
) -> ChangedBucket | None:
    """Compare these pieces of a bucket bit by bit; None: nothing has changed.

    apart: other groups change the values meanwhile, so the elements are compared one by one.
    """
    places = {i: bucket.place(bucket.pieces[i]) for i in pieces}
    found = [i for i, place in places.items() if not same_bits(new[place], old[place])]
    if not found:
        return None
    elements = None
    if apart:
        mask = torch.zeros(bucket.hi - bucket.lo, dtype=torch.bool)
        for i in found:
            mask[places[i]] = differing(new[places[i]], old[places[i]])
        elements = torch.from_numpy(np.packbits(mask.numpy(), bitorder="little"))
    return ChangedBucket(bucket, int_to_bits(sum(1 << i for i in found), len(bucket.pieces)), new, elements)


def decided_by(client: Client) -> Iterator[Bucket]:
    """Yield the buckets on which this worker decides."""
    return (bucket for bucket in client.model.held if sender_of(client.model.map, bucket) == client.channel.me.index)


def send_assignment(
    client: Client, step: int, place: AssignmentPlace, changed: Iterable[ChangedBucket], follows_step: bool
) -> None:
    """Send an assignment, which the commit of this step carries out."""
    counts = dict.fromkeys(client.channel.servers, 0)
    for one in changed:
        server, bucket = client.model.server_of(one.bucket), one.bucket.id
        counts[server] += 1
        masked = one.elements is not None
        client.channel.send(server, AssignedBucket(step, bucket, one.pieces, masked, body=one.values))
        if masked:
            client.channel.send(server, AssignedElements(step, bucket, body=one.elements))
    for server, count in counts.items():
        head = Assignment(step, count, place.stream, place.batch, place.number, follows_step, place.repeated)
        client.channel.send(server, head)
