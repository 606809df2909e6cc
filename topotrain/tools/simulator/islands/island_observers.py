"""Invariants of the values of simulated islands.

Islands are workers that train by themselves between rounds.
"""

from collections.abc import Iterable, Sequence

import torch

from topotrain.tools.simulator.sim_processes import WorkerProcess
from topotrain.tools.simulator.worker_observer import InvariantViolated
from topotrain.training.worker import Worker


class IslandObserver:
    """Checks the values of one process of a worker.

    Args:
        name: of the process.
        worker: the process.
        cells: how many each parameter begins with.
    """

    def __init__(self, name: str, worker: Worker, cells: int) -> None:
        self._name, self._worker, self._cells = name, worker, cells
        self._made = torch.zeros(cells, dtype=torch.bool)
        self._before = [torch.zeros(cells) for _ in worker.parts.tensors]

    def made(self, cells: Iterable[int]) -> None:
        """The worker's group has made the step of these cells."""
        self._made[list(cells)] = True

    def check(self, under_way: bool) -> None:
        """Check the present values. Raises InvariantViolated.

        under_way: "params" is being written.
        """
        for index, tensor in enumerate(self._worker.parts.tensors):
            own = tensor.detach()[: self._cells].clone()
            self._refuse(index, own, (own != 0) & (own != 1), "where 0 or 1 is right")
            self._refuse(index, own, self._made & (own != 1), "which this worker has made")
            self._refuse(index, own, own < self._before[index], "which was 1 before")
            if not under_way:
                received = self._worker.buffers.view("params", index)[: self._cells]
                untold = self._made & (received == 0)
                wrong = own != received + untold
                self._refuse(index, own, wrong, "which is not the received value plus what is not told")
            self._before[index] = own

    def _refuse(self, index: int, own: torch.Tensor, where: torch.Tensor, why: str) -> None:
        if where.any():
            cell = int(where.nonzero()[0])
            raise InvariantViolated(f"{self._name} has cell {cell} of p{index} as {float(own[cell]):g}, {why}")


class GroupReplicas:
    """Checks that all workers of a group have the same values after each step.

    Args:
        workers: of each group.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        # group, incarnation, step -> the values of the worker that was there first, and how many were
        self._seen: dict[tuple[int, int, int], tuple[list[torch.Tensor], int]] = {}

    def check(self, process: WorkerProcess, step: int, values: Sequence[torch.Tensor]) -> None:
        """A process has made its n-th step. Raises InvariantViolated."""
        key = process.me.group, process.incarnation, step
        first, seen = self._seen.pop(key, ([], 0))
        values = [each.detach() for each in values]
        for index, (other, mine) in enumerate(zip(first, values, strict=False)):
            where = (other != mine).nonzero()
            if len(where):
                at = int(where[0])
                raise InvariantViolated(
                    f"{process.me} has element {at} of p{index} as {float(mine[at]):g} behind its step {step}, another "
                    f"worker of its group as {float(other[at]):g}"
                )
        if seen + 1 < self._workers:
            self._seen[key] = (first or [each.clone() for each in values], seen + 1)
