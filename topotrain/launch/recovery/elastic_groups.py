"""Elastic worker groups: groups leave, are given up, and join while a job runs.

This module is pure: it does no I/O and reads no clock. The servers are asked first whether a change is possible,
because they know the job's progress. Other groups do not wait for a change. A leaving group gets a grace period. Other
groups do not wait for a group that was given up.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from topotrain.core.events import Failed

JOIN, LEAVE, LOSE = "join", "leave", "lose"


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A request that a group joins or leaves.

    within_s: seconds for leaving, after which the group's processes are ended.
    """

    verb: str
    group: int
    within_s: float = 10.0


@dataclass(frozen=True, slots=True)
class AskServers:
    """An action: ask the group's servers whether a change is possible.

    incarnation: the present one of the group's workers.
    """

    wish: str
    group: int
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class ReportGone:
    """An action: tell the group's servers that earlier processes are gone.

    incarnation: no process before this incarnation is left.
    """

    group: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """An action: answer the clients that made this request.

    error: the reason of a refusal.
    """

    verb: str
    group: int
    text: str
    error: str = ""


class GroupState(Enum):
    """The state of a group. The value is shown to the user."""

    HERE = "trains"
    ASKED = "is asked to leave"
    LEAVING = "is leaving"
    LOST = "is given up"
    AWAY = "is not there"
    COMING = "is asked to join"


@dataclass(slots=True)
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


@dataclass(slots=True)
class GroupStates:
    """All groups of a job, over all its attempts.

    Args:
        refusals: for each group, the reason why it cannot leave and join; "": it can.
        absent: groups that are absent at the start.
    """

    refusals: Mapping[int, str]
    absent: Iterable[int] = ()
    _parts: dict[int, GroupEntry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._parts = {group: GroupEntry() for group in self.refusals}
        for group in self.absent:
            self._parts[group] = GroupEntry(GroupState.AWAY)

    def __getitem__(self, group: int) -> GroupEntry:
        return self._parts[group]

    def put(self, group: int, part: GroupEntry) -> None:
        """Set the state of a group."""
        self._parts[group] = part

    @property
    def away(self) -> frozenset[int]:
        """The absent groups."""
        return frozenset(g for g, part in self._parts.items() if part.state in (GroupState.AWAY, GroupState.COMING))

    def going(self, group: int | None) -> bool:
        """Whether the loss of this group's processes is expected."""
        return group in self._parts and self._parts[group].state in (GroupState.LEAVING, GroupState.LOST)

    def elastic(self, group: int) -> bool:
        """Return whether the job can continue without the group."""
        return not self.refusals.get(group, "it is not here") and any(g != group for g in self._here())

    def asked(self) -> list[tuple[int, str]]:
        """Return the groups with an open question to the servers, and the question."""
        wishes = {GroupState.ASKED: LEAVE, GroupState.COMING: JOIN, GroupState.LOST: LOSE}
        return [(g, wishes[p.state]) for g, p in sorted(self._parts.items()) if p.state in wishes and not p.agreed]

    @property
    def due(self) -> float | None:
        """The time at which the first leaving group has to be gone."""
        return min((part.until for part in self._parts.values() if part.until is not None), default=None)

    def late(self, now: float) -> list[int]:
        """Return the groups that have used up their time for leaving.

        Each is returned once.
        """
        found = [g for g, part in self._parts.items() if part.until is not None and part.until <= now]
        for group in found:
            self._parts[group].until = None
        return found

    def refusal(self, wish: GroupRequest) -> str:
        """Return why the request must be refused; "": the servers have to decide."""
        part = self._parts.get(wish.group)
        if part is None:
            return f"there is no worker group {wish.group}; {self}"
        why = self.refusals[wish.group]
        if why:
            return f"group {wish.group} cannot {wish.verb}: {why}"
        wanted = GroupState.AWAY if wish.verb == JOIN else GroupState.HERE
        if part.state is not wanted:
            return f"group {wish.group} {part.state.value}; {self}"
        if wish.verb == LEAVE and not any(g != wish.group for g in self._here()):
            return f"group {wish.group} is the last one that trains"
        return ""

    def renewed(self) -> None:
        """Update the groups for a restart of the whole job.

        Leaving groups are absent after it, and joining groups are present.
        """
        for group, part in self._parts.items():
            gone = part.state in (GroupState.LEAVING, GroupState.ASKED, GroupState.LOST, GroupState.AWAY)
            self._parts[group] = GroupEntry(GroupState.AWAY if gone else GroupState.HERE)

    def _here(self) -> list[int]:
        return [g for g, part in self._parts.items() if part.state is GroupState.HERE]

    def __str__(self) -> str:
        """Return the groups and their states as text."""
        return "groups: " + ", ".join(f"{g} {part.state.value}" for g, part in sorted(self._parts.items()))
