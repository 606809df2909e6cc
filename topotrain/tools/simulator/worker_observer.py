"""The view of a simulated worker: its own updates at once, and no lost updates.

A cell is 0 until its batch is applied, and 1 from then on. The final result alone would not show values that were
stale, torn or counted twice for a while, because each step brings new ones. But the worker would compute with them.
"""

from collections.abc import Sequence

import torch


class InvariantViolated(Exception):
    """The job violates an invariant, which the text describes."""


class WorkerObserver:
    """Observes one process of a worker.

    cells: how many each parameter begins with. exact: a cell is 0 or 1 at any moment.
    """

    def __init__(self, name: str, cells: int, exact: bool = True) -> None:
        self._name = name
        self._cells, self._exact = cells, exact
        self._before: list[torch.Tensor] = []
        self._mine = torch.zeros(cells, dtype=torch.bool)

    def applied(self, cells: Sequence[int]) -> None:
        """Record an applied step of the worker's group that counted these cells."""
        self._mine[list(cells)] = True

    def check(self, values: Sequence[torch.Tensor]) -> None:
        """Check the present parameters. Raises InvariantViolated."""
        # Where server groups average, a worker sees parts of batches, and those become larger and smaller.
        if not self._exact:
            return
        # Copies: the values change in place before the next check. Behind the cells there is padding.
        seen = [part[: self._cells].clone() for part in values]
        for number, found in enumerate(seen):
            self._refuse(number, found, (found != 0) & (found != 1), "where 0 or 1 is right")
            # A worker must see its own updates at once.
            self._refuse(number, found, self._mine & (found != 1), "which its group has counted already")
            if self._before:
                # A version that a worker has seen never falls.
                self._refuse(number, found, found < self._before[number], "which was 1 before")
        self._before = seen

    def _refuse(self, number: int, found: torch.Tensor, where: torch.Tensor, why: str) -> None:
        if where.any():
            cell = int(where.nonzero()[0])
            raise InvariantViolated(f"{self._name} is shown cell {cell} of p{number} as {float(found[cell]):g}, {why}")
