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
from topotrain.extensions.outer_optimizer.round_messages import OWN_TURN, NextRound, StepTime
from topotrain.extensions.outer_optimizer.rounds import fragments_of
from topotrain.tools.prediction.flow import flow_frames as frames
from topotrain.tools.prediction.flow.flow_frames import BucketShapes, Parcel, framed, total
from topotrain.tools.prediction.flow.flow_routes import Flow, Route, server, workers
from topotrain.tools.prediction.flow.flow_votes import commit_to, vote_routes


def in_fragments(job: Job, schema: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """Return the parameters with the number of their fragment.

    The servers' optimizers have them like this.
    """
    if job.cluster.outer is None or job.cluster.fragments == 1:
        return tuple(schema)
    # The script's optimizer has all parameters, as in a rehearsal.
    found = fragments_of([parameter.nbytes for parameter in schema], job.cluster.fragments)
    return tuple(replace(each, optimizer=number) for each, number in zip(schema, found, strict=True))


def island_routes(job: Job, topology: Topology, shapes: BucketShapes) -> Iterator[Route]:
    """All that is sent in a mean step."""
    cluster, pushes = job.cluster, 1 / job.cluster.local_steps
    everyone = workers(range(topology.worker_groups), (0,))
    for shard in range(topology.shards):
        held = shapes.of_shard(shard)
        # In `sync_freq` steps each fragment is exchanged once.
        sent = total([frames.push(shape) for shape in held]).times(1 / cluster.sync_freq)
        values = total([frames.values(shape) for shape in held]).times(1 / cluster.sync_freq)
        yield Flow(everyone, server(0, shard), sent + commit_to(held).times(pushes))
        yield Flow(server(0, shard), everyone, values + frames.APPLIED.times(pushes))
    yield from vote_routes(topology, 0, topology.worker_groups * pushes)
    told, answered = _about_rounds(job)
    yield Flow(everyone, server(0, 0), told.times(pushes))
    yield Flow(server(0, 0), everyone, answered.times(pushes))


def _about_rounds(job: Job) -> tuple[Parcel, Parcel]:
    """The parcels to the coordinator with a push, and from it after a round."""
    told, answered = Parcel(), Parcel()
    if job.cluster.paces_by_time:
        told += framed(StepTime(1.0))
        answered += framed(NextRound(0, OWN_TURN))
    if has_windows(job.cluster):
        told += framed(ExchangeTime(0, 1.0))
    return told, answered
