"""Worker groups of one unit that start again: each waits until the last process of its former life has ended.

Rule: a process of a new life never meets one of the old life, with which it would share memory. A group that is to
start again while it does so starts once, with the newest incarnation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from topotrain.config.topology import Role
from topotrain.launch.agent.children import Child, ChildSpec


@dataclass(slots=True)
class GroupRestart:
    """The groups that wait, with the incarnation that comes next and why there is one."""

    _wanted: dict[tuple[int, str], tuple[int, str]] = field(default_factory=dict)  # (group, who of it; "": all) ->
    _unborn: list[ChildSpec] = field(default_factory=list)

    def later(self, birth: ChildSpec) -> None:
        """A process of a group that is not there at the start."""
        self._unborn.append(birth)

    def ask(self, group: int, incarnation: int, why: str, children: Sequence[Child], who: str = "") -> list[Child]:
        """A group, or one worker of it, is to start again; returns those of its processes that must end first."""
        self._wanted[group, who] = incarnation, why
        return [child for child in _of(group, who, children) if child.code is None and not child.doomed]

    def due(self, group: int, children: Sequence[Child]) -> tuple[list[Child], list[ChildSpec]]:
        """The former processes of a group, and those that take their place now; nobody while one of them lives."""
        gone: list[Child] = []
        born: list[ChildSpec] = []
        for asked, who in [key for key in self._wanted if key[0] == group]:
            former, births = self._take(asked, who, children)
            gone += former
            born += births
        return gone, born

    def _take(self, group: int, who: str, children: Sequence[Child]) -> tuple[list[Child], list[ChildSpec]]:
        former = _of(group, who, children)
        if any(child.code is None for child in former):
            return [], []
        incarnation, why = self._wanted.pop((group, who))
        first = [birth for birth in self._unborn if birth.residents[0].group == group]
        self._unborn = [birth for birth in self._unborn if birth not in first]
        places = [(child.residents, child.fds) for child in former] + [(birth.residents, birth.fds) for birth in first]
        return former, [ChildSpec(residents, fds, incarnation, why) for residents, fds in places]


def _of(group: int, who: str, children: Sequence[Child]) -> list[Child]:
    workers = [c for c in children if c.residents[0].role is Role.WORKER and c.residents[0].group == group]
    return [child for child in workers if who in ("", child.who)]
