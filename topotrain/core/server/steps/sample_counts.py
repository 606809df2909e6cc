"""How many samples of each worker are in the values of its servers: each once, whoever dies, leaves or comes.

Rule: a worker says with each step of how many samples its gradient is. They count when the step changes the values, so
not those of a gradient that was refused, and not those of a step that nobody has decided. The counts are the server's:
they outlive the worker's process, and they are in snapshots.
"""

from collections.abc import Collection, Mapping

from topotrain.config.topology import Address, Role, Topology
from topotrain.core.protocol import Commit


class SampleCounts:
    """The counts of the workers of one server group.

    Args:
        topology: the job's layout.
        group: the server group.
        before: what the workers of an earlier start of the job had. What those had that there are no more is counted
            with worker (0,0), so that nothing is lost from the sum.
    """

    def __init__(self, topology: Topology, group: int, before: Mapping[Address, int]) -> None:
        there = {who for g in range(topology.worker_groups) for who in topology.workers(g)}
        mine = {who for g in topology.worker_groups_of(group) for who in topology.workers(g)}
        self.counts = {who: before.get(who, 0) for who in sorted(mine)}
        first = Address(Role.WORKER, 0, 0)
        if first in mine:
            self.counts[first] += sum(count for who, count in before.items() if who not in there)

    def applied(self, group: int, commits: Mapping[int, Commit], refused: Collection[int]) -> None:
        """A step of a group is in the values, but for what these of its workers have pushed."""
        for index, commit in commits.items():
            if index not in refused:
                self.counts[Address(Role.WORKER, group, index)] += commit.samples
