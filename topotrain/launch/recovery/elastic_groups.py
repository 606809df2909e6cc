"""Elastic worker groups: groups leave, are given up, and join while a job runs.

This module is pure: it does no I/O and reads no clock. Other groups wait neither for a change nor for a group that was
given up.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from topotrain.core.events import Agreed, Failed, Joined, Left
from topotrain.launch.recovery.attempt_state import AttemptState
from topotrain.launch.recovery.recovery_actions import (
    JOIN,
    LEAVE,
    LOSE,
    Action,
    AnswerRequest,
    AskServers,
    EndProcess,
    GroupRequest,
    ReportGone,
    RestartGroup,
    refused,
)
from topotrain.launch.recovery.restarts import Restarts


class GroupState(Enum):
    """The state of a group. The value is shown to the user."""

    HERE = "trains"
    ASKED = "is asked to leave"
    LEAVING = "is leaving"
    LOST = "is given up"
    AWAY = "is not there"
    COMING = "is asked to join"


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """A worker group and its state.

    until: the time at which a leaving group is ended. how: describes how it left. lost: the reason why it was given up.
    """

    state: GroupState = GroupState.HERE
    within_s: float = 0.0
    until: float | None = None
    how: str = ""
    lost: Failed | None = None
    agreed: bool = False  # the servers continue without it
    arriving: bool = False  # it has joined, but has not completed a step


_QUESTIONS = {GroupState.ASKED: LEAVE, GroupState.COMING: JOIN, GroupState.LOST: LOSE}
"""What the servers are asked about a group in this state."""


class GroupStates:
    """The states of all groups of a job, over all its attempts.

    Args:
        refusals: for each group, the reason why it cannot leave and join; "": it can.
        absent: groups that are absent at the start.
    """

    def __init__(self, refusals: Mapping[int, str], absent: Collection[int] = ()) -> None:
        self._refusals = refusals
        self._groups = {g: GroupEntry(GroupState.AWAY if g in absent else GroupState.HERE) for g in refusals}

    def __contains__(self, group: int) -> bool:
        return group in self._groups

    def __getitem__(self, group: int) -> GroupEntry:
        return self._groups[group]

    def __setitem__(self, group: int, entry: GroupEntry) -> None:
        self._groups[group] = entry

    def change(self, group: int, state: GroupState) -> None:
        """Set the state of a group, and keep the rest."""
        self._groups[group] = replace(self._groups[group], state=state)

    def has_state(self, group: int | None, *states: GroupState) -> bool:
        """Return whether a group is in one of these states."""
        return group in self._groups and self._groups[group].state in states

    @property
    def away(self) -> frozenset[int]:
        """The absent groups."""
        return frozenset(g for g in self._groups if self.has_state(g, GroupState.AWAY, GroupState.COMING))

    @property
    def away_next(self) -> frozenset[int]:
        """The groups that would be absent after a restart of the whole job."""
        # Leaving groups are absent after it, and joining groups are present.
        gone = (GroupState.LEAVING, GroupState.ASKED, GroupState.LOST, GroupState.AWAY)
        return frozenset(g for g in self._groups if self.has_state(g, *gone))

    def is_going(self, group: int | None) -> bool:
        """Whether the loss of this group's processes is expected."""
        return self.has_state(group, GroupState.LEAVING, GroupState.LOST)

    def is_arriving(self, group: int) -> bool:
        """Whether a group has joined, but has not completed a step."""
        return group in self._groups and self._groups[group].arriving

    def stepped(self, group: int) -> None:
        """Record a step of a group, which has arrived with it."""
        if self.is_arriving(group):
            self._groups[group] = replace(self._groups[group], arriving=False)

    def is_elastic(self, group: int) -> bool:
        """Return whether the job can continue without the group."""
        # Group 0 stays to the end, so another group always trains.
        return not self._refusals.get(group, "it is not here")

    def reset(self) -> None:
        """Update the groups for a restart of the whole job."""
        away = self.away_next
        for group in self._groups:
            # Open questions are forgotten: the servers that were asked have ended, too.
            self._groups[group] = GroupEntry(GroupState.AWAY if group in away else GroupState.HERE)

    def __str__(self) -> str:
        """Return the groups and their states as text."""
        return "groups: " + ", ".join(f"{g} {part.state.value}" for g, part in sorted(self._groups.items()))

    def open_questions(self) -> list[tuple[int, str]]:
        """Return the groups with an open question to the servers, and the question."""
        found = [(g, part) for g, part in sorted(self._groups.items()) if not part.agreed]
        return [(g, _QUESTIONS[part.state]) for g, part in found if part.state in _QUESTIONS]

    def refusal(self, request: GroupRequest) -> str:
        """Return why the request must be refused; "": the servers have to decide."""
        part = self._groups.get(request.group)
        if part is None:
            return f"there is no worker group {request.group}; {self}"
        why = self._refusals[request.group]
        if why:
            return f"group {request.group} cannot {request.verb}: {why}"
        wanted = GroupState.AWAY if request.verb == JOIN else GroupState.HERE
        if part.state is not wanted:
            return f"group {request.group} {part.state.value}; {self}"
        return ""

    @property
    def due(self) -> float | None:
        """The time at which the first leaving group has to be gone."""
        return min((part.until for part in self._groups.values() if part.until is not None), default=None)

    def expire(self, now: float) -> list[int]:
        """Return the groups that have used up their time for leaving, each once."""
        late = [(g, part) for g, part in self._groups.items() if part.until is not None and part.until <= now]
        for group, part in late:
            # Without the time limit, so that the group expires once.
            how = f"did not leave within {part.within_s:g} s and was ended"
            self._groups[group] = replace(part, until=None, how=how)
        return [group for group, _ in late]


class GroupChanges:
    """Decides what follows from requests, answers of the servers, and losses.

    Args:
        states: of the job's groups.
        attempt, restarts: of the job.
        told: the groups with servers that wait to be told what restarts.
    """

    def __init__(
        self, states: GroupStates, attempt: AttemptState, restarts: Restarts, told: frozenset[int] = frozenset()
    ) -> None:
        self._states, self._attempt, self._restarts, self._told = states, attempt, restarts, told

    def _incarnation(self, group: int) -> int:
        return self._attempt.incarnations.get(group, 0)

    def questions(self) -> list[Action]:
        """Return open questions to the coordinator again, for its successor."""
        # The former coordinator may not have received them. Repeating them does no harm.
        asked = [AskServers(question, group) for group, question in self._states.open_questions()]
        # One more than the last incarnation: no process of the last one is left either.
        return [*asked, *(ReportGone(group, self._incarnation(group) + 1) for group in sorted(self._states.away))]

    def on_request(self, request: GroupRequest) -> list[Action]:
        """Return the actions after a request. The servers are asked, or it is refused."""
        why = self._states.refusal(request) or self._gone(request)
        if why:
            return [refused(request, why)]
        # The servers decide: only they have the job's progress.
        state = GroupState.COMING if request.verb == JOIN else GroupState.ASKED
        self._states[request.group] = replace(self._states[request.group], state=state, within_s=request.within_s)
        return [AskServers(request.verb, request.group, self._incarnation(request.group))]

    def _gone(self, request: GroupRequest) -> str:
        """Return why a group cannot join because one of its units is lost; "": it can."""
        gone = self._attempt.lost_units_of(request.group) if request.verb == JOIN else []
        if not gone:
            return ""
        unit = f"unit {gone[0]}, which had its workers, is gone"
        return f"group {request.group} cannot join: {unit}, and returns only when the whole job starts again"

    def on_agreed(self, event: Agreed, now: float) -> list[Action]:
        """Return the actions after an answer of the servers."""
        if event.group not in self._states:
            return []
        match event.wish, self._states[event.group].state:
            case ("join", GroupState.COMING):
                return self._join(event, now)
            case ("leave", GroupState.ASKED):
                return self._leave(event, now)
            case ("lose", GroupState.LOST):
                return self._give_up_agreed(event, now)
        return []  # an answer to a question that is no longer open

    def _join(self, event: Agreed, now: float) -> list[Action]:
        group = event.group
        if event.text:
            self._states.change(group, GroupState.AWAY)
            return [refused(GroupRequest(JOIN, group), f"group {group} cannot join: {event.text}")]
        # Until its first step the group counts neither as finished nor as one that restarts.
        self._states[group] = GroupEntry(arriving=True)
        incarnation = self._restarts.prepare(group, self._attempt.members(group), now)
        joined = Joined(group, incarnation, self._restarts.at(now))
        text = f"group {group} starts (incarnation {incarnation})"
        starts = RestartGroup(group, incarnation, "it joins the job", told=group in self._told)
        return [joined, starts, AnswerRequest(JOIN, group, text)]

    def _leave(self, event: Agreed, now: float) -> list[Action]:
        group, part = event.group, self._states[event.group]
        if event.text:
            self._states.change(group, GroupState.HERE)
            return [refused(GroupRequest(LEAVE, group), f"group {group} cannot leave: {event.text}")]
        # Its scripts get this time to end by themselves.
        self._states[group] = replace(part, state=GroupState.LEAVING, until=now + part.within_s, agreed=True)
        return self.on_exit(group, now)

    def _give_up_agreed(self, event: Agreed, now: float) -> list[Action]:
        """Continue without a group that was given up, if the servers agree."""
        part = self._states[event.group]
        if event.text and part.lost is not None:
            if part.lost.who in self._attempt.group_of:
                return self._restarts.give_up(part.lost)
            return self._restarts.restart_job(part.lost, now)  # its unit is gone, but may be replaced
        self._states[event.group] = replace(part, agreed=True)
        return self.on_exit(event.group, now)

    def restart(self, group: int, lost: Failed, now: float, singly: bool) -> list[Action]:
        """Restart a group that can restart alone, or only the lost worker."""
        # A group that dies again and again must not end a job while other groups train.
        if not self._restarts.budget.allows(group, now):
            return self.give_up(group, self._restarts.exhausted(lost, group), "is given up", now)
        answers = self.refuse_pending(group)
        who, told = lost.who if singly else "", group in self._told
        return [*self._restarts.restart_group(group, lost, now, who, told), *answers]

    def give_up(self, group: int, lost: Failed, how: str, now: float) -> list[Action]:
        """Give up a group that cannot restart; the servers are asked to go on without it."""
        if not self._states.is_elastic(group):
            return self._restarts.give_up(lost)
        answers = self.refuse_pending(group)
        self._states[group] = GroupEntry(GroupState.LOST, how=how, lost=lost)
        self._forget(group)
        # No step of this group will come that could end its incidents.
        self._restarts.times.drop(group)
        back = "" if self._attempt.lost_units_of(group) else ", which `topotrain jobs join` can bring back"
        incident = self._restarts.incident(lost, f"the job goes on without group {group}{back}", now)
        ask = AskServers(LOSE, group, self._incarnation(group))
        return [incident, *self.dismiss(group), ask, *answers]

    def on_exit(self, group: int | None, now: float) -> list[Action]:
        """Return the actions once a leaving group has no process left."""
        if group is None or self._attempt.over or not self._states.is_going(group):
            return []
        part, members = self._states[group], self._attempt.members(group)
        # Two conditions meet here in any order: the servers' agreement, and the end of the last process.
        if not part.agreed or members & self._attempt.up:
            return []
        # Its scripts have ended by themselves, so the group did not leave early and its data is complete.
        if members <= self._attempt.finished:
            self._states[group] = GroupEntry()
            return [refused(GroupRequest(LEAVE, group), f"group {group} has finished its scripts meanwhile")]
        self._forget(group)
        how, gone = part.how or "has left", self._incarnation(group) + 1
        self._states[group] = GroupEntry(GroupState.AWAY)
        # Reported only now: a worker that still runs may push until its process has ended. One more than the last
        # incarnation: no process of the last one is left either.
        left = Left(group, how, self._restarts.at(now))
        return [left, ReportGone(group, gone), AnswerRequest(LEAVE, group, f"group {group} {how}")]

    def _forget(self, group: int) -> None:
        members = self._attempt.members(group)
        self._restarts.times.forget(members)
        self._attempt.forget(members)

    def on_loss(self, group: int) -> list[Action]:
        """Return the actions after the loss of a process of a leaving group."""
        part = self._states[group]
        # Not a loss of the job, but the report shows that the group did not leave in order.
        self._states[group] = replace(part, how=part.how or "was lost while it left")
        return self.dismiss(group)

    def refuse_pending(self, group: int) -> list[Action]:
        """Refuse a pending request to leave, because the group has lost a process."""
        if not self._states.has_state(group, GroupState.ASKED):
            return []
        self._states.change(group, GroupState.HERE)
        text = f"group {group} has just lost a process, and starts again: try again"
        return [refused(GroupRequest(LEAVE, group), text)]

    def dismiss(self, group: int) -> list[Action]:
        """End the rest of a group."""
        return [EndProcess(who) for who in sorted(self._attempt.members(group) & self._attempt.up)]

    def poll(self, now: float) -> list[Action]:
        """End the groups that have used up their time for leaving."""
        return [action for group in self._states.expire(now) for action in self.dismiss(group)]
