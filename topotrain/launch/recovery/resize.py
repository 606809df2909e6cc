"""Resizing a job of one worker group: validation of a request, and its progress.

This module is pure. The job takes a snapshot after the next step, as before an end, and its next attempt resumes there
with another layout. Until that snapshot is on disk nothing has changed, and any failure leaves the job as it was.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from topotrain.config.intervals import wants_snapshots
from topotrain.config.job import Cluster, ConfigError, Job, all_reduces
from topotrain.config.topology import Topology, layout
from topotrain.core.events import Bounded, Saved, Unsaved
from topotrain.launch.recovery.recovery_actions import (
    LEAVE,
    Action,
    RequestSnapshot,
    ResizeRefused,
    ResizeRequest,
    RestartResized,
)
from topotrain.launch.recovery.restarts import Restarts


def resized(cluster: Cluster, workers: int) -> Cluster:
    """Return the cluster with `workers` workers in its group.

    Where every worker has a server in its process (AllReduce), or all workers are in one unit, this stays so. Raises
    ConfigError.
    """
    # With one worker it cannot be told which of the two was meant; then each worker gets a unit of its own.
    per_unit = workers if 1 < cluster.nworkers_per_procs == cluster.nworkers_per_group else cluster.nworkers_per_procs
    beside = all_reduces(cluster)
    return replace(
        cluster,
        nworkers_per_group=workers,
        nworkers_per_procs=per_unit,
        nservers_per_group=workers if beside else cluster.nservers_per_group,
        nservers_per_procs=per_unit if beside else cluster.nservers_per_procs,
    )


def resized_layout(topology: Topology, workers: int) -> Topology:
    """Return the layout with `workers` workers in its group, on the same hosts."""
    return layout(resized(topology.cluster, workers), topology.hosts)


@dataclass(slots=True)
class ResizeState:
    """The state of resizing in one attempt of a job.

    job: the job as it is now.
    units: the number of units, where another tool has started them. 0: the launcher starts as many as are needed.
    """

    job: Job
    units: int = 0
    under_way: ResizeRequest | None = None
    due: float | None = None
    """The time at which the snapshot has to be complete."""
    _next: Job | None = None
    _bound: Bounded | None = None

    def again(self, job: Job) -> "ResizeState":
        """Return the state for the next attempt, as this job."""
        return ResizeState(job, self.units)

    def on_request(
        self, wish: ResizeRequest, now: float, lost_units: Collection[int] = ()
    ) -> RequestSnapshot | ResizeRefused:
        """Begin a resize, or refuse it if the job file or a reported limit rules it out."""
        try:
            self._next = self._wanted(wish, lost_units)
        except ConfigError as error:
            return ResizeRefused(wish, str(error))
        # A synchronous group makes its steps together, so the change waits for the end of a step.
        self.under_way, self.due = wish, now + wish.within_s
        return RequestSnapshot()

    def _wanted(self, wish: ResizeRequest, lost_units: Collection[int]) -> Job:
        workers = self._count(wish)
        self._check(wish, workers)
        try:
            job = replace(self.job, cluster=resized(self.job.cluster, workers))
            # Now, and not at the restart: a refused request must leave the job as it is.
            self._check_units(job, lost_units)
        except ConfigError as error:
            raise ConfigError("", None, f"the job cannot go on with {_workers(workers)}: {error}") from None
        return job

    def _check_units(self, job: Job, lost_units: Collection[int]) -> None:
        """Raise ConfigError where the units of another tool do not suffice for this job."""
        needed = len(layout(job.cluster).units)
        if not self.units:
            return
        # No launcher could start more of them.
        if needed > self.units:
            accepted = f"they need {needed} units, and {self.units} were started: start all again with more of them"
            raise ConfigError("", None, f"{accepted} and resume: true")
        topology = layout(job.cluster, (0,) * self.units)
        gone = {unit.rank for unit in topology.units if unit.workers or unit.servers} & set(lost_units)
        if gone:
            raise ConfigError("", None, f"unit {min(gone)} is gone, and returns only when the whole job starts again")

    def _count(self, wish: ResizeRequest) -> int:
        return self.job.cluster.nworkers_per_group + (-wish.workers if wish.verb == LEAVE else wish.workers)

    def _check(self, wish: ResizeRequest, workers: int) -> None:
        cluster, bound, why = self.job.cluster, self._bound, ""
        if cluster.nworker_groups > 1:
            why = f"the job has {cluster.nworker_groups} worker groups, which join and leave as a whole: use --group"
        elif self.under_way is not None:
            why = "the number of its workers is being changed already: try again when that is done"
        elif not wants_snapshots(self.job):
            why = "it would resume from a snapshot, and the job takes none (snapshot_s: 0, checkpoint_freq: 0)"
        elif wish.workers < 1:
            why = f"{wish.workers} workers cannot {wish.verb}: at least 1"
        elif workers < 1:
            why = f"the job has {_workers(cluster.nworkers_per_group)}, and one has to stay"
        elif bound is not None and (not bound.most or workers > bound.most):
            why = f"the job cannot go on with {_workers(workers)}: {bound.text}"
        if why:
            raise ConfigError("", None, why)

    def on_bounded(self, event: Bounded) -> None:
        """Record a limit that the script's batches or model impose."""
        self._bound = event

    def on_snapshot(self, event: Saved | Unsaved, restarts: Restarts, finished: bool, now: float) -> Sequence[Action]:
        """Return the actions after the first server's reply about a snapshot.

        finished: all scripts have finished.
        """
        wish, job = self.under_way, self._next
        if wish is None or job is None:  # no resize has asked for it
            return []
        # No script is left that could train on, so a resumed job would only end again.
        if finished:
            return self.give_up("the job has ended meanwhile")
        if isinstance(event, Unsaved):
            return self.give_up(f"it would resume from a snapshot, and none can be taken: {event.text}")
        self._forget()
        workers, former = job.cluster.nworkers_per_group, self.job.cluster.nworkers_per_group
        text = _answer(wish, workers, event.step)
        return restarts.restart_resized(
            RestartResized(wish, job, restarts.next_incident, event.step, text), former, now
        )

    def give_up(self, why: str) -> Sequence[ResizeRefused]:
        """Refuse the pending request, if there is one."""
        wish = self.under_way
        self._forget()
        return [] if wish is None else [ResizeRefused(wish, why)]

    def _forget(self) -> None:
        """Clear the pending request."""
        self.under_way = self.due = self._next = None

    def poll(self, now: float) -> Sequence[ResizeRefused]:
        """Refuse the pending request if its snapshot is late."""
        if self.under_way is None or self.due is None or now < self.due:
            return []
        seconds = f"{self.under_way.within_s:g} s (--within)"
        return self.give_up(f"no snapshot was complete within {seconds}, so the job continues as it was")


def _answer(wish: ResizeRequest, now: int, step: int) -> str:
    who = "a worker has" if wish.workers == 1 else f"{wish.workers} workers have"
    what = "left" if wish.verb == LEAVE else "joined"
    return f"{who} {what}: the job goes on after step {step} with {_workers(now)}"


def _workers(count: int) -> str:
    return f"{count} worker" if count == 1 else f"{count} workers"
