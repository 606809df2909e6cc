"""What a worker of a rehearsal sees while it trains: its own work at once, and never less than before.

Rule: a cell is 0 until its batch is applied, and 1 from then on. The result alone would not show values that were old,
torn or counted twice for a while, since each step brings new ones; the worker computes with them all the same.
"""

from collections.abc import Sequence

import torch


class InvariantViolated(Exception):
    """The job says something that it must not say; the text says what."""


class WorkerObserver:
    """One life of one worker.

    Args:
        who: for the text of an error.
        cells: how many each parameter begins with.
    """

    def __init__(self, who: str, cells: int) -> None:
        self._who = who
        self._cells = cells
        self._before: list[torch.Tensor] = []
        self._mine = torch.zeros(cells, dtype=torch.bool)

    def did(self, cells: Sequence[int]) -> None:
        """A step of the worker's group is applied, in which these cells were counted."""
        self._mine[list(cells)] = True

    def look(self, values: Sequence[torch.Tensor]) -> None:
        """These are the parameters now. Raises Wrong."""
        seen = [part[: self._cells].clone() for part in values]
        for number, found in enumerate(seen):
            self._refuse(number, found, (found != 0) & (found != 1), "where 0 or 1 is right")
            self._refuse(number, found, self._mine & (found != 1), "which its group has counted already")
            if self._before:
                self._refuse(number, found, found < self._before[number], "which was 1 before")
        self._before = seen

    def _refuse(self, number: int, found: torch.Tensor, where: torch.Tensor, why: str) -> None:
        if where.any():
            cell = int(where.nonzero()[0])
            raise InvariantViolated(f"{self._who} is shown cell {cell} of p{number} as {float(found[cell]):g}, {why}")
