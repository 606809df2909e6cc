"""A candidate of an advice: a whole job with a named block, placed on machines."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from topotrain.config.job import Job
from topotrain.config.topology import Topology
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.rehearsable import changes

_NAMED = 4
"""Idle hosts that are named in a label."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that can be rehearsed.

    Attributes:
        job: the whole job with this layout.
        topology: its workers and servers, on the hosts that were asked for.
        machines: with the stragglers by the numbers of this layout's workers.
        setting: what the label has behind framework and counts.
        needs: fields of the job that are set for it, in words. Only the script says whether it allows them.
        given: hosts that there are. The layout may be for fewer.
        without: numbers of slow hosts that are left idle.
    """

    job: Job
    topology: Topology
    machines: Machines = field(default_factory=Machines)
    setting: str = ""
    needs: str = ""
    given: int = 1
    without: tuple[int, ...] = ()

    @property
    def used(self) -> int:
        """The number of hosts with processes of the job."""
        return len(set(self.topology.hosts)) or 1

    @property
    def label(self) -> str:
        """The layout in one line: framework, workers, servers, and what else is set."""
        topology = self.topology
        framework = topology.framework.replace(" (asynchronous)", "").replace(" (synchronous)", "")
        workers = _counts(topology.worker_groups, topology.workers_per_group, "worker")
        servers = "no servers"
        if not topology.implicit:
            apart = " apart" if self.job.cluster.server_worker_separate else ""
            servers = _counts(topology.server_groups, topology.shards, "server") + apart
        return ", ".join(part for part in (framework, workers, servers, self.setting, self._place) if part)

    @property
    def _place(self) -> str:
        """Which of the hosts are used, in words; "": all."""
        if self.used >= self.given:
            return ""
        few = ", ".join(map(str, self.without[:_NAMED])) + ", …" * (len(self.without) > _NAMED)
        idle = f" without host{'s' * (len(self.without) > 1)} {few}" if self.without else ""
        return f"on {self.used} of {self.given} hosts{idle}"

    @property
    def changes(self) -> tuple[str, ...]:
        """The reasons why the updates differ from those of one process.

        Empty: they do not differ.
        """
        return changes(self.job)

    @property
    def processes(self) -> int:
        """The number of processes of the job.

        Each worker has one, and the servers of each unit have one.
        """
        topology = self.topology
        workers = topology.worker_groups * topology.workers_per_group
        # Where each worker has a server beside it on one host, its process does the work of both.
        return workers + (0 if topology.inline else sum(bool(unit.servers) for unit in topology.units))


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


def _counts(groups: int, members: int, noun: str) -> str:
    text = f"{members} {noun}" + "s" * (members > 1)
    return text if groups == 1 else f"{groups} groups of {text}"
