"""Policy for process deaths: what is lost, what restarts, and when the job fails.

A process death is a root cause. Connection errors that other processes report because of it are not. So an error that
may follow from a death waits for one, while an exception of the user's program, or a wrong setting, ends the job at
once.

* The policy is pure. It receives events and the time, and returns actions.
* A process that stays frozen is ended, and counts as dead.
* The loss of a process that has finished changes nothing.
* Over several units unit 0 decides for all. The others send it their events (`follower.py`). A unit without a heartbeat
  is lost with all its processes.
* A restart has no delay, because the old processes have ended by then. `restarts` limits how often it happens.
* A group that has exhausted `restarts` is given up where the other groups can continue without it.
* Workers leave or join a job of one group between two attempts of the whole job (`resize.py`).
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from topotrain.config.job import ConfigError, Job, OnFailure
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
    Incident,
    Joined,
    Left,
    Lost,
    Missed,
    Resized,
    Saved,
    Started,
    StepDone,
    Unrepeatable,
    Unsaved,
)
from topotrain.extensions.elastic.eligibility import absent_groups, leave_refusal, refusal, singly
from topotrain.extensions.replication import replica_placement
from topotrain.extensions.replication.replica_placement import ReplicaPlacement
from topotrain.launch import choose_cause
from topotrain.launch.recovery.elastic_groups import (
    JOIN,
    LEAVE,
    LOSE,
    AnswerRequest,
    AskServers,
    GroupEntry,
    GroupRequest,
    GroupState,
    GroupStates,
    ReportGone,
)
from topotrain.launch.recovery.recovery_actions import EndProcess, FailJob, PlaceReplica, RestartGroup, RestartJob, Word
from topotrain.launch.recovery.recovery_time import RecoveryTimes
from topotrain.launch.recovery.resize import RequestSnapshot, ResizeRefused, ResizeRequest, ResizeState, RestartResized
from topotrain.launch.recovery.restart_budget import RestartBudget
from topotrain.launch.recovery.stopped_processes import StoppedProcesses
from topotrain.launch.recovery.unit_map import UnitMap

CAUSE_S, FAR_CAUSE_S = 1.0, 6.0
"""Seconds for which an error waits for a death that may have caused it, on one host and over several units."""
_WHOLE = -1  # the key of the whole job, besides those of the groups


@dataclass(frozen=True, slots=True)
class RestartTerms:
    """The limits of restarts in a job.

    groups: the worker groups that can restart alone.
    limit: the number of restarts within WINDOW_S, of each group and of the whole job.
    refusals: for each group, the reason why it cannot leave and join; "": it can.
    absent: the groups that are absent at the start.
    singly: a worker restarts without the others of its group.
    cause_s: seconds for which an error waits for a death that may have caused it.
    door: groups can be asked to leave and join through the control socket.
    """

    groups: frozenset[int]
    limit: int
    refusals: Mapping[int, str] = field(default_factory=dict)
    absent: frozenset[int] = frozenset()
    singly: bool = False
    cause_s: float = CAUSE_S
    door: bool = True


@dataclass(slots=True)
class _Told:
    """The known state of the present attempt of the job."""

    up: set[str]
    """Residents with a process that has not ended, or is about to restart."""
    leaving: set[str] = field(default_factory=set)
    """Restarting workers, until their new process has started."""
    finished: set[str] = field(default_factory=set)
    incarnations: dict[int, int] = field(default_factory=dict)
    held: list[Failed] = field(default_factory=list)
    bounds: dict[bool, str] = field(default_factory=dict)
    """Reasons, found by scripts, why no group can restart alone (False) and why the job cannot restart (True)."""
    frozen: StoppedProcesses = field(default_factory=StoppedProcesses)
    gone: set[int] = field(default_factory=set)
    """The units that have vanished."""
    missed: set[str] = field(default_factory=set)
    """Servers that have lost the connection to another server that was not reported as ended."""


class RecoveryPolicy:
    """Decides about a job, over all its attempts.

    Args:
        topology: the layout of the whole job.
        terms: the limits of restarts.
        began: when the job started, by the clock that gives the methods their time.
        twice: every server has two replicas.
        near: the workers that report every step. None: all do. Other workers report steps only while `listens` is True.
        resizing: the state for changes of the number of workers. None: it cannot change.
    """

    def __init__(
        self,
        topology: Topology,
        terms: RestartTerms,
        began: float,
        twice: bool = False,
        near: frozenset[str] | None = None,
        resizing: ResizeState | None = None,
    ) -> None:
        self._began, self._near = began, near
        self._allowance = RestartBudget(terms.limit, began)
        self._incidents = 0
        self._fresh = 0  # server processes that have replaced another one
        self._settle(topology, terms, twice, resizing)

    def _settle(self, topology: Topology, terms: RestartTerms, twice: bool, resizing: ResizeState | None) -> None:
        """Initialize what depends on the layout."""
        self._terms, self._resizing = terms, resizing
        self._topology, self._homes = topology, UnitMap(topology)
        self._units = {f"unit {unit.rank}": unit.rank for unit in topology.units}
        residents = [resident for unit in topology.units for resident in (*unit.workers, *unit.servers)]
        workers = [worker for unit in topology.units for worker in unit.workers]
        self._residents = frozenset(map(str, residents))
        self._group_of = {str(worker): worker.group for worker in workers}
        servers = [server for unit in topology.units for server in unit.servers]
        self._seat_of = {str(server): server.index for server in servers} if twice else {}
        self._seats = ReplicaPlacement(replica_placement.domains(topology)) if twice else None
        self._differed: set[str] = set()  # servers with replicas that have differed once
        self.attendance = GroupStates(terms.refusals, terms.absent)
        self._told = _Told(self._up())
        self._waits = RecoveryTimes(self._group_of, self._near)
        self._over = False  # the job ends, or this attempt does
        self._due: float | None = None  # when the wait for the cause of an error ends

    @property
    def due(self) -> float | None:
        """The time at which `turn` has to be called next; None: no timer runs."""
        if self._over:
            return None
        change = None if self._resizing is None else self._resizing.due
        found = (self._due, self._told.frozen.due, self.attendance.due, change)
        return min((due for due in found if due is not None), default=None)

    @property
    def complete(self) -> bool:
        """Whether every process has ended, and none is to restart."""
        told = self._told
        return not (self._over or told.up or told.leaving or told.held)

    @property
    def suspects(self) -> bool:
        """Whether an error was reported that may follow from an unreported loss."""
        return bool(self._told.held or self._told.missed)

    @property
    def gone(self) -> AbstractSet[int]:
        """Units that have vanished in this attempt of the job.

        Their later messages are ignored.
        """
        return self._told.gone

    @property
    def listens(self) -> bool:
        """Whether every step matters, because some worker has not recovered yet."""
        return bool(self._waits)

    def renewed(self) -> None:
        """Reset the state for a restart of the whole job."""
        self.attendance.renewed()
        self._told = _Told(self._up())
        self._waits.renewed()
        self.stands(self._topology)
        self._resizing = None if self._resizing is None else ResizeState(self._resizing.job)
        self._over, self._due = False, None

    def stands(self, topology: Topology) -> None:
        """Use the units of the next attempt, which may run on other hosts.

        Raises ValueError where the hosts do not allow two replicas, see `replica_placement.check`.
        """
        self._topology, self._homes = topology, UnitMap(topology)
        self._seats = None if self._seats is None else ReplicaPlacement(replica_placement.domains(topology))

    def relaid(self, job: Job, topology: Topology) -> None:
        """Use another layout for the next attempt of the whole job.

        Restarts are still counted over all attempts.
        """
        waited = self._waits
        self._settle(topology, _terms(job, topology), job.cluster.replicas > 1, ResizeState(job))
        self._waits.take_over(waited)

    @property
    def missing(self) -> set[str]:
        """Workers that are absent and that the job does not wait for."""
        return {who for who, group in self._group_of.items() if group in self.attendance.away}

    def _up(self) -> set[str]:
        return set(self._residents - self.missing)

    def _members(self, group: int) -> set[str]:
        return {who for who, number in self._group_of.items() if number == group}

    def _all_finished(self) -> bool:
        """Return whether every present worker has finished.

        A group that has just joined is not counted, because it has not begun.
        """
        coming = {who for who, group in self._group_of.items() if self._arriving(group)}
        return self._group_of.keys() - self.missing - coming <= self._told.finished

    def _arriving(self, group: int) -> bool:
        return group in self._terms.refusals and self.attendance[group].arriving

    def heard(self, event: Event, now: float) -> list[Word]:
        """Return the actions that follow from an event.

        They include the event itself where it is to be shown.
        """
        told = self._told
        told.frozen.heard(event, now)
        match event:
            case Failed():
                return self._failed(event, now)
            case Lost(who=who, text=text, log=log):
                return self._lost(Failed(who, "died", text, log), now)
            case Started(who=who) if who in self._residents:
                told.leaving.discard(who)
                told.up.add(who)
            case Exited(who=who) if who not in told.leaving:
                # A unit ends after all its residents.
                told.up -= self._homes.who(self._units[who]) if who in self._units else {who}
                return [event, *self._emptied(self._group_of.get(who), now)]
            case Unrepeatable(text=text, job=job):
                told.bounds[job] = text
                return []
            case Agreed():
                return self._agreed(event, now)
            case Bounded():
                if self._resizing is not None:
                    self._resizing.bound(event)
                return []
            case Saved(why="end") | Unsaved():
                return [event, *self._snapshot(event, now)]
            case Finished(who=who):
                told.finished.add(who)
                return [event, *self._stepped(who, now), *self._needless()]
            case Covered(who=who, shadows=shadows) if self._seats is not None:
                self._seats.covered(self._seat_of[who], shadows)
                told.missed.discard(who)
            case Missed(who=who):
                told.missed.add(who)
            case Differs() if self._seats is not None:
                return self._unlike(event, self._seats, now)
            case StepDone(who=who):
                return [event, *self._stepped(who, now)]
            case _:
                pass
        return [event]

    def turn(self, now: float) -> list[Word]:
        """Return the actions that are due by time.

        They follow from processes that were frozen for too long, and from waits that are over.
        """
        found: list[Word] = []
        for lost, since in [] if self._over else self._told.frozen.over(now):
            # It counts as lost since it stopped, because the others have waited for it since then.
            found += [EndProcess(lost.who), *self._lost(lost, since)]
        for group in self.attendance.late(now):
            part = self.attendance[group]
            part.how = f"did not leave within {part.within_s:g} s and was ended"
            found += self._dismiss(group)
        late = None if self._resizing is None or self._over else self._resizing.late(now)
        return found + self._explained(now) + ([] if late is None else [late])

    def _explained(self, now: float) -> list[Word]:
        """Return the actions after the wait for the cause of an error."""
        if self._due is None or now < self._due:
            return []
        self._due = None
        held, self._told.held = self._told.held, []
        cause = choose_cause(held)
        if cause is None:
            return []
        found = self._follows(cause, now)
        if found is None:
            return self._give_up(*held)
        for other in held:  # each group with a loss restarts
            group = self._group_of.get(other.who)
            same = other is cause or (group == self._group_of.get(cause.who) and not self._terms.singly)
            if not (self._over or same or group is None) and other.kind == "peer":
                found += self._follows(other, now) or []
        return found

    def _follows(self, cause: Failed, now: float) -> list[Word] | None:
        """Return the actions after an error without another cause.

        None means that the job fails.
        """
        group = self._group_of.get(cause.who, _WHOLE)
        if cause.who in self._told.leaving:
            return []
        if self._arriving(group):
            return self._lost(cause, now)
        # A restarted worker may be refused because the servers are past the point where they could accept it.
        again = self._waits.for_group(group)
        return self._lost(cause, now, alone=not again) if cause.kind == "peer" or again else None

    # --- causes

    def _failed(self, failed: Failed, now: float) -> list[Word]:
        if self._over:
            return [failed]
        if failed.who in self._told.leaving:
            return []
        if failed.kind in ("program", "config"):
            self._over, self._due = True, None
            return [failed]
        if failed.kind == "died":
            return self._lost(failed, now)
        if self.attendance.going(self._group_of.get(failed.who)):
            return self._dismiss(self._group_of[failed.who])
        if failed.kind == "quarantine" and failed.who in self._group_of:
            return self._lose(self._group_of[failed.who], failed, "is in quarantine", now)
        self._told.held.append(failed)
        self._due = self._due or now + self._terms.cause_s
        return []

    def vanished(self, rank: int, lost: Failed, now: float) -> list[Word]:
        """Return the actions after the loss of a unit with all its processes."""
        told, gone = self._told, self._homes.who(rank)
        if self._over or rank in told.gone:
            return []
        told.gone.add(rank)
        told.up -= gone
        told.leaving -= gone
        for who in gone:
            told.frozen.forget(who)
        servers = gone & self._seat_of.keys()
        if gone <= told.finished or (self._all_finished() and not servers):
            return [self._incident(lost, "nothing is missing: its work was done", now)]
        groups = {self._group_of[who] for who in gone if who in self._group_of and who not in told.finished}
        groups -= self.attendance.away
        rest = set(self._group_of.values()) - self.attendance.away - groups
        lasting = gone - self._group_of.keys() - servers
        if lasting or not rest or not all(self.attendance.elastic(group) for group in groups):
            return self._renew(lost, now) if True not in told.bounds else self._give_up(self._unrepeated(lost))
        found = self._lost_servers(servers, lost, now) if servers else []
        for group in [] if self._over else sorted(groups):
            found += (
                self._emptied(group, now)
                if self.attendance.going(group)
                else self._lose(group, lost, "is given up", now)
            )
        return found

    def _lost(self, lost: Failed, now: float, alone: bool = True) -> list[Word]:
        """Return the actions after the loss of a process.

        alone: its group may restart without the others.
        """
        if self._over:
            return [lost]
        if lost.who in self._told.leaving:
            return []
        if lost.who in self._seat_of and alone:
            return self._lost_servers({lost.who}, lost, now)
        group = self._group_of.get(lost.who)
        if group is not None and self.attendance.going(group):
            self.attendance[group].how = self.attendance[group].how or "was lost while it left"
            return self._dismiss(group)
        if lost.who in self._told.finished or self._all_finished():
            incident = self._incident(lost, "nothing is missing: its work was done", now)
            return [incident, *(self._dismiss(group) if group is not None and self._arriving(group) else [])]
        served = self._told.finished <= self._group_of.keys()  # else some servers have ended with their final values
        if alone and served and group is not None and group in self._terms.groups and not self._told.bounds:
            return self._regroup(group, lost, now)
        if True not in self._told.bounds:
            return self._renew(lost, now)
        return self._give_up(self._unrepeated(lost))

    def _lost_servers(self, gone: AbstractSet[str], lost: Failed, now: float) -> list[Word]:
        """Return the actions after the loss of replicated servers.

        They are needed until the workers' processes have ended, not only their scripts.
        """
        told, seats = self._told, self._seats
        assert seats is not None
        missed = sorted(gone - told.finished)
        heirs = {heir for who in missed for heir in seats.heirs(self._seat_of[who])}
        ended = {seat for who, seat in self._seat_of.items() if who in told.finished}
        if not missed or heirs & ended or not self._group_of.keys() & told.up:
            return [self._incident(lost, "nothing is missing: its work was done", now)]
        return self._reseat(missed, lost, now)

    def _reseat(self, missed: Sequence[str], lost: Failed, now: float) -> list[Word]:
        """Replace lost server processes; their complete backups become primaries.

        All of them are marked as lost before any is replaced, because none can continue from a replica that was in
        another.
        """
        seats, keys = self._seats, {who: _WHOLE - 1 - self._seat_of[who] for who in missed}
        spent = next((key for key in keys.values() if not self._allowance.allows(key, now)), None)
        if spent is not None:
            return self._give_up(self._exhausted(lost, spent))
        moved = seats is not None and seats.standing[0].lead in map(self._seat_of.__getitem__, missed)
        if seats is None or not all(seats.lost(self._seat_of[who]) for who in missed):
            return self._renew(lost, now) if True not in self._told.bounds else self._give_up(self._unrepeated(lost))
        told, words = self._told, list[Word]()
        for who, key in keys.items():
            self._allowance.count(key, _what(lost), now)
            words.append(self._refilled(who, seats, lost))
        told.held = [held for held in told.held if held.who not in self._seat_of]
        told.missed.clear()
        self._due = self._due if told.held else None
        self._waits.begin(self._incidents, None, now)
        incident = self._incident(
            lost, _seated([word.unit for word in words if isinstance(word, PlaceReplica)], lost), now
        )
        again = self._said_again() if moved else []
        if self._resizing is not None and self._resizing.under_way is not None:
            again = [*again, RequestSnapshot()]  # the process asked before may have died
        return [incident, *words, *again]

    def _refilled(self, who: str, seats: ReplicaPlacement, lost: Failed) -> PlaceReplica:
        """Replace a server process, where a unit may host the replacement."""
        told, seat = self._told, self._seat_of[who]
        rank = self._homes.refuge(who, seat, seats, told.gone)
        told.frozen.forget(who)
        if rank >= 0:
            seats.filled(seat, self._homes.domain(seat, rank))
            self._homes.move(who, rank)
            told.leaving.add(who)
            told.up.add(who)
            self._fresh += 1
        return PlaceReplica(who, self._fresh, _what(lost), seats.to_data(), rank)

    def _said_again(self) -> list[Word]:
        """Return open questions to the coordinator again, for its successor.

        The coordinator may not have received them. Repeating them does no harm.
        """
        words: list[Word] = [AskServers(wish, group) for group, wish in self.attendance.asked()]
        gone = sorted(group for group in self.attendance.away)
        return words + [ReportGone(group, self._told.incarnations.get(group, 0) + 1) for group in gone]

    def speaks(self, server: Address) -> tuple[str, int]:
        """Return the process in which this server is active, and its unit."""
        lead = server.index if self._seats is None else self._seats.standing[server.index].lead
        home = str(Address(server.role, server.group, lead))
        return home, self._homes.of(home)

    def _unlike(self, event: Differs, seats: ReplicaPlacement, now: float) -> list[Word]:
        """Return the actions after the replicas of a server have diverged.

        Only faulty memory or a bug can cause this.
        """
        who = event.who
        seats.uncovered(self._seat_of[who], event.shadows)
        if self._over:
            return []
        if who in self._differed:
            text = f"{who} and its second copy differ once more, so the values of one of them are wrong"
            return self._give_up(Failed(who, "internal", f"{text}: look at the memory of their hosts", ""))
        self._differed.add(who)
        found = Failed(who, "internal", f"{who} and its second copy differ", "")
        return [self._incident(found, "the job goes on with the first; the second copy is made anew", now)]

    def _needless(self) -> list[Word]:
        """End server processes that are only backups, once all primaries have finished."""
        if self._seats is None:
            return []
        told = self._told
        leads = {who for who, seat in self._seat_of.items() if seat in self._seats.leads()}
        rest = sorted(self._seat_of.keys() - told.finished) if leads <= told.finished else []
        told.finished.update(rest)
        told.leaving.difference_update(rest)
        return [EndProcess(who) for who in rest]

    def _regroup(self, group: int, lost: Failed, now: float) -> list[Word]:
        if not self._allowance.allows(group, now):
            return self._lose(group, self._exhausted(lost, group), "is given up", now)
        self._allowance.count(group, _what(lost), now)
        answers = self._not_now(group)
        who = lost.who if self._terms.singly else ""
        incarnation = self._again(group, who)
        self._waits.begin(self._incidents, group, now)
        what = "it starts again, and its group continues meanwhile" if who else f"group {group} starts again"
        incident = self._incident(lost, f"{what} (incarnation {incarnation})", now)
        return [incident, RestartGroup(group, incarnation, _what(lost), who), *answers]

    def _again(self, group: int, who: str = "") -> int:
        """Prepare a restart of a group, or of one worker; return the incarnation."""
        told = self._told
        members = self._forget({who} if who else self._members(group))
        told.leaving |= members
        told.up |= members
        told.finished -= members
        told.incarnations[group] = told.incarnations.get(group, 0) + 1
        return told.incarnations[group]

    def _forget(self, members: set[str]) -> set[str]:
        """Drop the recorded events of these workers; return the workers."""
        told = self._told
        self._waits.forget(members)
        for who in members:
            told.frozen.forget(who)
        told.held = [held for held in told.held if held.who in self._group_of and held.who not in members]
        self._due = self._due if told.held else None
        return members

    def _renew(self, lost: Failed, now: float) -> list[Word]:
        if not self._allowance.allows(_WHOLE, now):
            return self._give_up(self._exhausted(lost, _WHOLE))
        self._allowance.count(_WHOLE, _what(lost), now)
        self._over, self._due = True, None
        self._waits.widen()
        self._waits.begin(self._incidents, None, now)
        return [self._incident(lost, "the whole job starts again", now), RestartJob(_what(lost))]

    def _give_up(self, *failures: Failed) -> list[Word]:
        self._over, self._due = True, None
        return [FailJob(failures)]

    # --- workers that leave, and come

    def resize(self, wish: ResizeRequest, now: float) -> list[Word]:
        """Return the actions after a request to resize.

        The answer is among them, or comes later.
        """
        if self._resizing is None or self._over or self._all_finished():
            return [ResizeRefused(wish, "the job is ending, or the whole job is restarting")]
        if True in self._told.bounds:
            return [ResizeRefused(wish, f"it would resume from a snapshot, but cannot: {self._told.bounds[True]}")]
        try:
            return [self._resizing.begin(wish, now)]
        except ConfigError as error:
            return [ResizeRefused(wish, str(error))]

    def ends(self) -> list[Word]:
        """Return the actions when the job is asked to end after its next step.

        A pending resize is refused.
        """
        refused = None if self._resizing is None else self._resizing.give_up("the job is ending")
        return [] if refused is None else [refused]

    def _snapshot(self, event: Saved | Unsaved, now: float) -> list[Word]:
        """Return the actions after the first server's reply about a snapshot.

        A pending resize may have waited for it.
        """
        if self._resizing is None or self._over:
            return []
        if self._resizing.under_way is not None and self._all_finished():
            late = self._resizing.give_up("the job has ended meanwhile")
            return [] if late is None else [late]
        former = self._resizing.job.cluster.nworkers_per_group
        word = self._resizing.answered(event, self._incidents)
        if not isinstance(word, RestartResized):
            return [] if word is None else [word]
        number, self._incidents = self._incidents, self._incidents + 1
        self._over, self._due = True, None
        self._waits.widen()
        self._waits.begin(number, None, now)
        workers = word.job.cluster.nworkers_per_group
        return [Resized(number, former, workers, word.step, now - self._began), word]

    # --- groups that leave, and come

    def wish(self, wish: GroupRequest, now: float) -> list[Word]:
        """Return the actions after a request that a group joins or leaves.

        The answer is among them, or comes later.
        """
        if self._over:
            return [_no(wish, "the job is ending, or the whole job is restarting")]
        why = self.attendance.refusal(wish)
        if why:
            return [_no(wish, why)]
        part = self.attendance[wish.group]
        part.state = GroupState.COMING if wish.verb == JOIN else GroupState.ASKED
        part.within_s = wish.within_s
        return [AskServers(wish.verb, wish.group, self._told.incarnations.get(wish.group, 0))]

    def _agreed(self, event: Agreed, now: float) -> list[Word]:
        """Return the actions after an answer of the servers."""
        if self._over or event.group not in self._terms.refusals:
            return []
        group, part = event.group, self.attendance[event.group]
        if (event.wish, part.state) == (JOIN, GroupState.COMING):
            if event.text:
                part.state = GroupState.AWAY
                return [_no(GroupRequest(JOIN, group), f"group {group} cannot join: {event.text}")]
            self.attendance.put(group, GroupEntry(arriving=True))
            incarnation = self._again(group)
            joined = Joined(group, incarnation, now - self._began)
            text = f"group {group} starts (incarnation {incarnation})"
            return [joined, RestartGroup(group, incarnation, "it joins the job"), AnswerRequest(JOIN, group, text)]
        if (event.wish, part.state) == (LEAVE, GroupState.ASKED):
            if event.text:
                part.state = GroupState.HERE
                return [_no(GroupRequest(LEAVE, group), f"group {group} cannot leave: {event.text}")]
            part.state, part.until, part.agreed = GroupState.LEAVING, now + part.within_s, True
            return self._emptied(group, now)
        if (event.wish, part.state) == (LOSE, GroupState.LOST):
            if event.text and part.lost is not None:
                alone = part.lost.who in self._group_of  # else its unit is gone, but may be replaced
                return self._give_up(part.lost) if alone else self._renew(part.lost, now)
            part.agreed = True
            return self._emptied(group, now)
        return []

    def _lose(self, group: int, lost: Failed, how: str, now: float) -> list[Word]:
        """Give up a group that cannot restart.

        The other groups continue if the group's servers agree.
        """
        if not self.attendance.elastic(group):
            return self._give_up(lost)
        answers = self._not_now(group)
        self.attendance.put(group, GroupEntry(GroupState.LOST, how=how, lost=lost))
        self._forget(self._members(group))
        self._waits.drop(group)
        back = ", which `topotrain join` can bring back" if self._terms.door else ""
        action = f"the job goes on without group {group}{back}"
        ask = AskServers(LOSE, group, self._told.incarnations.get(group, 0))
        return [self._incident(lost, action, now), *self._dismiss(group), ask, *answers]

    def _emptied(self, group: int | None, now: float) -> list[Word]:
        """Return the actions once a leaving group has no process left."""
        if group is None or self._over or not self.attendance.going(group):
            return []
        part, members = self.attendance[group], self._members(group)
        if not part.agreed or members & self._told.up:
            return []
        if members <= self._told.finished:
            self.attendance.put(group, GroupEntry())
            return [_no(GroupRequest(LEAVE, group), f"group {group} has finished its scripts meanwhile")]
        self._forget(self._members(group))
        how, gone = part.how or "has left", self._told.incarnations.get(group, 0) + 1
        self.attendance.put(group, GroupEntry(GroupState.AWAY))
        left = Left(group, how, now - self._began)
        return [left, ReportGone(group, gone), AnswerRequest(LEAVE, group, f"group {group} {how}")]

    def _not_now(self, group: int) -> list[Word]:
        """Refuse a pending request to leave, because the group has lost a process."""
        if group not in self._terms.refusals or self.attendance[group].state is not GroupState.ASKED:
            return []
        self.attendance[group].state = GroupState.HERE
        return [_no(GroupRequest(LEAVE, group), f"group {group} has just lost a process, and starts again: try again")]

    def _dismiss(self, group: int) -> list[Word]:
        """End the rest of a group."""
        return [EndProcess(who) for who in sorted(self._members(group) & self._told.up)]

    def _incident(self, lost: Failed, action: str, now: float) -> Incident:
        number, self._incidents = self._incidents, self._incidents + 1
        return Incident(number, lost.who, _what(lost), action, now - self._began)

    def _unrepeated(self, lost: Failed) -> Failed:
        """Add the reason why nothing restarts, where the user wants restarts."""
        if lost.kind != "died" or not self._terms.limit:
            return lost
        return replace(lost, text=f"{lost.text}; it does not start again: {self._told.bounds[True]}")

    def _exhausted(self, lost: Failed, key: int) -> Failed:
        """Add the earlier causes of restarts to the last one."""
        before = self._allowance.before(key)
        name = "the job" if key == _WHOLE else f"group {key}" if key >= 0 else f"the process of {lost.who}"
        return replace(lost, text=f"{_what(lost)}, and {name} has started again {before}") if before else lost

    def _stepped(self, who: str, now: float) -> list[Word]:
        """Record a step of a worker; return the recoveries that it completes."""
        if self._over or who in self._told.leaving:
            return []
        group = self._group_of.get(who)
        if group is None:  # the Finished event of a server
            return []
        if self._arriving(group):
            self.attendance[group].arriving = False
        return [*self._waits.step(who, self._told.finished, now)]


def _what(lost: Failed) -> str:
    """Return a description of the loss that begins with the process's name."""
    return lost.text if lost.text.startswith(lost.who) else f"{lost.who} cannot go on: {lost.text}"


def _seated(units: Sequence[int], lost: Failed) -> str:
    """Describe what follows from replacing server processes in these units.

    -1 means that a server is not replaced.
    """
    if not lost.who.startswith("unit"):
        return "its second copy goes on; a fresh process becomes the second one"
    if min(units) < 0:
        return "the second copies of its servers go on, alone where no other unit may have a second one"
    where = " and ".join(f"unit {unit}" for unit in sorted(set(units)))
    return f"the second copies of its servers go on; fresh processes in {where} become the second ones"


def _no(wish: GroupRequest, error: str) -> AnswerRequest:
    return AnswerRequest(wish.verb, wish.group, "", error)


def recovery(job: Job, topology: Topology, began: float, near: frozenset[str] | None = None) -> RecoveryPolicy | None:
    """Return the policy of a job; None where a death ends the job.

    near: the workers of this unit, where another tool starts the units. None: all units have one launcher.
    Raises ConfigError.
    """
    replica_placement.check(job, topology)
    if job.on_failure is not OnFailure.kContinue:
        return None
    terms = _terms(job, topology)
    if near is not None:
        terms = replace(terms, cause_s=FAR_CAUSE_S if len(topology.units) > 1 else CAUSE_S, door=False)
    return RecoveryPolicy(topology, terms, began, job.cluster.replicas > 1, near, ResizeState(job))


def _terms(job: Job, topology: Topology) -> RestartTerms:
    groups = range(topology.worker_groups)
    alone = frozenset(group for group in groups if not refusal(job, topology, group))
    refusals = {group: leave_refusal(job, topology, group) for group in groups}
    return RestartTerms(alone, job.restarts, refusals, absent_groups(job, topology), singly(job))
