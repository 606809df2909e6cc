"""Upper bounds of the speed of a layout, by arithmetic.

They count the computing, and the bytes that links must carry. A bound leaves out all that only a rehearsal knows:
waiting, the work of servers, messages. So a layout is never faster than its bound.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from topotrain.config.job import Compression, Job
from topotrain.config.topology import Topology
from topotrain.tools.prediction.host_resources import least_slowdown, sharing_on
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.probe.probe_file import Probe

_BITS = {Compression.kFp16: 16, Compression.kBf16: 16, Compression.kInt8: 8, Compression.kE3M0: 4}


@dataclass(frozen=True, slots=True)
class SpeedBound:
    """The most samples per second, and what limits them, in words."""

    samples_per_s: float
    limit: str


def speed_bound(job: Job, topology: Topology, machines: Machines, probe: Probe) -> SpeedBound:
    """Return the upper bound of the speed of one layout on certain machines."""
    members = topology.workers_per_group
    samples = probe.batch.size * (members if job.per_worker_batch else 1)
    computing = [probe.batch.compute_s(-(-samples // members)) * slow for slow in _slowest(topology, machines, probe)]
    bounds = [SpeedBound(sum(samples / seconds for seconds in computing), "computing")]
    # Several server groups with values of their own exchange them seldom.
    if machines.link is not None and machines.link.bandwidth is not None and not topology.synced:
        model_s = _exchanged_bytes(job, probe) / (machines.link.bandwidth * 1e6 / 8)
        bounds += _link_bounds(topology, samples, computing, model_s)
    # Of equal bounds the first one: the links limit nothing where they are not slower than the computing.
    return min(bounds, key=lambda bound: bound.samples_per_s)


def _link_bounds(topology: Topology, samples: int, computing: Sequence[float], model_s: float) -> Iterator[SpeedBound]:
    """Yield the bounds of links.

    computing: seconds of a step of each group. model_s: of a link for the model.
    """
    groups = range(topology.server_groups)
    served = [Counter(map(topology.host_of, topology.servers(group))) for group in groups]
    limited, copies = 0.0, Counter[int]()
    for group, seconds in enumerate(computing):
        hosts = set(map(topology.host_of, topology.workers(group)))
        servers = served[topology.server_group_of(group)]
        pushed = 1.0 - min(servers[host] for host in hosts) / topology.shards
        limited += samples / max(seconds, pushed * model_s)
        for host, count in servers.items():
            copies[host] += count * (len(hosts) - (host in hosts))
    yield SpeedBound(limited, "the links of its workers")
    if not topology.implicit and not topology.collective and any(copies.values()):
        host, most = max(copies.items(), key=lambda each: each[1])
        total = samples * topology.worker_groups * topology.shards / (most * model_s)
        yield SpeedBound(total, f"the link of host {host}, which has servers")


def _slowest(topology: Topology, machines: Machines, probe: Probe) -> Iterator[float]:
    """Yield by how much the slowest worker of each group is slowed down, at least."""
    slow, members = machines.stragglers, topology.workers_per_group
    # A slow worker is slow by itself, and leaves the cores to others meanwhile.
    residents = Counter(
        machines.host_of(topology, worker)
        for unit in topology.units
        for worker in unit.workers
        if slow.get(worker.group * members + worker.index, 1.0) <= 1
    )
    sharing = sharing_on(machines, probe)
    for group in range(topology.worker_groups):
        beside = residents[machines.host_of(topology, topology.workers(group)[0])]
        own = max(slow.get(group * members + index, 1.0) for index in range(members))
        yield max(own, least_slowdown(max(1, beside), *sharing))


def _exchanged_bytes(job: Job, probe: Probe) -> float:
    """Return the fewest bytes of all gradients, or of all values, for one step."""
    cluster = job.cluster
    share = _BITS.get(cluster.compression, 32) / 32
    if cluster.compression is Compression.kTopK:
        # Each element that is sent has an index.
        share = min(1.0, cluster.compression_ratio)
    steps = cluster.sync_freq if cluster.outer is not None else max(cluster.n_push, cluster.n_fetch)
    return share * sum(parameter.nbytes for parameter in probe.model if parameter.trainable) / steps
