"""The units that send one sum of their workers over the network.

A unit is a term of the canonical sum of its group (`Topology.sum_tree`). So a plain sum that is made in the unit has
the bits that the server would have got from the unit's gradients. Nothing here needs a running process.
"""

from dataclasses import dataclass

from topotrain.config.job import Compression, Job, TransportChoice
from topotrain.config.topology import Address, Role, Topology, layout


@dataclass(frozen=True, slots=True)
class HostUnit:
    """The workers of one group in one unit, of which there are several.

    Attributes:
        group: the worker group.
        workers: their indices in the group, in the order of the sum.
        shards: the indices of the group's servers that are on other hosts.
    """

    group: int
    workers: tuple[int, ...]
    shards: frozenset[int]

    def lead(self, shard: int) -> int:
        """The worker that adds up for a server, and gets its means and values."""
        # Another worker for each server, so that all of them add up equally much.
        return self.workers[shard % len(self.workers)]

    def addresses(self) -> tuple[Address, ...]:
        """The addresses of the workers."""
        return tuple(Address(Role.WORKER, self.group, index) for index in self.workers)


def host_units(topology: Topology, group: int) -> tuple[HostUnit, ...]:
    """Return the units of a group with several workers, and servers elsewhere."""
    servers = topology.servers(topology.server_group_of(group))
    found = []
    for workers in topology.sum_tree(group):
        # First: in a layout of thousands to look at each server from each unit would take minutes.
        if len(workers) == 1:
            continue
        first = Address(Role.WORKER, group, workers[0])
        away = frozenset(server.index for server in servers if not topology.together(first, server))
        if away:
            found.append(HostUnit(group, tuple(workers), away))
    return tuple(found)


def refusal(job: Job, topology: Topology) -> str:
    """Why no unit of the job sends sums; empty: those with several workers do."""
    cluster = job.cluster
    conditions = {
        "transport: kTcp shares no memory": cluster.transport is TransportChoice.kTcp,
        "compression encodes the gradients of each worker by themselves": cluster.compression is not Compression.kNone,
        "the workers add up their gradients among themselves": topology.collective,
        "with cluster.backup a step may be made without some workers of a unit": cluster.backup > 0,
        "with replicas: 2 both processes of a server keep what each worker has sent": cluster.replicas > 1,
        "with cluster.shares the gradients of the workers have different weights": len(set(cluster.shares)) > 1,
        "a split model has other parameters on each worker": job.splits,
        "with cluster.outer each worker pushes another part of what its group has learned": cluster.outer is not None,
    }
    return next((text for text, holds in conditions.items() if holds), "")


def used_units(job: Job, topology: Topology, group: int) -> tuple[HostUnit, ...]:
    """Return the units of a group that send sums."""
    return () if refusal(job, topology) else host_units(topology, group)


def used_unit(job: Job, topology: Topology, worker: Address) -> HostUnit | None:
    """Return the unit of a worker if it sends sums."""
    units = used_units(job, topology, worker.group)
    return next((unit for unit in units if worker.index in unit.workers), None)


def link_advice(job: Job) -> str:
    """Return how the workers of a host use its link, with a host for each unit.

    Empty: each unit has one worker, or no server is elsewhere.
    """
    if job.cluster.transport is TransportChoice.kShm:  # all units are on one host
        return ""
    topology = layout(job.cluster, range(len(layout(job.cluster).units)))
    units = [unit for group in range(topology.worker_groups) for unit in host_units(topology, group)]
    if not units:
        return ""
    count, why = max(len(unit.workers) for unit in units), refusal(job, topology)
    if why:
        return f"with a host for each unit its {count} workers use the link each for itself: {why}"
    return (
        f"with a host for each unit its {count} workers are summed before the link: one gradient and one pull for all "
        f"of them, 1/{count} of the bytes"
    )
