"""The messages of a mean step of a job with an outer optimizer.

Most steps send nothing to a server. Each fragment is exchanged once in `sync_freq` steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from topotrain.config.job import Job
from topotrain.config.sharding import Parameter
from topotrain.config.topology import Topology
from topotrain.extensions.outer_optimizer.grace.grace_window import has_windows
from topotrain.extensions.outer_optimizer.grace.window_messages import ExchangeTime
from topotrain.extensions.outer_optimizer.groups.group_messages import (
    PeerBackwardEnd,
    PeerGradient,
    PeerMean,
    PeerPause,
)
from topotrain.extensions.outer_optimizer.groups.group_reduction import shares_of
from topotrain.extensions.outer_optimizer.round_messages import OWN_TURN, NextRound, StepTime
from topotrain.extensions.outer_optimizer.rounds import fragments_of
from topotrain.tools.prediction.flow import flow_frames as frames
from topotrain.tools.prediction.flow.flow_frames import BucketShapes, Parcel, framed, total
from topotrain.tools.prediction.flow.flow_routes import Flow, Route, server, workers
from topotrain.tools.prediction.flow.flow_votes import commit_to, vote_routes


def in_fragments(job: Job, schema: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """Return the parameters with the number of their fragment, as the servers' optimizers have them."""
    if job.cluster.outer is None or job.cluster.fragments == 1:
        return tuple(schema)
    trained = [index for index, parameter in enumerate(schema) if parameter.trainable]
    found = fragments_of([schema[index].nbytes for index in trained], job.cluster.fragments)
    number = dict(zip(trained, found, strict=True))
    return tuple(replace(p, optimizer=number[i]) if i in number else p for i, p in enumerate(schema))


def island_routes(job: Job, topology: Topology, shapes: BucketShapes) -> Iterator[Route]:
    """All that is sent in a mean step."""
    cluster, size = job.cluster, topology.workers_per_group
    pushes, groups = 1 / cluster.local_steps, range(topology.worker_groups)
    pusher = _pushers(shapes, cluster.fragments, size)
    for shard in range(topology.shards):
        buckets = shapes.map.buckets_of(shard)
        held = shapes.of_shard(shard)
        # In the steps between two exchanges of a fragment each other one is exchanged once.
        values = total([frames.values(shape) for shape in held]).times(1 / cluster.sync_freq)
        for index in range(size):
            mine = [shapes.all[bucket.id] for bucket in buckets if pusher[bucket.id] == index]
            sent = total([frames.push(shape) for shape in mine]).times(1 / cluster.sync_freq)
            sent += commit_to(held).times(pushes)
            yield Flow(workers(groups, (index,)), server(0, shard), sent)
        yield Flow(server(0, shard), workers(groups, range(size)), values + frames.APPLIED.times(pushes))
    yield from vote_routes(topology, 0, len(groups) * pushes)
    told, answered = _about_rounds(job)
    yield Flow(workers(groups, range(size)), server(0, 0), told.times(pushes))
    yield Flow(server(0, 0), workers(groups, range(size)), answered.times(pushes))
    for group in groups if size > 1 else ():
        yield from _inside(shapes, group, size, pushes)


def _pushers(shapes: BucketShapes, fragments: int, size: int) -> Sequence[int]:
    """Return the worker of a group that pushes each bucket."""
    found = [0] * len(shapes.all)
    for fragment in range(fragments):
        numbers = [number for number, shape in enumerate(shapes.all) if shape.fragment == fragment]
        shares = shares_of([shapes.all[number].nbytes for number in numbers], size)
        for number, index in zip(numbers, shares, strict=True):
            found[number] = index
    return found


def _about_rounds(job: Job) -> tuple[Parcel, Parcel]:
    """What a worker tells the coordinator with a push, and what it gets behind a round."""
    told, answered = Parcel(), Parcel()
    if job.cluster.paces_by_time:
        told += framed(StepTime(1.0))
        answered += framed(NextRound(0, OWN_TURN))
    if has_windows(job.cluster):
        told += framed(ExchangeTime(0, 1.0))
    return told, answered


def _inside(shapes: BucketShapes, group: int, size: int, pushes: float) -> Iterator[Route]:
    """Gradients that the workers of a group add up among themselves, in each step."""
    whole = shapes.all
    adder = shares_of([shape.nbytes for shape in whole], size)
    everyone = workers((group,), range(size))
    for index in range(size):
        mine = [shape for shape, by in zip(whole, adder, strict=True) if by == index and shape.trained]
        parts = total([framed(PeerGradient(0, 0, 1.0, frames.bits(each.pieces)), each.nbytes) for each in mine])
        means = total([framed(PeerMean(0, 0, frames.bits(each.pieces)), each.nbytes) for each in mine])
        yield Flow(everyone, workers((group,), (index,)), parts)
        yield Flow(workers((group,), (index,)), everyone, means)
    end = framed(PeerBackwardEnd(0, 0, 1.0, frames.bits(len(whole)), 0, False, OWN_TURN, 1))
    yield Flow(everyone, everyone, end + framed(PeerPause(0, 0, False)).times(pushes))
