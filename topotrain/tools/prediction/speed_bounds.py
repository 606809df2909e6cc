"""Upper bounds of the speed of a layout, by arithmetic.

They count the computing, and the bytes that links must carry. A bound leaves out all that only a rehearsal knows:
waiting, the work of servers, messages. So a layout is never faster than its bound.
"""

from collections import Counter
from collections.abc import Iterator
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
    link = machines.link
    # Several server groups with values of their own exchange them seldom.
    if link is not None and link.bandwidth is not None and not topology.synced:
        model_s = _exchanged_bytes(job, probe) / (link.bandwidth * 1e6 / 8)
        pushing = [share * model_s for share in _pushed(topology)]
        limited = [max(each) for each in zip(computing, pushing, strict=True)]
        bounds.append(SpeedBound(sum(samples / each for each in limited), "the links of its workers"))
        for host, copies in _sent_values(topology):
            total = samples * topology.worker_groups / (copies * model_s)
            bounds.append(SpeedBound(total, f"the link of host {host}, which has servers"))
    # Of equal bounds the first one: the links limit nothing where they are not slower than the computing.
    return min(bounds, key=lambda bound: bound.samples_per_s)


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


def _places(topology: Topology) -> tuple[list[frozenset[int]], list[Counter[int]]]:
    """Return the hosts of each worker group, and each server group's servers by host."""
    workers = [frozenset(map(topology.host_of, topology.workers(group))) for group in range(topology.worker_groups)]
    servers = [Counter(map(topology.host_of, topology.servers(group))) for group in range(topology.server_groups)]
    return workers, servers


def _pushed(topology: Topology) -> Iterator[float]:
    """Yield for each group the largest share of its gradients that leaves a host."""
    workers, servers = _places(topology)
    for group, hosts in enumerate(workers):
        here = servers[topology.server_group_of(group)]
        yield 1.0 - min(here[host] for host in hosts) / topology.shards


def _sent_values(topology: Topology) -> Iterator[tuple[int, float]]:
    """Yield the busiest host with servers, and the copies of values that leave it."""
    if topology.implicit or topology.collective:
        return
    workers, servers = _places(topology)
    copies: Counter[int] = Counter()
    for group, hosts in enumerate(workers):
        for host, count in servers[topology.server_group_of(group)].items():
            copies[host] += count * (len(hosts) - (host in hosts))
    busiest = max(copies, key=lambda host: copies[host])
    if copies[busiest]:
        yield busiest, copies[busiest] / topology.shards
