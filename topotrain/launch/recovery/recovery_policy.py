"""Policy for process deaths: what is lost, what restarts, and when the job fails.

A process death is a root cause. Connection errors that other processes report because of it are not. So an error that
may follow from a death waits for one, while an exception of the user's program, or a wrong setting, ends the job at
once. The policy is pure: it receives events and the time, and returns actions.

* A process that stays frozen is ended, and counts as dead. So does one that could not be started.
* Over several units the leader decides for all. The others send it their events (`follower.py`). A unit without a
  heartbeat is lost with all its processes.
* `restarts` limits how often a group or the job restarts. It has no delay, because the old processes have
  ended by then.
* A group that has exhausted `restarts` is given up where the other groups can continue without it.
* Workers leave or join a job of one group between two attempts of the whole job (`resize.py`).
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from topotrain.config.job import Job, OnFailure
from topotrain.config.topology import Address, Topology
from topotrain.core.events import (
    Agreed,
    Bounded,
    Covered,
    Differs,
    Event,
    Exited,
    Failed,
    Finished,
    Frozen,
    Lost,
    Missed,
    Repeatable,
    Repeated,
    Saved,
    Started,
    StepDone,
    Thawed,
    Unrepeatable,
    Unsaved,
)
from topotrain.extensions.elastic.eligibility import (
    absent_groups,
    in_place_refusal,
    leave_refusal,
    refusal,
    singly,
)
from topotrain.launch import choose_cause
from topotrain.launch.recovery.attempt_state import AttemptState
from topotrain.launch.recovery.elastic_groups import GroupChanges, GroupStates
from topotrain.launch.recovery.recovery_actions import (
    Action,
    EndProcess,
    GroupRequest,
    RequestSnapshot,
    ResizeRefused,
    ResizeRequest,
    refused,
)
from topotrain.launch.recovery.resize import ResizeState
from topotrain.launch.recovery.restarts import WHOLE_JOB, Restarts
from topotrain.launch.recovery.server_replacement import ServerReplacement

CAUSE_S, FAR_CAUSE_S = 1.0, 6.0
"""Seconds for which an error waits for its cause, such as a death, on one host and over several units."""
_DONE = "nothing is missing: its work was done"
_ENDING = "the job is ending, or the whole job is restarting"


POLICY_EVENTS = (
    *(Agreed, Bounded, Covered, Differs, Exited, Failed, Finished, Frozen),
    *(Lost, Missed, Repeatable, Repeated, Started, Thawed, Unrepeatable, Unsaved),
)
"""Events that always count for a policy: the unit that leads is sent them, and the next leader knows them.

Of StepDone and Saved only some do.
"""


@dataclass(frozen=True, slots=True)
class RestartTerms:
    """The limits of restarts in a job.

    groups: the worker groups that can restart alone.
    limit: the number of restarts within WINDOW_S, of each group and of the whole job.
    refusals: for each group, the reason why it cannot leave and join; "": it can.
    absent: the groups that are absent at the start.
    singly: a worker restarts without the others of its group.
    in_place: the groups in which it does, if the scripts of the others can repeat a step.
    cause_s: seconds for which an error waits for a death that may have caused it.
    apart: the units have several launchers, of which none sees all processes.
    """

    groups: frozenset[int]
    limit: int
    refusals: Mapping[int, str] = field(default_factory=dict)
    absent: frozenset[int] = frozenset()
    singly: bool = False
    in_place: frozenset[int] = frozenset()
    cause_s: float = CAUSE_S
    apart: bool = False


class RecoveryPolicy:
    """Decides about a job, over all its attempts.

    Args:
        topology: the layout of the whole job.
        terms: the limits of restarts.
        began: when the job started, by the clock that gives the methods their time.
        replicated: every server has two replicas.
        near: the workers that report every step. None: all do. Other workers report steps only while `wants_steps`.
        resizing: the state for changes of the number of workers. None: it cannot change.
    """

    def __init__(
        self,
        topology: Topology,
        terms: RestartTerms,
        began: float,
        replicated: bool = False,
        near: frozenset[str] | None = None,
        resizing: ResizeState | None = None,
    ) -> None:
        self._attempt = AttemptState(topology, terms.absent)
        self._restarts = Restarts(self._attempt, terms.limit, began, near)
        self._use(topology, terms, replicated, resizing)

    def _use(self, topology: Topology, terms: RestartTerms, replicated: bool, resizing: ResizeState | None) -> None:
        """Initialize what depends on the layout."""
        attempt, restarts = self._attempt, self._restarts
        self._topology, self._terms, self._resizing = topology, terms, resizing
        self._states = GroupStates(terms.refusals, terms.absent)
        self._groups = GroupChanges(self._states, attempt, restarts, terms.in_place)
        self._replicas = ServerReplacement(topology, attempt, restarts) if replicated else None

    @property
    def due(self) -> float | None:
        """The time at which `poll` has to be called next; None: no timer runs."""
        if self._attempt.over:
            return None
        change = None if self._resizing is None else self._resizing.due
        found = (self._attempt.held_until, self._attempt.overdue.due, self._states.due, change)
        return min((due for due in found if due is not None), default=None)

    @property
    def complete(self) -> bool:
        """Whether every process has ended, and none is to restart."""
        attempt = self._attempt
        # An unexplained error counts as a process: a loss that explains it may restart one.
        return not (attempt.over or attempt.up or attempt.leaving or attempt.held)

    @property
    def suspicious(self) -> bool:
        """Whether an error was reported that may follow from an unreported loss."""
        return bool(self._attempt.held or self._attempt.missed)

    @property
    def lost_units(self) -> AbstractSet[int]:
        """Units that have vanished in this attempt; their later messages are ignored."""
        return self._attempt.lost_units

    @property
    def wants_steps(self) -> bool:
        """Whether every step matters, because some worker has not recovered yet."""
        return bool(self._restarts.times)

    @property
    def absent_groups(self) -> frozenset[int]:
        """The worker groups that are absent at the start of the next attempt."""
        return self._states.away_next

    @property
    def missing(self) -> set[str]:
        """Workers that are absent and that the job does not wait for."""
        return {who for who, group in self._attempt.group_of.items() if group in self._states.away}

    def location_of(self, server: Address) -> tuple[str, int]:
        """Return the process in which this server is active, and its unit."""
        process = str(server) if self._replicas is None else self._replicas.primary_of(server)
        return process, self._attempt.unit_of(process)

    def _all_finished(self) -> bool:
        """Return whether every present worker has finished."""
        # A group that has just joined has not begun, so the others do not wait for it.
        arriving = {who for who, group in self._attempt.group_of.items() if self._states.is_arriving(group)}
        return self._attempt.group_of.keys() - self.missing - arriving <= self._attempt.finished

    def begin_attempt(self, topology: Topology | None = None) -> None:
        """Reset the state for a restart of the whole job.

        topology: the units of the attempt, which may run on other hosts; None: the same as before.
        """
        # First, because the attempt begins without the groups that were leaving.
        self._states.reset()
        self._topology = topology or self._topology
        self._attempt.reset(self._topology, self._states.away)
        # The budget of restarts is not reset: it counts over all attempts.
        self._restarts.times.reset(self._attempt.group_of)
        if self._replicas is not None:
            self._replicas.reset(self._topology)
        # The scripts report their limits anew.
        self._resizing = None if self._resizing is None else self._resizing.again(self._resizing.job)

    def begin_resized(self, job: Job, topology: Topology) -> None:
        """Reset the state for a restart of the whole job with another layout."""
        terms = replace(_terms(job, topology), cause_s=self._terms.cause_s, apart=self._terms.apart)
        # `_attempt` and `_restarts` stay the same objects: restarts are counted over all attempts.
        self._attempt.reset(topology, terms.absent)
        self._restarts.times.reset(self._attempt.group_of)
        self._use(topology, terms, job.cluster.replicas > 1, self._resizing and self._resizing.again(job))

    def on_event(self, event: Event, now: float) -> list[Action]:
        """Return the actions that follow from an event, with the event if it is shown."""
        attempt, replicas = self._attempt, self._replicas
        # First, because the end or restart of a process also ends its time as a frozen one. The process before one that
        # is about to start says nothing about that.
        if not (isinstance(event, Exited | Frozen | Thawed) and event.who in attempt.leaving):
            attempt.overdue.on_event(event, now)
        match event:
            case Failed():
                return self._on_failed(event, now)
            case Lost(who=who, pid=0) if who in attempt.residents and not attempt.over:
                attempt.not_started(who)
                return []
            case Lost(who=who, text=text, log=log):
                return self._on_lost(Failed(who, "died", text, log), now)
            case Started(who=who) if who in attempt.residents:
                attempt.started(who)
            # The exit of a process that restarts is expected, and its successor may have started already.
            case Exited(who=who) if who not in attempt.leaving:
                attempt.exited(who)
                # One launcher of all units has such a limit of its own.
                if self._terms.apart and who in attempt.group_of and self._all_finished():
                    attempt.limit_servers(now)
                return [event, *self._groups.on_exit(attempt.group_of.get(who), now)]
            case Unrepeatable(text=text, job=job):
                attempt.bounds[job] = text
                return []
            case Repeatable(who=who, text=text):
                attempt.on_repeatable(who, text)
                return []
            case Repeated(who=who, waited_s=waited_s):
                self._restarts.times.repeated(who, waited_s)
                return []
            case Agreed():
                return [] if attempt.over else self._groups.on_agreed(event, now)
            case Bounded():
                if self._resizing is not None:
                    self._resizing.on_bounded(event)
                return []
            case Saved(why="end") | Unsaved() if self._resizing is not None and not attempt.over:
                return [event, *self._resizing.on_snapshot(event, self._restarts, self._all_finished(), now)]
            case Finished(who=who):
                attempt.finished.add(who)
                return [event, *self._on_step(who, now), *([] if replicas is None else replicas.on_finished())]
            case Covered(who=who, shadows=shadows) if replicas is not None:
                replicas.on_covered(who, shadows)
            case Missed(who=who):
                # A hint only: two servers lose each other when one of them dies, and the death is reported separately.
                attempt.missed.add(who)
            case Differs() if replicas is not None:
                return replicas.on_differs(event, now)
            case StepDone(who=who):
                return [event, *self._on_step(who, now)]
            case _:
                pass
        return [event]

    def poll(self, now: float) -> list[Action]:
        """Return the actions that are due by time."""
        found: list[Action] = []
        for lost, since in [] if self._attempt.over else self._attempt.take_overdue(now):
            # Lost since it stopped: the others have waited for it since then.
            found += [EndProcess(lost.who), *self._on_lost(lost, since)]
            found += self._groups.on_exit(self._attempt.group_of.get(lost.who), now)
        found += self._groups.poll(now)
        late = [] if self._resizing is None or self._attempt.over else self._resizing.poll(now)
        # The losses above come first: they may explain errors that are held back.
        return [*found, *self._explain(now), *late]

    def _on_step(self, who: str, now: float) -> list[Action]:
        """Record a step of a worker; return the recoveries that it completes."""
        group = self._attempt.group_of.get(who)
        # None: the Finished event of a server.
        if self._attempt.over or who in self._attempt.leaving or group is None:
            return []
        self._states.stepped(group)
        return [*self._restarts.times.step(who, self._attempt.finished, now)]

    def _on_failed(self, failed: Failed, now: float) -> list[Action]:
        if self._attempt.over:
            return [failed]
        # The former process reports it, and its successor is on the way.
        if failed.who in self._attempt.leaving:
            return []
        # No restart helps: the same script would raise the same exception.
        if failed.kind in ("program", "config"):
            self._attempt.end()
            return [failed]
        if failed.kind == "died":
            return self._on_lost(failed, now)
        group = self._attempt.group_of.get(failed.who)
        if group is not None and self._states.is_going(group):
            # A group that leaves is no longer needed, so its error ends only the rest of it.
            return self._groups.dismiss(group)
        # Its gradients were not finite several times in a row, which a restart does not change.
        if failed.kind == "quarantine" and group is not None:
            return self._groups.give_up(group, failed, "is in quarantine", now)
        # It may be the consequence of a death that is reported a moment later.
        self._attempt.hold(failed, now + self._terms.cause_s)
        return []

    def _explain(self, now: float) -> list[Action]:
        """Return the actions after the wait for the cause of an error."""
        held = self._attempt.release(now)
        cause = choose_cause(held)
        if cause is None:
            return []
        found = self._on_cause(cause, now)
        if found is None:
            return self._restarts.give_up(*held)
        group_of = self._attempt.group_of
        for other in held:  # each group with a loss restarts
            group = group_of.get(other.who)
            same = other is cause or (group == group_of.get(cause.who) and not self._terms.singly)
            if not (self._attempt.over or same or group is None) and other.kind == "peer":
                found += self._on_cause(other, now) or []
        return found

    def _on_cause(self, cause: Failed, now: float) -> list[Action] | None:
        """Return the actions after an error without another cause; None: the job fails."""
        group = self._attempt.group_of.get(cause.who, WHOLE_JOB)
        if cause.who in self._attempt.leaving:
            return []
        # The servers may have passed the point at which this group could join, so it starts again.
        if self._states.is_arriving(group):
            return self._on_lost(cause, now)
        # A restarted worker may be refused because the servers are past the point where they could accept it.
        again = self._restarts.times.awaits(group)
        return self._on_lost(cause, now, alone=not again) if cause.kind == "peer" or again else None

    def _on_lost(self, lost: Failed, now: float, alone: bool = True) -> list[Action]:
        """Return the actions after the loss of a process.

        alone: its group may restart without the others.
        """
        attempt = self._attempt
        if attempt.over:
            return [lost]
        # It is about to be replaced: the report concerns the former process.
        if lost.who in attempt.leaving:
            return []
        if self._replicas is not None and lost.who in self._replicas.servers and alone:
            return self._on_lost_servers(self._replicas, {lost.who}, lost, now)
        group = attempt.group_of.get(lost.who)
        if group is not None and self._states.is_going(group):
            return self._groups.on_loss(group)
        # Nothing is missing: the process's work is on the servers.
        if lost.who in attempt.finished or self._all_finished():
            arriving = group is not None and self._states.is_arriving(group)
            return [
                self._restarts.incident(lost, _DONE, now),
                *(self._groups.dismiss(group) if group is not None and arriving else []),
            ]
        served = attempt.finished <= attempt.group_of.keys()  # else some servers have ended with their final values
        # Only a worker: a lost server takes the only copy of its shard along, so the whole job resumes.
        if alone and served and group is not None and group in self._terms.groups and not attempt.bounds:
            in_place = group in self._terms.in_place and bool(attempt.survivors(group, lost.who))
            return self._groups.restart(group, lost, now, self._terms.singly or in_place)
        return self._restarts.restart_job_if_possible(lost, now)

    def _on_lost_servers(
        self, replicas: ServerReplacement, gone: AbstractSet[str], lost: Failed, now: float
    ) -> list[Action]:
        """Return the actions after the loss of replicated servers."""
        if not replicas.is_needed(gone):
            return [self._restarts.incident(lost, _DONE, now)]
        moves = replicas.moves_first(gone)
        # `moves` is taken before this: the replacement changes the placement.
        found = replicas.replace(gone, lost, now)
        if self._attempt.over:
            return found
        # The successor has not received what the first server was asked.
        found += self._groups.questions() if moves else []
        # The process that was asked for a snapshot may have died.
        asked = self._resizing is not None and self._resizing.under_way is not None
        return [*found, RequestSnapshot()] if asked else found

    def on_unit_lost(self, rank: int, lost: Failed, now: float) -> list[Action]:
        """Return the actions after the loss of a unit with all its processes."""
        attempt = self._attempt
        # A unit may vanish, return, and be lost once more before the job restarts.
        if attempt.over or rank in attempt.lost_units:
            return []
        gone = attempt.lose_unit(rank)
        # After the last script the job may still need them: `is_needed` decides.
        servers = gone & (set() if self._replicas is None else self._replicas.servers)
        if gone <= attempt.finished or (self._all_finished() and not servers):
            return [self._restarts.incident(lost, _DONE, now)]
        group_of = attempt.group_of
        groups = {group_of[who] for who in gone if who in group_of and who not in attempt.finished} - self._states.away
        # Servers without replicas are irreplaceable: their values are lost with them.
        lasting = gone - group_of.keys() - servers
        if lasting or not all(self._states.is_elastic(group) for group in groups):
            return self._restarts.restart_job_if_possible(lost, now)
        found: list[Action] = []
        if self._replicas is not None and servers:
            found += self._on_lost_servers(self._replicas, servers, lost, now)
        for group in [] if attempt.over else sorted(groups):
            if self._states.is_going(group):
                found += self._groups.on_exit(group, now)
            else:
                found += self._groups.give_up(group, lost, "is given up", now)
        return found

    def on_group_request(self, request: GroupRequest) -> list[Action]:
        """Return the actions after a request that a group joins or leaves."""
        # The answer is among the actions, or comes when the servers have agreed.
        return [refused(request, _ENDING)] if self._attempt.over else self._groups.on_request(request)

    def on_resize_request(self, request: ResizeRequest, now: float) -> list[Action]:
        """Return the actions after a request to resize; the answer may come later."""
        if self._resizing is None or self._attempt.over or self._all_finished():
            return [ResizeRefused(request, _ENDING)]
        # Checked before the snapshot: the restart would fail after all processes have ended.
        if True in self._attempt.bounds:
            text = f"it would resume from a snapshot, but cannot: {self._attempt.bounds[True]}"
            return [ResizeRefused(request, text)]
        return [self._resizing.on_request(request, now, self._attempt.lost_units)]

    def on_stop_request(self) -> list[Action]:
        """Return the actions when the job is asked to end after its next step."""
        # The last snapshot would otherwise start the pending resize, and the job would not end.
        return [] if self._resizing is None else [*self._resizing.give_up("the job is ending")]


def recovery(
    job: Job,
    topology: Topology,
    began: float,
    near: frozenset[str] | None = None,
    kind: type[RecoveryPolicy] = RecoveryPolicy,
) -> RecoveryPolicy | None:
    """Return the policy of a job; None where a death ends the job.

    near: the workers of this unit, where another tool starts the units. None: all units have one launcher.
    kind: the class of the policy.
    """
    if job.on_failure is not OnFailure.kContinue:
        return None
    terms, resizing = _terms(job, topology), ResizeState(job)
    if near is not None:
        # The death of a host is noticed after a lease, and so later than the errors that it causes.
        apart = len(topology.units) > 1
        terms = replace(terms, cause_s=FAR_CAUSE_S if apart else CAUSE_S, apart=apart)
        resizing = ResizeState(job, len(topology.units))
    return kind(topology, terms, began, job.cluster.replicas > 1, near, resizing)


def _terms(job: Job, topology: Topology) -> RestartTerms:
    groups = range(topology.worker_groups)
    alone = frozenset(group for group in groups if not refusal(job, topology, group))
    refusals = {group: leave_refusal(job, topology, group) for group in groups}
    in_place = frozenset(group for group in groups if not in_place_refusal(job, topology, group))
    return RestartTerms(alone, job.restarts, refusals, absent_groups(job, topology), singly(job), in_place)
