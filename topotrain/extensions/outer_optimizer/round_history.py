"""The rounds of a job: their numbers and members, and the age of pushes. Pure."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from topotrain.core.server.component_state import State

MOST_LISTED = 100
"""So many of the last rounds are listed with their groups."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round.

    Attributes:
        fragment: the part of the model.
        number: of this round of the fragment, from 0, over all starts of the job.
        groups: those with a part in it.
        share: their share of the groups that there are.
    """

    fragment: int
    number: int
    groups: tuple[int, ...]
    share: float = 1.0


class RoundHistory:
    """Counts rounds.

    The age of a push is the number of rounds of its fragment between the values that its group had received and the
    round in which it counts.

    Args:
        groups: the worker groups, which start with the first values.
        before: of each fragment, the rounds of earlier starts of the job.
    """

    def __init__(self, groups: Iterable[int], before: Sequence[int]) -> None:
        self.made = list(before)
        """Of each fragment, the number of rounds, with those of earlier starts of the job."""
        self.members: dict[int, int] = {}
        """The number of rounds of this start with so many groups."""
        self.last: deque[Round] = deque(maxlen=MOST_LISTED)
        found = tuple(groups)
        self._there = set(found)
        self.ages, self.age_sum, self.age_max = 0, 0, 0
        self._base = {(group, fragment): made for group in found for fragment, made in enumerate(before)}

    def add(self, fragment: int, groups: Sequence[int]) -> Round:
        """Count a round, and return it."""
        number = self.made[fragment]
        for group in groups:
            base = self._base.get((group, fragment))
            # A group that came while others trained has begun with values of an unknown round.
            if base is not None:
                self.ages += 1
                self.age_sum += number - base
                self.age_max = max(self.age_max, number - base)
            self._base[group, fragment] = number + 1
        self.made[fragment] += 1
        self.members[len(groups)] = self.members.get(len(groups), 0) + 1
        # One that came back before the start of the job has no decision about its return.
        self._there.update(groups)
        made = Round(fragment, number, tuple(groups), len(groups) / len(self._there))
        self.last.append(made)
        return made

    def change(self, group: int, there: bool) -> None:
        """Note a decision: a group is gone, or back. A group that rests is there."""
        # From the decisions alone, and not from what a server sees of the groups: all must find the same share.
        (self._there.add if there else self._there.discard)(group)

    def forget(self, group: int) -> None:
        """The group has new processes, which begin with the present values."""
        for fragment in range(len(self.made)):
            self._base.pop((group, fragment), None)

    def state_dict(self) -> State:
        return {
            "made": self.made,
            "members": self.members,
            "last": [(each.fragment, each.number, each.groups, each.share) for each in self.last],
            "ages": (self.ages, self.age_sum, self.age_max),
            "base": self._base,
            "there": self._there,
        }

    def load_state_dict(self, state: State) -> None:
        self.made, self.members, self._base = list(state["made"]), dict(state["members"]), dict(state["base"])
        self.last = deque((Round(*each) for each in state["last"]), maxlen=MOST_LISTED)
        self.ages, self.age_sum, self.age_max = state["ages"]
        self._there = set(state["there"])
