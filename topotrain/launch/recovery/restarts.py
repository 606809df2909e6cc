"""Restarts: how many are allowed, what caused each, and how long it took.

This module is pure: it receives events and the time.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from topotrain.core.events import Failed, Incident, Recovered, Resized
from topotrain.launch.recovery.attempt_state import AttemptState
from topotrain.launch.recovery.recovery_actions import Action, FailJob, RestartGroup, RestartJob, RestartResized

WINDOW_S = 600.0
"""The number of seconds over which restarts are counted."""
WHOLE_JOB = -1
"""The key of the whole job in a budget, besides those of the groups."""


@dataclass(slots=True)
class RestartBudget:
    """A limited number of restarts within ten minutes, by a key for each thing.

    limit: the number of restarts of each key within WINDOW_S. began: the start time of the job.
    """

    limit: int
    began: float
    _times: dict[int, deque[tuple[float, str]]] = field(default_factory=dict)

    def allows(self, key: int, now: float) -> bool:
        """Return whether one more restart is within the limit."""
        # A restart that is older than the window no longer counts, so a long job can survive many deaths.
        times = self._times.setdefault(key, deque())
        while times and now - times[0][0] >= WINDOW_S:
            times.popleft()
        # A fault that keeps returning is a fault of the job, and a restart does not fix it.
        return len(times) < self.limit

    def count(self, key: int, what: str, now: float) -> None:
        """Count a restart, and record its cause."""
        self._times[key].append((now, f"at {now - self.began:.1f} s {what}"))

    def history(self, key: int) -> str:
        """Describe the earlier restarts and their causes; "" where there are none."""
        times = self._times[key]
        often = "once" if len(times) == 1 else f"{len(times)} times"
        reasons = "; ".join(text for _, text in times)
        return f"{often} within {WINDOW_S / 60:g} minutes, as `restarts` allows: {reasons}" if times else ""


@dataclass(slots=True)
class _Wait:
    """An incident that ends with the next step of `group`; None: of any group.

    worker: only a step of this worker of the group ends it. The others go on meanwhile.
    """

    number: int
    group: int | None
    since: float
    worker: str = ""
    gap: float = 0.0

    def ends_with(self, who: str, group: int) -> bool:
        """Whether a step of this worker ends the incident."""
        return self.group in (None, group) and self.worker in ("", who)

    def delay(self, seconds: float) -> None:
        """Record a pause between two steps of another group."""
        self.gap = max(self.gap, seconds)


class RecoveryTimes:
    """Seconds until a job trains again after each incident, and delays of others.

    Args:
        group_of: the group of each worker.
        near: the workers that report every step. None: all do. Others report steps only while a recovery is open.
    """

    def __init__(self, group_of: Mapping[str, int], near: frozenset[str] | None) -> None:
        self._group_of, self._near = group_of, near
        self._waits: list[_Wait] = []
        self._stepped: dict[str, float] = {}

    def __bool__(self) -> bool:
        """Return whether a recovery is open."""
        return bool(self._waits)

    def awaits(self, group: int) -> bool:
        """Return whether an open incident ends only with a step of this group."""
        # The survivors of a worker that restarts alone do not restart.
        return any(wait.group == group and not wait.worker for wait in self._waits)

    def begin(self, number: int, group: int | None, now: float, worker: str = "") -> None:
        """Open an incident that ends with a step of this group; None: of any group.

        worker: that ends with a step of this worker.
        """
        self._waits.append(_Wait(number, group, now, worker))
        for who in self._stepped.keys() - (self._near or self._group_of.keys()):
            del self._stepped[who]  # outdated, since not all steps of these workers are reported

    def drop(self, group: int) -> None:
        """Close the incidents that wait for this group."""
        self._waits = [wait for wait in self._waits if wait.group != group]

    def widen(self) -> None:
        """Let all open incidents end with the first step of the restarted job."""
        # After a restart of the whole job no group is special: the first step of any shows that the job trains.
        self._waits = [replace(wait, group=None, worker="") for wait in self._waits]

    def reset(self, group_of: Mapping[str, int]) -> None:
        """Forget the times of all steps, because all processes are new."""
        self._group_of = group_of
        # The open incidents stay: they end with the first step of the new processes.
        self._stepped.clear()

    def forget(self, members: Iterable[str]) -> None:
        """Forget the times of these workers' steps, because they are replaced."""
        for who in members:
            self._stepped.pop(who, None)

    def step(self, who: str, finished: Collection[str], now: float) -> list[Recovered]:
        """Record a step of a worker; return the recoveries that it completes."""
        group, last = self._group_of[who], self._stepped.get(who, now)
        self._stepped[who] = now
        # A loss is over when the affected workers train again, not when a new process has started.
        over = [wait for wait in self._waits if wait.ends_with(who, group)]
        self._waits = [wait for wait in self._waits if wait not in over]
        # The other groups went on with this step, so the pause before it is known now. The survivors of the same group
        # report their pause more exactly (`repeated`).
        for wait in self._waits:
            if wait.group != group:
                wait.delay(now - last)
        return [Recovered(wait.number, now - wait.since, self._gap(wait, finished, now)) for wait in over]

    def repeated(self, who: str, waited_s: float) -> None:
        """A survivor has repeated the step in which a worker of its group was lost."""
        for wait in self._waits:
            if wait.worker and wait.group == self._group_of[who]:
                wait.delay(waited_s)

    def _gap(self, wait: _Wait, finished: Collection[str], now: float) -> float:
        """Return the longest pause between steps of other groups during the incident."""
        if wait.group is None:
            return 0.0
        # A group that has not stepped since counts up to now: its pause is still open.
        others = [w for w, group in self._group_of.items() if group != wait.group and w not in finished]
        return max([wait.gap, *(now - self._stepped[who] for who in others if who in self._stepped)])


class Restarts:
    """The restarts of a job, over all its attempts.

    Args:
        attempt: the present attempt.
        limit: the number of restarts within WINDOW_S, of each group and of the whole job.
        began: the start time of the job.
        near: as for `RecoveryTimes`.
    """

    def __init__(self, attempt: AttemptState, limit: int, began: float, near: frozenset[str] | None) -> None:
        self._attempt, self._limit, self._began = attempt, limit, began
        self.budget = RestartBudget(limit, began)
        self.times = RecoveryTimes(attempt.group_of, near)
        self._incidents = 0

    @property
    def next_incident(self) -> int:
        """The number of the next incident."""
        return self._incidents

    def at(self, now: float) -> float:
        """Return the seconds since the start of the job."""
        return now - self._began

    def incident(self, lost: Failed, action: str, now: float) -> Incident:
        """Return the report of a loss, with the next number."""
        number, self._incidents = self._incidents, self._incidents + 1
        return Incident(number, lost.who, what(lost), action, self.at(now))

    def restart_group(self, group: int, lost: Failed, now: float, worker: str = "", told: bool = False) -> list[Action]:
        """Restart a group, or only one worker of it, after the loss of a process.

        told: as in `RestartGroup`.
        """
        self.budget.count(group, what(lost), now)
        incarnation = self.prepare(group, {worker} if worker else self._attempt.members(group), now)
        # Before `incident`, which takes this number and counts on.
        # With backup workers the first step of the group shows that it trains.
        self.times.begin(self._incidents, group, now, worker if told else "")
        action = "it starts again, and its group continues meanwhile" if worker else f"group {group} starts again"
        incident = self.incident(lost, f"{action} (incarnation {incarnation})", now)
        return [incident, RestartGroup(group, incarnation, what(lost), worker, told)]

    def prepare(self, group: int, members: set[str], now: float) -> int:
        """Record that these workers of a group restart; return their incarnation."""
        self.times.forget(members)
        return self._attempt.restart(group, members, now)

    def restart_job(self, lost: Failed, now: float) -> list[Action]:
        """Restart the whole job if the budget allows it, or end it."""
        if not self.budget.allows(WHOLE_JOB, now):
            return self.give_up(self.exhausted(lost, WHOLE_JOB))
        self.budget.count(WHOLE_JOB, what(lost), now)
        self._begin_attempt(now)
        return [self.incident(lost, "the whole job starts again", now), RestartJob(what(lost))]

    def restart_job_if_possible(self, lost: Failed, now: float) -> list[Action]:
        """Restart the whole job, or end it where its script cannot resume."""
        reason = self._attempt.bounds.get(True)
        if reason is None:
            return self.restart_job(lost, now)
        if lost.kind == "died" and self._limit:  # the user wants restarts, so the error explains why there is none
            lost = replace(lost, text=f"{lost.text}; it does not start again: {reason}")
        return self.give_up(lost)

    def restart_resized(self, action: RestartResized, former: int, now: float) -> list[Action]:
        """Restart the whole job with another number of workers."""
        # The budget is not charged: the user has asked for this restart.
        self._begin_attempt(now)
        number, self._incidents = self._incidents, self._incidents + 1
        workers = action.job.cluster.nworkers_per_group
        return [Resized(number, former, workers, action.step, self.at(now)), action]

    def _begin_attempt(self, now: float) -> None:
        # Open incidents of single groups end with the first step of the new attempt, too.
        self._attempt.end()
        self.times.widen()
        self.times.begin(self._incidents, None, now)

    def give_up(self, *failures: Failed) -> list[Action]:
        """End the job."""
        self._attempt.end()
        return [FailJob(failures)]

    def exhausted(self, lost: Failed, key: int) -> Failed:
        """Add the earlier causes of restarts to the last one."""
        before = self.budget.history(key)
        name = "the job" if key == WHOLE_JOB else f"group {key}" if key >= 0 else f"the process of {lost.who}"
        return replace(lost, text=f"{what(lost)}, and {name} has started again {before}") if before else lost


def what(lost: Failed) -> str:
    """Return a description of the loss that begins with the process's name."""
    return lost.text if lost.text.startswith(lost.who) else f"{lost.who} cannot go on: {lost.text}"
