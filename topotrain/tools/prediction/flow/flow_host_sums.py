"""The messages of a step with sums of hosts.

Units add up the gradients of their workers before the link.
"""

from collections.abc import Iterator, Sequence

from topotrain.config.job import Apply, Grads, Job
from topotrain.config.topology import Topology
from topotrain.extensions.host_sums.host_sum_messages import (
    HostBackwardEnd,
    HostCommit,
    HostGradient,
    HostMean,
    HostPush,
    HostStepEnd,
    HostValues,
)
from topotrain.extensions.host_sums.host_units import HostUnit
from topotrain.extensions.host_sums.sum_writer import HostSumSettings
from topotrain.tools.prediction.flow import flow_frames as frames
from topotrain.tools.prediction.flow.flow_frames import NOTHING, BucketShape, BucketShapes, Parcel, framed, total
from topotrain.tools.prediction.flow.flow_routes import Flow, Route, server, workers
from topotrain.tools.prediction.flow.flow_votes import commit_to


def host_sum_routes(
    job: Job,
    topology: Topology,
    shapes: BucketShapes,
    group: int,
    units: Sequence[HostUnit],
    samples: Sequence[int],
) -> Iterator[Route]:
    """The messages of the workers of a group, in both directions.

    These units send sums of gradients to servers of other hosts. samples: of a step, for each worker of a group.
    """
    sg = topology.server_group_of(group)
    summed = {index for unit in units for index in unit.workers}
    alone = tuple(index for index in range(topology.workers_per_group) if index not in summed)
    for shard in range(topology.shards):
        held = shapes.of_shard(shard)
        near = [unit for unit in units if shard not in unit.shards]
        direct = (*alone, *(index for unit in near for index in unit.workers))
        small, back = _between_all(job, held)
        everyone = workers((group,), range(topology.workers_per_group))
        yield Flow(everyone, server(sg, shard), small)
        yield Flow(server(sg, shard), everyone, back)
        large, replies = _bodies(job, held)
        if direct:
            yield Flow(workers((group,), direct), server(sg, shard), large)
            yield Flow(server(sg, shard), workers((group,), direct), replies)
        for unit in units:
            if shard in unit.shards:
                yield from _over_lead(job, unit, sg, shard, held, samples)
    for unit in units:
        yield from _ends(job, unit, len(shapes.all))


def _ends_backwards(job: Job) -> bool:
    return job.grads is Grads.kVisible or job.apply is Apply.kOnArrival


def _sees_means(job: Job) -> bool:
    return job.grads is Grads.kVisible


def _between_all(job: Job, held: Sequence[BucketShape]) -> tuple[Parcel, Parcel]:
    """The parcels that each worker itself sends to a server, and gets.

    They have no bodies.
    """
    sent, back = commit_to(held), frames.APPLIED
    if _ends_backwards(job):
        sent += frames.backward_end(len(held))
    if _sees_means(job):
        back += frames.backward_reduced(len(held))
    return sent, back


def _bodies(job: Job, held: Sequence[BucketShape]) -> tuple[Parcel, Parcel]:
    """The further parcels that a worker sends to a server of its host, and gets."""
    sent, back = total([frames.push(shape) for shape in held]), total([frames.values(shape) for shape in held])
    if _sees_means(job):
        back += total([frames.mean(shape) for shape in held])
    return sent, back


def _over_lead(
    job: Job, unit: HostUnit, sg: int, shard: int, held: Sequence[BucketShape], samples: Sequence[int]
) -> Iterator[Route]:
    """Gradients, means and values of one server, over the worker that adds up for it."""
    settings = HostSumSettings.of(job)
    replaces = settings.replaces
    # Gradients with other weights have no plain sum, so the lead passes each of them on (`SumWriter.messages`).
    apart = settings.divide and len({samples[index] for index in unit.workers if samples[index]}) > 1
    pushes = [(index,) for index in unit.workers] if apart else [unit.workers]
    lead = workers((unit.group,), (unit.lead(shard),))
    others = workers((unit.group,), tuple(index for index in unit.workers if index != unit.lead(shard)))
    given, summed, means, shown, values, passed = NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING
    for shape in held:
        present = frames.bits(shape.pieces)
        if shape.trained:
            given += framed(HostGradient(0, 0, 0, 1.0, present), shape.nbytes)
            for these in pushes:
                summed += framed(HostPush(0, 0, 0, 0, 1.0, present, these, (), these if replaces else ()), shape.nbytes)
            if _sees_means(job):
                means += frames.mean(shape)
                shown += framed(HostMean(shard, 0, 0, 0, present), shape.nbytes)
        values += framed(HostValues(shard, 0, 0, 0), shape.nbytes)
        passed += framed(HostValues(shard, 0, 0, 0), shape.nbytes)
    if replaces:
        given += framed(HostCommit(shard, 0, 1.0, True, bytes(len(held))))
        summed += framed(HostStepEnd(0, bytes(len(held))))
    yield Flow(others, lead, given)
    yield Flow(lead, server(sg, shard), summed)
    yield Flow(server(sg, shard), lead, means + values)
    yield Flow(lead, others, shown + passed)


def _ends(job: Job, unit: HostUnit, buckets: int) -> Iterator[Route]:
    """The messages that tell the leads of a unit that a backward has ended.

    Each worker sends one to each other lead of its unit.
    """
    if _ends_backwards(job):
        end = framed(HostBackwardEnd(0, 0, frames.bits(buckets)))
        for lead in sorted({unit.lead(shard) for shard in unit.shards}):
            yield Flow(workers((unit.group,), unit.workers), workers((unit.group,), (lead,)), end)
