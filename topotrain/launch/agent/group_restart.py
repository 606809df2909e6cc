"""Restarts of worker groups within one unit.

A group restarts when the last process of its former attempt has ended, because old and new processes would share
memory. A group that is asked to restart again while it waits restarts once, with the newest incarnation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from topotrain.config.topology import Role
from topotrain.launch.agent.children import Child, ChildSpec


@dataclass(slots=True)
class GroupRestart:
    """The groups that wait for a restart, with their next incarnations and reasons."""

    _wanted: dict[tuple[int, str], tuple[int, str]] = field(
        default_factory=dict
    )  # (group, worker or "") -> number, why
    _unborn: list[ChildSpec] = field(default_factory=list)

    def later(self, birth: ChildSpec) -> None:
        """Add a process of a group that is absent at the start."""
        self._unborn.append(birth)

    def ask(self, group: int, incarnation: int, why: str, children: Sequence[Child], who: str = "") -> list[Child]:
        """Plan the restart of a group, or of one of its workers.

        Returns the processes that must end first.
        """
        self._wanted[group, who] = incarnation, why
        return [child for child in _of(group, who, children) if child.code is None and not child.doomed]

    def due(self, group: int, children: Sequence[Child]) -> tuple[list[Child], list[ChildSpec]]:
        """Return the former processes of a group, and their replacements to start now.

        Both are empty while a former process runs.
        """
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
