"""Invariants of the values that simulated workers have: their own updates at once, and no lost updates.

A cell is 0 until its batch is applied, and 1 from then on. The final result alone would not show values that were
stale, torn or counted twice for a while, because each step brings new ones. But the worker would compute with them.
"""

from collections.abc import Iterable, Sequence

import torch
from batch_counts import InvariantViolated
from sim_processes import WorkerProcess

from topotrain.training.worker import Worker


class CellObserver:
    """Observes one process of a worker.

    cells: how many each parameter begins with. exact: a cell is 0 or 1 at any moment.
    """

    def __init__(self, name: str, cells: int, exact: bool = True) -> None:
        self._name, self._cells, self._exact = name, cells, exact
        self._before: list[torch.Tensor] = []
        self._made = torch.zeros(cells, dtype=torch.bool)

    def made(self, cells: Iterable[int]) -> None:
        """The worker's group has made the step of these cells."""
        self._made[list(cells)] = True

    def check(self, values: Sequence[torch.Tensor]) -> None:
        """Check the present parameters. Raises InvariantViolated."""
        # Where server groups average, a worker sees parts of batches, and those become larger and smaller.
        if not self._exact:
            return
        # Copies: the values change in place before the next check. Behind the cells there is padding.
        seen = [part.detach()[: self._cells].clone() for part in values]
        for number, found in enumerate(seen):
            self._refuse(number, found, (found != 0) & (found != 1), "where 0 or 1 is right")
            self._refuse(number, found, self._made & (found != 1), "which its group has made")
            if self._before:
                self._refuse(number, found, found < self._before[number], "which was 1 before")
        self._before = seen

    def _refuse(self, number: int, found: torch.Tensor, where: torch.Tensor, why: str) -> None:
        if where.any():
            cell = int(where.nonzero()[0])
            raise InvariantViolated(f"{self._name} has cell {cell} of p{number} as {float(found[cell]):g}, {why}")


class IslandObserver(CellObserver):
    """Observes a worker that trains alone between rounds."""

    def __init__(self, name: str, worker: Worker, cells: int) -> None:
        super().__init__(name, cells)
        self._worker = worker

    def check_own(self, under_way: bool) -> None:
        """Check the worker's own values; under_way: "params" is being written."""
        self.check(self._worker.parts.tensors)
        for index, own in enumerate(() if under_way else self._before):
            received = self._worker.buffers.view("params", index)[: self._cells]
            wrong = own != received + (self._made & (received == 0))
            self._refuse(index, own, wrong, "which is not the received value plus what is not told")


class GroupReplicas:
    """Checks that all workers of a group have the same values after each step."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        # group, incarnation, step -> the values of the worker that was there first, and how many were
        self._seen: dict[tuple[int, int, int], tuple[list[torch.Tensor], int]] = {}

    def check(self, process: WorkerProcess, step: int, values: Sequence[torch.Tensor]) -> None:
        """A process has made its n-th step. Raises InvariantViolated."""
        key = process.me.group, process.incarnation, step
        first, seen = self._seen.pop(key, ([each.detach().clone() for each in values], 0))
        for index, (other, mine) in enumerate(zip(first, values, strict=True)):
            where = (other != mine).nonzero()
            if len(where):
                at = int(where[0])
                raise InvariantViolated(
                    f"{process.me} has element {at} of p{index} as {float(mine[at]):g} behind its step {step}, another "
                    f"worker of its group as {float(other[at]):g}"
                )
        if seen + 1 < self._workers:
            self._seen[key] = first, seen + 1
