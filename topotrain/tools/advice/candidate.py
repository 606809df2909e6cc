"""A candidate of an advice.

It is a whole job with its family, and with its changes of the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from topotrain.config.job import Agreement, Algorithm, Compression, Job
from topotrain.config.topology import Topology
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.speed_bounds import BoundEstimate, SpeedBound
from topotrain.tools.probe.probe_file import Probe

_NAMED = 4
"""Idle hosts that are named in a label."""


class Family(str, Enum):
    """A family of layouts.

    The advice rehearses at least one candidate of each, as far as there are any.
    """

    OWN = "the block of the job file"
    ONE = "one worker"
    ALLREDUCE = "AllReduce"
    SANDBLASTER = "Sandblaster"
    DOWNPOUR = "Downpour"
    HYBRID = "in-host sharing"
    HOGWILD = "Distributed Hogwild"
    AVERAGED = "server groups that average"
    ISLANDS = "islands"
    COMPRESSED = "compression"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that can be rehearsed.

    Attributes:
        family: for the order in which candidates are looked at.
        job: the whole job with this layout.
        topology: its workers and servers, on the hosts that were asked for.
        machines: with the stragglers by the numbers of this layout's workers.
        given: hosts that there are. The layout may be for fewer.
        without: numbers of slow hosts that are left idle.
    """

    family: Family
    job: Job
    topology: Topology
    machines: Machines
    given: int = 1
    without: tuple[int, ...] = ()

    @property
    def used(self) -> int:
        """The number of hosts with processes of the job."""
        return len(set(self.topology.hosts)) or 1

    def bound(self, probe: Probe) -> SpeedBound:
        """Return the most samples per second, by arithmetic."""
        return BoundEstimate(self.job, self.topology, self.machines, probe).bound()

    @property
    def place(self) -> str:
        """Which of the hosts are used, in words; "": all."""
        if self.used >= self.given:
            return ""
        few = ", ".join(map(str, self.without[:_NAMED])) + ", …" * (len(self.without) > _NAMED)
        idle = f" without host{'s' * (len(self.without) > 1)} {few}" if self.without else ""
        return f"on {self.used} of {self.given} hosts{idle}"

    @property
    def label(self) -> str:
        """The layout in one line: framework, workers, servers, and what else is set."""
        return ", ".join([self.framework, self.workers, self.servers, *self.settings])

    @property
    def framework(self) -> str:
        """The name of the layout without what `changes` says."""
        return self.topology.framework.replace(" (asynchronous)", "").replace(" (synchronous)", "")

    @property
    def workers(self) -> str:
        """The number of workers, in groups if there are several."""
        groups, members = self.topology.worker_groups, self.topology.workers_per_group
        return _count(members, "worker") if groups == 1 else f"{groups} groups of {_count(members, 'worker')}"

    @property
    def servers(self) -> str:
        """The number of servers, in groups if there are several."""
        if self.topology.implicit:
            return "no servers"
        groups, shards = self.topology.server_groups, self.topology.shards
        apart = " apart" if self.job.cluster.server_worker_separate else ""
        text = _count(shards, "server") if groups == 1 else f"{groups} groups of {_count(shards, 'server')}"
        return text + apart

    @property
    def settings(self) -> Sequence[str]:
        """Fields that differ between layouts of equal counts, as in a job file."""
        cluster = self.job.cluster
        conditions = {
            f"algorithm {cluster.algorithm.value}": cluster.algorithm is not Algorithm.kAuto,
            f"compression {cluster.compression.value}": cluster.compression is not Compression.kNone,
            f"agreement {cluster.agreement.value}": self.topology.synced and cluster.agreement is not Agreement.kMaster,
            f"sync_freq {cluster.sync_freq}": self.topology.synced and cluster.sync_freq > 1,
            f"max_staleness {cluster.max_staleness}": cluster.max_staleness is not None,
            f"quorum {cluster.quorum}": cluster.quorum > 0,
            f"overlap {cluster.overlap}": cluster.overlap > 0,
            "replicas 2": cluster.replicas > 1,
            f"backup {cluster.backup}": cluster.backup > 0,
        }
        return [text for text, holds in {**conditions, self.place: bool(self.place)}.items() if holds]

    @property
    def changes(self) -> tuple[str, ...]:
        """The reasons why the updates differ from those of one process.

        Empty: they do not differ.
        """
        cluster, topology = self.job.cluster, self.topology
        several = topology.worker_groups > 1
        conditions = {
            "groups never meet": several and topology.implicit,
            "asynchronous": several and not topology.implicit and (cluster.outer is None or cluster.quorum > 0),
            "local steps": cluster.outer is not None or max(cluster.n_push, cluster.n_fetch) > 1,
            "averages": topology.synced and cluster.agreement is not Agreement.kMaster,
            "lossy compression": cluster.compression is not Compression.kNone,
            "drops late gradients": cluster.backup > 0,
        }
        return tuple(text for text, holds in conditions.items() if holds)

    @property
    def is_exact(self) -> bool:
        """Whether the updates are those of one process."""
        return not self.changes

    @property
    def processes(self) -> int:
        """The number of processes of the job.

        Each worker has one, and the servers of each unit have one.
        """
        topology = self.topology
        workers = topology.worker_groups * topology.workers_per_group
        # Where each worker has a server beside it on one host, its process does the work of both.
        return workers + (0 if topology.inline else sum(bool(unit.servers) for unit in topology.units))

    @property
    def server_count(self) -> int:
        """Servers of one group."""
        return 0 if self.topology.implicit else self.topology.shards


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something that was not rehearsed, and why. what: a layout or a setting."""

    what: str
    why: str


def slowed(machines: Machines, topology: Topology, hosts: Sequence[int]) -> Machines:
    """Return the machines with stragglers as numbers of workers of one layout.

    With several hosts a straggler is the number of a host, and all workers on it are slow. With one host it is the
    number of a worker, and a layout with fewer workers does not have it. hosts: the numbers of those that the layout
    has. Empty: there is one host only.
    """
    factors: dict[int, float] = {}
    per_group = topology.workers_per_group
    for group in range(topology.worker_groups if machines.stragglers else 0):
        for worker in topology.workers(group):
            number = group * per_group + worker.index
            place = hosts[topology.host_of(worker)] if hosts else number
            if place in machines.stragglers:
                factors[number] = machines.stragglers[place]
    return replace(machines, stragglers=factors)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
