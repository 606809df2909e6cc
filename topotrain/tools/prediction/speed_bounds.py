"""Upper bounds of the speed of a layout, by arithmetic.

They count the computing, and the bytes that links must carry.

A bound leaves out all that only a rehearsal knows: waiting, the work of servers, messages. So a layout is never faster
than its bound. A layout with a bound below the speed of another layout needs no rehearsal.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from topotrain.config.job import Compression, Job, Pull
from topotrain.config.topology import Topology
from topotrain.tools.prediction.host_resources import least_slowdown, sharing_on
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.probe.probe_file import Probe

_BITS = {Compression.kFp16: 16, Compression.kBf16: 16, Compression.kInt8: 8, Compression.kE3M0: 4}
_MBIT_BYTES = 1e6 / 8


@dataclass(frozen=True, slots=True)
class SpeedBound:
    """The most samples per second, and what limits them, in words."""

    samples_per_s: float
    limit: str


@dataclass(frozen=True)
class BoundEstimate:
    """The arithmetic of one layout on certain machines."""

    job: Job
    topology: Topology
    machines: Machines
    probe: Probe

    @cached_property
    def bytes_per_exchange(self) -> float:
        """The fewest bytes of all gradients, or of all values, on their way."""
        trained = sum(parameter.nbytes for parameter in self.probe.model if parameter.trainable)
        cluster = self.job.cluster
        if cluster.compression is Compression.kTopK:
            # Each element that is sent has an index.
            return trained * min(1.0, cluster.compression_ratio)
        return trained * _BITS.get(cluster.compression, 32) / 32

    @property
    def steps_per_exchange(self) -> int:
        """Local steps for each time that all parameters are exchanged."""
        cluster = self.job.cluster
        return cluster.sync_freq if cluster.outer is not None else max(cluster.n_push, cluster.n_fetch)

    @property
    def link_bytes_per_s(self) -> float | None:
        """Of a link in each direction; None: not limited."""
        link = self.machines.link
        return None if link is None or link.bandwidth is None else link.bandwidth * _MBIT_BYTES

    def bound(self) -> SpeedBound:
        """Return the upper bound."""
        groups = [self._group(group) for group in range(self.topology.worker_groups)]
        total = sum(bound.samples_per_s for bound in groups)
        slowest = min(groups, key=lambda bound: bound.samples_per_s)
        return min((SpeedBound(total, slowest.limit), *self._servers()), key=lambda bound: bound.samples_per_s)

    def _samples(self) -> int:
        """Samples of a group's step."""
        members = self.topology.workers_per_group
        return self.probe.batch.size * (members if self.job.per_worker_batch else 1)

    def _group(self, group: int) -> SpeedBound:
        """Return the bound of one worker group, with servers that cost nothing."""
        topology, slow = self.topology, self.machines.stragglers
        members, samples = topology.workers_per_group, self._samples()
        slowest = max(slow.get(group * members + index, 1.0) for index in range(members))
        # A slow worker is slow by itself, and leaves the cores to others meanwhile.
        slowest = max(slowest, least_slowdown(self._beside(group), *sharing_on(self.machines, self.probe)))
        compute_s = self.probe.batch.compute_s(samples // members) * slowest
        rate = self.link_bytes_per_s
        if rate is None or topology.synced:
            return SpeedBound(samples / compute_s, "computing")
        link_s = max(self._away(group).values()) * self.bytes_per_exchange / self.steps_per_exchange / rate
        if self._waits:
            # The replies of a step come after its forward, and before the next one.
            link_s += (
                compute_s * self.probe.batch.forward_s / (self.probe.batch.forward_s + self.probe.batch.backward_s)
            )
        if link_s > compute_s:
            return SpeedBound(samples / link_s, "the links of its workers")
        return SpeedBound(samples / compute_s, "computing")

    @property
    def _waits(self) -> bool:
        """Whether each step waits for the values of the one before."""
        job = self.job
        return job.pull is Pull.kStep and job.cluster.outer is None and self.steps_per_exchange == 1

    def _beside(self, group: int) -> int:
        """Count the workers on the host of a group's first worker, without slow ones."""
        topology = self.topology
        return max(1, self._residents[self.machines.host_of(topology, topology.workers(group)[0])])

    @cached_property
    def _residents(self) -> Counter[int]:
        """Workers of each host, without slow ones."""
        topology, slow, members = self.topology, self.machines.stragglers, self.topology.workers_per_group
        workers = (worker for unit in topology.units for worker in unit.workers)
        return Counter(
            self.machines.host_of(topology, worker)
            for worker in workers
            if slow.get(worker.group * members + worker.index, 1.0) <= 1
        )

    @cached_property
    def _shards(self) -> dict[int, Counter[int]]:
        """Servers of each host, by the server group."""
        topology = self.topology
        return {
            group: Counter(topology.host_of(server) for server in topology.servers(group))
            for group in range(topology.server_groups)
        }

    @cached_property
    def _group_hosts(self) -> list[frozenset[int]]:
        """The hosts with workers of each worker group."""
        topology = self.topology
        return [
            frozenset(topology.host_of(worker) for worker in topology.workers(group))
            for group in range(topology.worker_groups)
        ]

    def _away(self, group: int) -> dict[int, float]:
        """Return the share of the parameters that other hosts have.

        It is given for each host with workers of the group.
        """
        topology = self.topology
        servers = self._shards[topology.server_group_of(group)]
        return {host: 1.0 - servers[host] / topology.shards for host in self._group_hosts[group]}

    def _servers(self) -> Iterator[SpeedBound]:
        """Yield the bound of the busiest host with servers."""
        topology, rate = self.topology, self.link_bytes_per_s
        if rate is None or topology.synced or topology.implicit or topology.collective:
            return
        # Of each server group: hosts with workers that pull, over its groups, and how often each host is one of them.
        pulls: Counter[int] = Counter()
        own: dict[int, Counter[int]] = {group: Counter() for group in range(topology.server_groups)}
        for group, hosts in enumerate(self._group_hosts):
            serving = topology.server_group_of(group)
            pulls[serving] += len(hosts)
            own[serving].update(hosts)
        # Copies of all parameters that the servers of each host send while each group makes one step.
        loads: dict[int, float] = {}
        for serving, servers in self._shards.items():
            for place, count in servers.items():
                sent = count * (pulls[serving] - own[serving][place]) / topology.shards
                loads[place] = loads.get(place, 0.0) + sent
        busiest = max(loads, key=lambda host: loads[host])
        seconds = loads[busiest] * self.bytes_per_exchange / self.steps_per_exchange / rate
        if seconds:
            samples = self._samples() * topology.worker_groups
            yield SpeedBound(samples / seconds, f"the link of host {busiest}, which has servers")
