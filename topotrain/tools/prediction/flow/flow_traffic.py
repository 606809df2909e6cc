"""The messages of a mean step of a whole job, by sets of equal processes.

A mean step is one step of each worker. Rarer messages, such as the exchanges of server groups, count in part. Sizes
come from the product's slice map and messages, places from its topology. Here are only senders and receivers, and a
test compares them with the messages of the product's servers and clients.

Data leases, and the begin and the end of a job, belong to no step.
"""

import math
from collections.abc import Iterator, Sequence

from topotrain.config.job import Agreement, Apply, ConfigError, Grads, Job, Pull
from topotrain.config.topology import Topology
from topotrain.core import protocol as m
from topotrain.extensions.group_averaging.averaging_messages import PairTaken
from topotrain.extensions.host_sums.host_units import used_units
from topotrain.tools.prediction.flow import flow_frames as frames
from topotrain.tools.prediction.flow.flow_collectives import collective_routes
from topotrain.tools.prediction.flow.flow_frames import NOTHING, BucketShape, BucketShapes, Parcel, framed, total
from topotrain.tools.prediction.flow.flow_host_sums import host_sum_routes
from topotrain.tools.prediction.flow.flow_islands import island_routes
from topotrain.tools.prediction.flow.flow_routes import Flow, Route, server, servers, workers
from topotrain.tools.prediction.flow.flow_votes import commit_to, vote_routes
from topotrain.tools.prediction.rehearsable import MOST_PROCESSES, check


def refuse_unknown(job: Job, topology: Topology) -> None:
    """Raise ConfigError for a job of which this model does not know the messages."""
    check(job, topology)
    if job.cluster.backup:
        accepted = f"must be 0 in a job of more than {MOST_PROCESSES} workers and servers, or it cannot be predicted"
        raise ConfigError("cluster.backup", job.cluster.backup, accepted)


def step_routes(
    job: Job, topology: Topology, shapes: BucketShapes, samples: Sequence[int], exchanges: bool = True
) -> Sequence[Route]:
    """Return all that is sent in a mean step.

    samples: of a step, for each worker of a group. exchanges: with those of server groups.
    """
    if job.cluster.outer is not None:
        return tuple(island_routes(job, topology, shapes))
    if topology.server_collective:
        return tuple(collective_routes(job, topology, shapes))
    between = _exchange_routes(job, topology, shapes) if exchanges else ()
    return (*_group_routes(job, topology, shapes, samples), *between)


# --- workers and their servers ---------------------------------------------------------------------------------------


def visible(job: Job, topology: Topology) -> bool:
    """Whether workers get means back."""
    return job.grads is Grads.kVisible and topology.workers_per_group > 1


def _group_routes(job: Job, topology: Topology, shapes: BucketShapes, samples: Sequence[int]) -> Iterator[Route]:
    # By shard, because all server groups have equal ones.
    held = [shapes.of_shard(shard) for shard in range(topology.shards)]
    sent = [_sent(job, topology, each) for each in held]
    apart = [_received(job, topology, each) for each in held]
    inside = [_announced(job, topology, each) for each in held]
    for sg in range(topology.server_groups):
        groups = topology.worker_groups_of(sg)
        # Most units have one worker, and to look at each of them and each server would take long.
        several = topology.cluster.nworkers_per_procs > 1
        summed = {group: used_units(job, topology, group) if several else () for group in groups}
        seeing = {group for group in groups if not summed[group] and topology.sees_memory(group)}
        for received, these in ((inside, seeing), (apart, set(groups) - seeing - {g for g in groups if summed[g]})):
            alike = workers(tuple(sorted(these)), range(topology.workers_per_group))
            for shard in range(topology.shards) if these else ():
                yield Flow(alike, server(sg, shard), sent[shard])
                yield Flow(server(sg, shard), alike, received[shard])
        yield from vote_routes(topology, sg, len(groups) / job.cluster.n_push)
        for group, units in summed.items():
            if units:
                yield from host_sum_routes(job, topology, shapes, group, units, samples)


def _sent(job: Job, topology: Topology, held: Sequence[BucketShape]) -> Parcel:
    """The parcel that a worker sends to the server of these buckets."""
    found = total([frames.push(shape) for shape in held]) + commit_to(held)
    if visible(job, topology) or job.apply is Apply.kOnArrival:
        found += frames.backward_end(len(held))
    pushes, fetches = job.cluster.n_push, job.cluster.n_fetch
    # Values that no commit asks for are asked for by themselves.
    alone = 1 / fetches - 1 / math.lcm(pushes, fetches)
    return found.times(1 / pushes) + frames.FETCH.times(alone)


def _received(job: Job, topology: Topology, held: Sequence[BucketShape]) -> Parcel:
    """The parcel that a worker gets from the server of these buckets."""
    found = frames.APPLIED.times(1 / job.cluster.n_push)
    found += total([frames.values(shape) for shape in held]).times(1 / job.cluster.n_fetch)
    if visible(job, topology) and job.apply is not Apply.kOnArrival:
        found += total([frames.mean(shape) for shape in held]) + frames.backward_reduced(len(held))
    return found


def _announced(job: Job, topology: Topology, held: Sequence[BucketShape]) -> Parcel:
    """The parcel that a worker gets from a server if they share memory.

    It has no bodies. held: the server's buckets.
    """
    found = frames.APPLIED.times(1 / job.cluster.n_push)
    if visible(job, topology) and job.apply is not Apply.kOnArrival:
        pieces = sum(shape.pieces for shape in held)
        trained = any(shape.trained for shape in held)
        # The means are in the worker's memory already.
        found += framed(m.BackwardReduced(0, 0, frames.bits(len(held)), frames.bits(pieces) if trained else b""))
    whole = framed(m.Values(0, -1, 0))
    if job.pull is Pull.kLazy:
        found += whole
        if job.cluster.max_staleness is None:
            # Each bucket is announced by itself, unless its group may have to wait after the step.
            found += framed(m.Values(0, 0, 0)).times(sum(shape.trained for shape in held))
    pushes, fetches = job.cluster.n_push, job.cluster.n_fetch
    return found + whole.times(1 / fetches - 1 / math.lcm(pushes, fetches))


# --- between server groups -------------------------------------------------------------------------------------------


def _exchange_routes(job: Job, topology: Topology, shapes: BucketShapes) -> Iterator[Route]:
    """The exchanges of server groups.

    It is assumed that every reply is there before the next exchange is due.
    """
    if not topology.synced:
        return
    groups = range(topology.server_groups)
    updates = len(topology.worker_groups_of(0)) / job.cluster.n_push
    rate = updates / job.cluster.sync_freq
    offer: m.Message = m.PairOffer(0, 0)
    reply: m.Message = m.PairReply(0, 0)
    if job.cluster.agreement is Agreement.kMaster:
        offer, reply = m.Delta(0, 0), m.MasterValue(0, 0)
    for shard in range(topology.shards):
        everyone = servers(groups, shard)
        by_master: dict[int, list[int]] = {}
        for bucket in shapes.map.buckets_of(shard):
            if shapes.all[bucket.id].trained:
                by_master.setdefault(bucket.master, []).append(shapes.all[bucket.id].nbytes)
        whole = [size for sizes in by_master.values() for size in sizes]
        match job.cluster.agreement:
            case Agreement.kMaster | Agreement.kElastic:
                for master, sizes in by_master.items():
                    yield Flow(everyone, server(master, shard), _bodies(offer, sizes).times(rate))
                    yield Flow(server(master, shard), everyone, _bodies(reply, sizes).times(rate))
            case Agreement.kRingAverage:
                for group in groups:
                    following = (group + 1) % len(groups)
                    yield Flow(server(group, shard), server(following, shard), _bodies(offer, whole).times(rate))
                    yield Flow(server(following, shard), server(group, shard), _bodies(reply, whole).times(rate))
            case Agreement.kGossip:
                # Each other group is a partner as often as the others, in the long run.
                taken = framed(PairTaken(0, 0)).times(len(whole))
                each = _bodies(offer, whole) + _bodies(reply, whole) + taken
                yield Flow(everyone, everyone, each.times(rate / (len(groups) - 1)))


def _bodies(message: m.Message, sizes: Sequence[int]) -> Parcel:
    """One message for each of these bodies."""
    return sum((framed(message, size) for size in sizes), NOTHING)
