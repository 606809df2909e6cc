"""The share of a job's samples that are done, as one worker knows it.

With fixed parts a worker counts its own part, so that two runs have the same figure at the same step. With leases it
counts its own batches, and those that other groups had done when it was given its present lease.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from topotrain.config.job import ConfigError
from topotrain.training.data.batch_ranges import Runs
from topotrain.training.data.map_dataset import DataPlan

NEEDS_LENGTH = (
    "needs the number of batches in an epoch: give the loader to tt.prepare, and the dataset of a stream a __len__"
)
NEEDS_EPOCHS = "needs the number of epochs: write the loop as `for epoch in tt.epochs(count):`"


@dataclass(frozen=True, slots=True)
class EpochShare:
    """The units of an epoch that a worker counts, of one or several batches.

    Attributes:
        total: all of them. done: those of an earlier start of the job. left: those of this pass.
    """

    total: int
    done: int
    left: int

    @classmethod
    def of(cls, batches: int, plan: DataPlan, done: Runs) -> "EpochShare":
        """The share of a pass over so many batches, without those that are `done`."""
        wide = plan.workers if plan.in_rounds else 1
        units = -(-batches // wide)
        left = -(-(batches - sum(last - first for first, last in done)) // wide)
        if plan.mode == "lease":
            return cls(units, units - left, left)
        mine = slice(plan.group, None, plan.groups)
        return cls(len(range(units)[mine]), own_done(plan, done), len(range(left)[mine]))

    def behind(self, units: int) -> float:
        """The share of the epoch that is done behind so many units of this pass."""
        if not self.left:
            return 1.0
        # One division of whole numbers: a job that goes on from a snapshot gets the figure of one that never stopped.
        # What another layout has left over is stretched, so that each worker ends at 1.
        return min(1.0, (self.done * self.left + units * (self.total - self.done)) / (self.left * self.total))


def own_done(plan: DataPlan, done: Runs) -> int:
    """The number of the batches in `done` that are of this part of the data.

    With leases it is an equal part of them, because no process knows which group had which.
    """
    wide = plan.workers if plan.in_rounds else 1
    if plan.mode == "lease":
        return sum(last - first for first, last in done) // wide // plan.groups
    return (
        sum((number // wide) % plan.groups == plan.group for first, last in done for number in range(first, last))
        // wide
    )


class Passes(Protocol):
    """The passes of a script over its loader."""

    def position(self) -> int:
        """A number that grows when a pass begins or goes on; 0 before the first pass."""

    def share_since(self, position: int) -> float:
        """The share of an epoch that is done since this position.

        Raises:
            ConfigError: the loader has no length.
        """


class PlainPasses:
    """Passes in an ordinary process, which reads the script's own loader.

    A plain loader does not tell when it gives a batch. So backwards are counted, one for each batch, at the first
    parameter that trains.

    Args:
        loader: the script's.
        optimizers: the script's.
    """

    def __init__(self, loader: Any, optimizers: Sequence[Optimizer]) -> None:
        self._loader = loader
        self._backwards = 0
        tensors = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
        first = next((p for p in tensors if p.requires_grad), None)
        if first is not None:
            first.register_post_accumulate_grad_hook(self._count)

    def _count(self, tensor: torch.Tensor) -> None:
        self._backwards += 1

    def position(self) -> int:
        return self._backwards

    def share_since(self, position: int) -> float:
        return min(1.0, (self._backwards - position) / max(1, batches_in(self._loader)))


def batches_in(loader: Any) -> int:
    """The length of a loader. Raises ConfigError if it has none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        raise ConfigError("tt.progress", None, NEEDS_LENGTH) from None


class LoopProgress(ABC):
    """Progress of a script's training loop. It never falls."""

    def __init__(self) -> None:
        self._most = 0.0

    @abstractmethod
    def _now(self) -> float:
        """The share that is done. Raises ConfigError if it is not known."""

    def share(self) -> float:
        """The share of the loop's samples that are done.

        Raises:
            ConfigError: it is not known.
        """
        # A worker may be given a batch a second time.
        self._most = max(self._most, self._now())
        return self._most

    def estimate(self) -> float:
        """The share that is done, for a display; -1: it is not known.

        A script gets the same shares, whether this is called or not.
        """
        try:
            return max(self._most, self._now())
        except ConfigError:
            return -1.0

    @property
    def epoch(self) -> int:
        """The present or last epoch, from 0; -1: the loop is not over epochs."""
        return -1


class EpochProgress(LoopProgress):
    """Progress of a loop over epochs.

    Args:
        count: epochs of the whole training.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self._passes: Passes | None = None
        self._epoch = self._begun_at = 0

    def begin(self, epoch: int, passes: Passes | None) -> None:
        """An epoch begins. passes: None where the script divides its data itself."""
        self._epoch, self._passes = epoch, passes
        self._begun_at = 0 if passes is None else passes.position()

    def end(self) -> None:
        """All epochs are over."""
        self._epoch = self._count

    @property
    def epoch(self) -> int:
        return min(self._epoch, self._count - 1)

    def _now(self) -> float:
        if self._epoch >= self._count:
            return 1.0
        if self._passes is None:
            raise ConfigError("tt.progress", None, NEEDS_LENGTH)
        return (self._epoch + self._passes.share_since(self._begun_at)) / self._count


class StepProgress(LoopProgress):
    """Progress of a loop over a number of steps.

    Args:
        count: steps of the whole training.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self._step = 0

    def begin(self, step: int) -> None:
        """The step with this number, from 1, begins."""
        self._step = step

    def _now(self) -> float:
        return min(1.0, self._step / self._count)
