"""A job of one worker group that goes on with more workers, or fewer: what is asked, what cannot be, when it is done.

Rule: pure. A synchronous group makes its steps together, so nobody leaves or joins inside one: the job takes a snapshot
behind the next step, as where it is asked to end, and its next life begins there with another layout. Until that
snapshot is on disk nothing has changed, and whatever goes wrong leaves the job as it was.
"""

from dataclasses import dataclass, replace

from topotrain.config.intervals import wants_snapshots
from topotrain.config.job import Cluster, ConfigError, Job, all_reduces
from topotrain.config.topology import layout
from topotrain.core.events import Bounded, Saved, Unsaved
from topotrain.extensions.replication import replica_placement
from topotrain.launch.recovery.elastic_groups import LEAVE


@dataclass(frozen=True, slots=True)
class ResizeRequest:
    """The wish that so many workers leave, or join; within_s: seconds in which the snapshot has to be there."""

    verb: str
    workers: int
    within_s: float = 10.0


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """To do: ask the first server for a snapshot behind the very next step."""


@dataclass(frozen=True, slots=True)
class ResizeRefused:
    """To do: tell whoever wished this that nothing has changed, and why."""

    wish: ResizeRequest
    error: str


@dataclass(frozen=True, slots=True)
class RestartResized:
    """To do: end every process, then go on as this job, from the snapshot that there is now.

    number: of the Recovered that tells when it trains. text: the answer to whoever wished it, for then.
    """

    wish: ResizeRequest
    job: Job
    number: int
    step: int
    text: str


def resized(cluster: Cluster, workers: int) -> Cluster:
    """The same cluster with so many workers in its group. Raises ConfigError.

    Where every worker has a server beside it (AllReduce), that stays so; where all workers live in one unit, that, too.
    """
    per_unit = workers if 1 < cluster.nworkers_per_procs == cluster.nworkers_per_group else cluster.nworkers_per_procs
    beside = all_reduces(cluster)
    return replace(
        cluster,
        nworkers_per_group=workers,
        nworkers_per_procs=per_unit,
        nservers_per_group=workers if beside else cluster.nservers_per_group,
        nservers_per_procs=per_unit if beside else cluster.nservers_per_procs,
    )


@dataclass(slots=True)
class ResizeState:
    """Of one life of a job; `job` is as it is now."""

    job: Job
    under_way: ResizeRequest | None = None
    due: float | None = None
    """When the snapshot has to be there."""
    _next: Job | None = None
    _bound: Bounded | None = None

    def begin(self, wish: ResizeRequest, now: float) -> RequestSnapshot:
        """Raises ConfigError for what cannot be, as far as the conf, and what a script has said, show it."""
        self._next = self._wanted(wish)
        self.under_way, self.due = wish, now + wish.within_s
        return RequestSnapshot()

    def _wanted(self, wish: ResizeRequest) -> Job:
        workers = self._count(wish)
        self._check(wish, workers)
        try:
            job = replace(self.job, cluster=resized(self.job.cluster, workers))
            replica_placement.check(job, layout(job.cluster))
        except ConfigError as error:
            raise ConfigError("", None, f"the job cannot go on with {_workers(workers)}: {error}") from None
        return job

    def _count(self, wish: ResizeRequest) -> int:
        return self.job.cluster.nworkers_per_group + (-wish.workers if wish.verb == LEAVE else wish.workers)

    def _check(self, wish: ResizeRequest, workers: int) -> None:
        cluster, bound, why = self.job.cluster, self._bound, ""
        if cluster.nworker_groups > 1:
            why = f"the job has {cluster.nworker_groups} worker groups, which come and go as a whole: say --group"
        elif self.under_way is not None:
            why = "the number of its workers is being changed just now: try again when that is done"
        elif not wants_snapshots(self.job):
            why = "it would go on from a snapshot, and the job takes none (snapshot_s: 0, checkpoint_freq: 0)"
        elif wish.workers < 1:
            why = f"{wish.workers} workers cannot {wish.verb}: at least 1"
        elif workers < 1:
            why = f"the job has {_workers(cluster.nworkers_per_group)}, and one has to stay"
        elif bound is not None and (not bound.most or workers > bound.most):
            why = f"the job cannot go on with {_workers(workers)}: {bound.text}"
        if why:
            raise ConfigError("", None, why)

    def bound(self, event: Bounded) -> None:
        """What the script says of its batches, or of its model."""
        self._bound = event

    def answered(self, event: Saved | Unsaved, number: int) -> ResizeRefused | RestartResized | None:
        """The snapshot is there, or cannot be taken; None: nobody has asked for it here."""
        wish, job = self.under_way, self._next
        if wish is None or job is None:
            return None
        if isinstance(event, Unsaved):
            return self.give_up(f"it would go on from a snapshot, and none can be taken: {event.text}")
        self.forget()
        return RestartResized(wish, job, number, event.step, _told(wish, job.cluster.nworkers_per_group, event.step))

    def give_up(self, why: str) -> ResizeRefused | None:
        """Nothing comes of what is under way."""
        wish = self.under_way
        self.forget()
        return None if wish is None else ResizeRefused(wish, why)

    def forget(self) -> None:
        """Nothing is under way."""
        self.under_way = self.due = self._next = None

    def late(self, now: float) -> ResizeRefused | None:
        """Whoever waits for a snapshot that does not come."""
        if self.under_way is None or self.due is None or now < self.due:
            return None
        seconds = f"{self.under_way.within_s:g} s (--within)"
        return self.give_up(f"no snapshot was there within {seconds}, so the job trains on as it was")


def _told(wish: ResizeRequest, now: int, step: int) -> str:
    who = "a worker has" if wish.workers == 1 else f"{wish.workers} workers have"
    what = "left" if wish.verb == LEAVE else "joined"
    return f"{who} {what}: the job goes on behind step {step} with {_workers(now)}"


def _workers(count: int) -> str:
    return f"{count} worker" if count == 1 else f"{count} workers"
