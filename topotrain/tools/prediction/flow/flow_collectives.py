"""The messages of a step with a collective between servers.

Gradients are added up on their way from server to server. The trees are those of `collectives.algorithms`. Each worker
speaks to the server beside it, and commits to all.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from topotrain.config.job import Algorithm, Apply, Grads, Job
from topotrain.config.topology import Topology
from topotrain.extensions.collectives.algorithms import VALUES, center, up
from topotrain.extensions.collectives.algorithms import down as down_from
from topotrain.extensions.collectives.collective_messages import CollectivePart
from topotrain.tools.prediction.flow import flow_frames as frames
from topotrain.tools.prediction.flow.flow_frames import BucketShape, BucketShapes, Parcel, framed, total
from topotrain.tools.prediction.flow.flow_routes import CollectiveTrees, Flow, Route, TreeFlow, server, workers
from topotrain.tools.prediction.flow.flow_votes import commit_to, vote_routes


def collective_routes(job: Job, topology: Topology, shapes: BucketShapes) -> Iterator[Route]:
    """All that is sent in a step."""
    size, algorithm = topology.shards, job.cluster.algorithm
    visible = job.grads is Grads.kVisible
    held = [shapes.of_shard(shard) for shard in range(size)]
    everyone = workers((0,), range(size))
    for shard in range(size):
        replies = frames.APPLIED
        if algorithm is Algorithm.kNaive:
            # Each server sends its values to all workers itself.
            replies += total([frames.values(shape) for shape in held[shard]])
        yield Flow(everyone, server(0, shard), commit_to(held[shard]))
        yield Flow(server(0, shard), everyone, replies)
    yield from _beside(job, shapes, held, visible)
    yield from vote_routes(topology, 0, 1.0)
    parts = [total([_part(shape) for shape in each]) for each in held]
    yield TreeFlow(trees_of(up(algorithm, size, 0), algorithm), parts, True, size)
    back = trees_of(down_from(algorithm, size, 0), algorithm)
    if visible:
        yield TreeFlow(back, parts, False, size)
    else:
        yield from _means_to_shards(algorithm, parts)
    if algorithm is not Algorithm.kNaive:
        yield TreeFlow(back, [total([_values(shape) for shape in each]) for each in held], False, size)


def _beside(job: Job, shapes: BucketShapes, held: Sequence[Sequence[BucketShape]], visible: bool) -> Iterator[Route]:
    """Between each worker and the server beside it: what it sends to no other server."""
    whole = shapes.all
    sent, received = total([frames.push(shape) for shape in whole]), frames.NOTHING
    if visible or job.apply is Apply.kOnArrival:
        sent += frames.backward_end(len(whole))
    if visible:
        received += total([frames.mean(shape) for shape in whole]) + frames.backward_reduced(len(whole))
    if job.cluster.algorithm is not Algorithm.kNaive:
        received += total([frames.values(shape) for shape in whole])
    for shard, buckets in enumerate(held):
        # Its commit names the pushes of the whole model.
        pieces = sum(shape.pieces for shape in buckets)
        longer = frames.commit(len(whole), pieces).nbytes - frames.commit(len(buckets), pieces).nbytes
        own = sent + Parcel(0.0, longer)
        if visible:
            # No server has seen the means, so each worker hands in those of the part of its server.
            own += total([frames.override(shape) for shape in buckets])
        yield Flow(workers((0,), (shard,)), server(0, shard), own)
        yield Flow(server(0, shard), workers((0,), (shard,)), received)


def _means_to_shards(algorithm: Algorithm, parts: Sequence[Parcel]) -> Iterator[Route]:
    """Means that only the server of a bucket needs.

    None travels, unless the center is another rank.
    """
    for shard, parcel in enumerate(parts):
        if center(algorithm, shard) != shard:
            yield Flow(server(0, center(algorithm, shard)), server(0, shard), parcel)


@lru_cache(maxsize=4096)
def _part(shape: BucketShape) -> Parcel:
    """A part of the sum of a bucket, or its mean.

    Without a gradient it tells that no part is missing.
    """
    return _hop(0, shape.pieces, shape.nbytes if shape.trained else 0)


@lru_cache(maxsize=4096)
def _values(shape: BucketShape) -> Parcel:
    return _hop(VALUES, 0, shape.nbytes)


def _hop(ordinal: int, pieces: int, body: int) -> Parcel:
    return framed(CollectivePart(0, ordinal, 0, True, 1.0, 1, 1.0, frames.bits(pieces), 0), body)


def trees_of(first: Sequence[int], algorithm: Algorithm) -> CollectiveTrees:
    """Return the trees of all homes.

    first: the parent of each rank in the tree of home 0.
    """
    turned = center(algorithm, len(first) - 1) != center(algorithm, 0)
    return CollectiveTrees(np.array(first, dtype=np.int64), turned)


def depth(algorithm: Algorithm, size: int) -> int:
    """Return the number of hops from the farthest rank to the center of a home."""
    parents = up(algorithm, size, 0)
    hops = [-1] * size
    for start in range(size):
        path = []
        rank = start
        while hops[rank] < 0 and parents[rank] != rank:
            path.append(rank)
            rank = parents[rank]
        known = max(hops[rank], 0)
        hops[rank] = known
        for behind, each in enumerate(reversed(path), 1):
            hops[each] = known + behind
    return max(hops)
