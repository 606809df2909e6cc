"""The worker groups that use one server: which train, and their clocks."""

from collections.abc import Mapping

from topotrain.config.job import Job
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.server.component_state import State
from topotrain.core.server.consistency import Clocks


class WorkerGroups:
    """The state of each worker group of a server group.

    A group is *away* after its workers have left the job, and *paused* while no other group waits for it.

    Args:
        job, topology: the job.
        server_group: the server group.
    """

    def __init__(self, job: Job, topology: Topology, server_group: int) -> None:
        self.groups = topology.worker_groups_of(server_group)
        self.workers = {group: topology.workers(group) for group in self.groups}
        self.clocks = Clocks(self.groups, job.cluster.max_staleness)
        self._finished: dict[int, dict[int, int]] = {group: {} for group in self.groups}
        self._away: set[int] = set()
        self._paused: set[int] = set()
        self._returned: set[int] = set()  # groups that came back before all had the same start
        for group in self.groups:
            if group != 0 and job.warmup_steps:
                self.clocks.leave(group)

    def finish(self, worker: Address, steps: int) -> None:
        """A worker's script has ended after so many steps."""
        self._finished[worker.group][worker.index] = steps

    def finished(self, group: int) -> Mapping[int, int]:
        """The workers of a group with ended scripts, and the steps of each."""
        return self._finished[group]

    def has_finished(self, worker: Address) -> bool:
        """Whether a worker's script has ended."""
        return worker.index in self._finished[worker.group]

    def ended(self, group: int) -> bool:
        """Whether all scripts of the group have ended."""
        return len(self._finished[group]) >= len(self.workers[group])

    def runs(self, group: int) -> bool:
        """Whether the group trains."""
        return group not in self._away and not self.ended(group)

    @property
    def any_runs(self) -> bool:
        """Whether some group trains."""
        return any(map(self.runs, self.groups))

    def is_away(self, worker: Address) -> bool:
        """Whether the worker's group has left the job."""
        return worker.role is Role.WORKER and worker.group in self._away

    def leave(self, group: int) -> None:
        """The group has left the job."""
        self._away.add(group)
        self.clocks.leave(group)

    def come_back(self, group: int) -> bool:
        """The group has workers again; whether it had left the job."""
        was_away = group in self._away
        self._away.discard(group)
        return was_away

    def pause(self, group: int) -> None:
        """No other group waits for this one until `resume`."""
        self._paused.add(group)
        self._returned.discard(group)
        self.clocks.leave(group)

    def resume(self, group: int, clock: int) -> None:
        """Other groups wait for this one again, which is at `clock`."""
        self._paused.discard(group)
        if self.runs(group):
            self.clocks.join(group, clock)

    def join_at_start(self, group: int) -> None:
        """The group came back before all groups had the same start: it joins then."""
        self._returned.add(group)

    def restore_clocks(self, clocks: Mapping[int, int]) -> None:
        """Continue the clocks of an earlier start of the job."""
        ours = {group: clock for group, clock in clocks.items() if group in self.groups}
        self.clocks.go_on(ours if ours.keys() == set(self.groups) else clocks)

    def start_together(self, clock: int, earlier: Mapping[int, int] | None) -> list[int]:
        """Start all groups at the same clock.

        In a resumed job each starts where an earlier start of the job has left it.

        Returns:
            The groups that came back before, and join now.
        """
        self.clocks.set_all(clock)
        if earlier is not None:
            self.restore_clocks(earlier)
        for group in self.groups:
            # Shards come to this between different decisions, so a pause has to outlast it.
            if self.runs(group) and group not in self._paused:
                self.clocks.join(group)
        return sorted(self._returned)

    def reset(self, group: int, ended: bool) -> None:
        """The workers of the group are gone; ended: all their scripts had ended."""
        if not ended:
            self._finished[group] = {}

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
        apart = {"away": self._away, "paused": self._paused, "returned": self._returned}
        return {"clocks": self.clocks.state_dict(), "finished": self._finished, **apart}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self.clocks.load_state_dict(state["clocks"])
        self._finished = {group: dict(finished) for group, finished in state["finished"].items()}
        self._away, self._paused = set(state["away"]), set(state["paused"])
        self._returned = set(state["returned"])
