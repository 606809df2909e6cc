"""TensorFlow's strategies for placing parameters on ps tasks, one after the other.

The choice depends only on the parameters and their order, so all workers choose alike.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from topotrain.config.job import ConfigError
from topotrain.training.parameters.flat_parameters import HOME


class Strategy(Protocol):
    """Chooses the task of a parameter."""

    def __call__(self, parameter: torch.Tensor) -> int: ...


class RoundRobinStrategy:
    """Places each parameter on the next task."""

    def __init__(self, num_tasks: int) -> None:
        self._tasks, self._next = _counted(num_tasks), 0

    def __call__(self, parameter: torch.Tensor) -> int:
        chosen = self._next
        self._next = (chosen + 1) % self._tasks
        return chosen


class GreedyLoadBalancingStrategy:
    """Places each parameter on the task with the least load so far.

    load_fn: parameter -> its load, a number.
    """

    def __init__(self, num_tasks: int, load_fn: Callable[[torch.Tensor], float]) -> None:
        self._loads, self._load_of = [0.0] * _counted(num_tasks), load_fn

    def __call__(self, parameter: torch.Tensor) -> int:
        # `index` takes the first of several with equal load, so all workers choose alike.
        chosen = self._loads.index(min(self._loads))
        self._loads[chosen] += self._load_of(parameter)
        return chosen


def byte_size_load_fn(parameter: torch.Tensor) -> float:
    """Return a load for `GreedyLoadBalancingStrategy`: the bytes of the values."""
    return float(parameter.numel() * parameter.element_size())


class ReplicaDeviceSetter:
    """Places every parameter that it is called with on one of `tasks` ps tasks.

    ps_device: prefix of the names of places. strategy: parameter -> number of the task.
    """

    def __init__(self, tasks: int, ps_device: str, strategy: Strategy) -> None:
        self._tasks, self._device, self._strategy = tasks, ps_device, strategy

    def __call__(self, parameter: torch.Tensor) -> str:
        """Choose a task; return its name, such as "/job:ps/task:1". Raises ConfigError."""
        task = self._strategy(parameter)
        if type(task) is not int or not 0 <= task < self._tasks:
            raise ConfigError("ps_strategy", task, f"must give a whole number from 0 to {self._tasks - 1}")
        # `prepare` reads this attribute when it divides the parameters over the servers.
        setattr(parameter, HOME, task)
        # After the job, where TensorFlow has it: "/job:ps/cpu:0" is "/job:ps/task:1/cpu:0".
        job, *others = (word for word in self._device.split("/") if word and not word.startswith("task:"))
        return "/".join(("", job, f"task:{task}", *others))

    def assign(self, model: nn.Module) -> nn.Module:
        """Choose a task for all parameters of an existing model, in their order."""
        for parameter in model.parameters():
            self(parameter)
        return model


def _counted(num_tasks: int) -> int:
    if type(num_tasks) is not int or num_tasks < 1:
        raise ConfigError("num_tasks", num_tasks, "must be a whole number >= 1")
    return num_tasks
