"""The number of each worker's samples that are in the values of its servers.

With each step a worker sends the number of samples of its gradient. They count once, when the step changes the values:
not with a gradient that was refused, and not with a step that is not decided. The counts outlive the worker's process,
and they are in snapshots.
"""

from collections.abc import Collection, Mapping

from topotrain.config.topology import Address, Role, Topology
from topotrain.core.protocol import Commit
from topotrain.core.server.component_state import State


class SampleCounts:
    """The counts of the workers of one server group.

    Args:
        topology: the job's layout.
        group: the server group.
        before: the counts of an earlier start of the job. The counts of workers that exist no more are added to
            those of worker (0,0), so that the sum stays the same.
    """

    def __init__(self, topology: Topology, group: int, before: Mapping[Address, int]) -> None:
        there = {who for g in range(topology.worker_groups) for who in topology.workers(g)}
        mine = {who for g in topology.worker_groups_of(group) for who in topology.workers(g)}
        self.counts = {who: before.get(who, 0) for who in sorted(mine)}
        first = Address(Role.WORKER, 0, 0)
        if first in mine:
            self.counts[first] += sum(count for who, count in before.items() if who not in there)

    def applied(self, group: int, commits: Mapping[int, Commit], refused: Collection[int]) -> None:
        """Count a step of a group that is in the values, without these of its workers."""
        for index, commit in commits.items():
            if index not in refused:
                self.counts[Address(Role.WORKER, group, index)] += commit.samples

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
        return {"counts": self.counts}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self.counts = dict(state["counts"])
