"""Which worker groups are there while a job runs: some leave, are given up, and come (again).

Rule: pure. What is wished is asked of the servers first, who know what the job has come to; nobody else trains any
slower for it. A group that leaves is given some seconds for it; one that is given up is missed by nobody.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from topotrain.core.events import Failed

JOIN, LEAVE, LOSE = "join", "leave", "lose"


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """That a group joins or leaves; within_s: seconds that it has for leaving, before its processes are ended."""

    verb: str
    group: int
    within_s: float = 10.0


@dataclass(frozen=True, slots=True)
class AskServers:
    """To do: ask the group's servers whether this may be; incarnation: of the group's workers, as they are now."""

    wish: str
    group: int
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class ReportGone:
    """To do: tell the group's servers that none of its processes before this incarnation is left."""

    group: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """To do: tell whoever wished this what came of it; error: why nothing did."""

    verb: str
    group: int
    text: str
    error: str = ""


class GroupState(Enum):
    """How it stands with a group; the value is what a user is told."""

    HERE = "trains"
    ASKED = "is asked to leave"
    LEAVING = "is leaving"
    LOST = "is given up"
    AWAY = "is not there"
    COMING = "is asked to join"


@dataclass(slots=True)
class GroupEntry:
    """A group. until: when one that leaves is made to; how: it left, in words; lost: why it is given up."""

    state: GroupState = GroupState.HERE
    within_s: float = 0.0
    until: float | None = None
    how: str = ""
    lost: Failed | None = None
    agreed: bool = False  # the servers go on without it
    arriving: bool = False  # it has joined, and has not made a step yet


@dataclass(slots=True)
class GroupStates:
    """All groups of a job, over all its lives.

    Args:
        refusals: group -> why it cannot leave and come; "": it can.
        absent: groups that are not there at the start.
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
        """How it stands with a group from here on."""
        self._parts[group] = part

    @property
    def away(self) -> frozenset[int]:
        """Groups that are not there."""
        return frozenset(g for g, part in self._parts.items() if part.state in (GroupState.AWAY, GroupState.COMING))

    def going(self, group: int | None) -> bool:
        """Whether what is lost with this group's processes is known already."""
        return group in self._parts and self._parts[group].state in (GroupState.LEAVING, GroupState.LOST)

    def elastic(self, group: int) -> bool:
        """Whether the job may go on without the group."""
        return not self.refusals.get(group, "it is not here") and any(g != group for g in self._here())

    def asked(self) -> list[tuple[int, str]]:
        """Groups about which the servers have not answered yet, and what they were asked."""
        wishes = {GroupState.ASKED: LEAVE, GroupState.COMING: JOIN, GroupState.LOST: LOSE}
        return [(g, wishes[p.state]) for g, p in sorted(self._parts.items()) if p.state in wishes and not p.agreed]

    @property
    def due(self) -> float | None:
        """When the first group that leaves has had its time."""
        return min((part.until for part in self._parts.values() if part.until is not None), default=None)

    def late(self, now: float) -> list[int]:
        """Groups that have had their time for leaving; each is told once."""
        found = [g for g, part in self._parts.items() if part.until is not None and part.until <= now]
        for group in found:
            self._parts[group].until = None
        return found

    def refusal(self, wish: GroupRequest) -> str:
        """Why this cannot be, as far as it is known here; "": ask the servers."""
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
        """The whole job starts again: who was about to leave has left, and who was about to come is there."""
        for group, part in self._parts.items():
            gone = part.state in (GroupState.LEAVING, GroupState.ASKED, GroupState.LOST, GroupState.AWAY)
            self._parts[group] = GroupEntry(GroupState.AWAY if gone else GroupState.HERE)

    def _here(self) -> list[int]:
        return [g for g, part in self._parts.items() if part.state is GroupState.HERE]

    def __str__(self) -> str:
        """The groups and their states."""
        return "groups: " + ", ".join(f"{g} {part.state.value}" for g, part in sorted(self._parts.items()))
