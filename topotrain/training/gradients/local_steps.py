"""Steps that a worker makes alone between two commits."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

from torch.optim import Optimizer

from topotrain.core.client.client import Client
from topotrain.core.client.value_pull import ValueObserver
from topotrain.training.gradients.gradient_hooks import GradientPath
from topotrain.training.parameters.device_parameters import ParameterHolder
from topotrain.training.parameters.flat_parameters import ModelBuffers
from topotrain.training.worker_extension import WorkerExtension
from topotrain.training.worker_stats import StepBatches


class LocalSteps(ABC):
    """The rule by which one worker steps alone, and what it pushes then."""

    is_used = True
    """Whether the job lets a worker make steps alone."""

    @property
    @abstractmethod
    def has_sum(self) -> bool:
        """Whether there are steps that were not pushed yet."""

    @abstractmethod
    def pushes(self, step: int) -> bool:
        """Whether this step (from 1) pushes."""

    @abstractmethod
    def fetches(self, step: int) -> bool:
        """Whether this step (from 1) fetches."""

    @property
    def optimizer_of_push(self) -> int:
        """The number of the servers' optimizer that takes the next push."""
        return 0

    @property
    def defers(self) -> bool:
        """Whether a worker goes on while a push is under way."""
        return False

    def settles(self, step: int, over: bool) -> bool:
        """Whether to take the new values of the last push behind this step (from 1).

        over: whether they are here. Otherwise the worker waits.
        """
        return False

    @abstractmethod
    def step(self, inv_scale: float, number: int = 0) -> None:
        """Make a step of the optimizer of this number, with the gradients times a factor."""

    def observer(self, holder: ParameterHolder) -> ValueObserver:
        """The observer of new values. holder: takes them into the parameters."""
        return holder

    @abstractmethod
    def sum_as_gradient(self) -> AbstractContextManager[None]:
        """Inside, the path pushes the steps since the last push, which count as pushed."""


class LocalOptimizer(LocalSteps, WorkerExtension):
    """The script's own optimizer makes the steps, in this process.

    The servers run another optimizer on what a worker has learned between two commits. The worker trains values of its
    own, apart from those that it has received ("params").
    """

    optimizers: tuple[Optimizer, ...]
    """Those that the servers run."""

    @abstractmethod
    def open(self, buffers: ModelBuffers, client: Client, batches: StepBatches) -> GradientPath:
        """The worker is made of these; return the path of its pushes.

        Raises:
            ConfigError: the model cannot be trained this way.
        """
