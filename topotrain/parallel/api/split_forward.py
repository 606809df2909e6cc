"""The forward of a split model in a job."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves

from topotrain.config.job import ConfigError, Job
from topotrain.core.client.client import StepEnd
from topotrain.parallel.capture.capture_model import CapturedForward
from topotrain.parallel.placement.assign_modules import Assignment
from topotrain.parallel.program.build_program import program
from topotrain.parallel.runtime.channel import ControlEdge, TensorKey
from topotrain.parallel.runtime.network_channel import NetworkChannel
from topotrain.parallel.runtime.program_runner import Runner
from topotrain.parallel.runtime.worker_sync import ForwardHello, WorkerSync
from topotrain.training.data.data_client import DataClient
from topotrain.training.gradients.push_path import PushPath
from topotrain.training.worker import Worker
from topotrain.training.worker_extension import WorkerExtension

_MOST_PROGRAMS = 16
"""Programs that are kept: each length of a sequence has one of its own."""


class SplitForward(WorkerExtension):
    """Replaces `model.forward` in a job.

    Programs are built on first use: one for each kind of arguments, and one for each mode if the forward depends on it.
    """

    def __init__(
        self, model: nn.Module, job: Job, captured: CapturedForward, found: Mapping[str, Assignment], workers: int
    ) -> None:
        self._model, self._job = model, job
        self._captured, self._found, self._workers = captured, found, workers
        self._runners: dict[object, Runner] = {}
        self._channel: NetworkChannel | None = None
        self._last: Runner | None = None
        self.open = False  # a forward has run, and its backward has not begun
        self.inside = False  # the split forward runs, and may call modules

    def start(self, worker: Worker, channel: NetworkChannel) -> None:
        """Connect to the worker and to the other workers of the group."""
        self._channel = channel
        self.sync = _JobSync(channel, worker, self)
        worker.client.extension(DataClient).observe(self.sync)
        worker.attach(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the steps of this worker and return the output for its samples."""
        if self._channel is None:
            raise ConfigError("model", None, "is split: it can be called once tt.prepare has returned")
        self.inside = True
        try:
            runner = self._runner(self._channel, args, kwargs)
            if torch.is_grad_enabled():  # a forward without gradients does not count for the step
                self._last, self.open = runner, True
            return runner(*args, **kwargs)
        finally:
            self.inside = False

    def _runner(self, channel: NetworkChannel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Runner:
        samples = samples_of(args, kwargs)
        training = self._model.training
        # Values that are not tensors are part of the program, so each of them has a program of its own.
        key = (kind_of(args, kwargs, samples), training if self._captured.by_mode else None)
        # The one of the last call is the last one.
        if key in self._runners:
            self._runners[key] = self._runners.pop(key)
        else:
            while len(self._runners) >= _MOST_PROGRAMS:
                del self._runners[next(iter(self._runners))]
            cut = program(
                self._captured, self._found, self._model, args, kwargs, samples, self._workers, training=training
            )
            job = self._job
            self._runners[key] = Runner(
                cut,
                self._model,
                channel,
                job.microbatches,
                job.schedule,
                self.sync,
                self.sync.generator,
            )
        return self._runners[key]

    def weight(self) -> float:
        return self.sync.weight() if self._last is None else self._last.counts

    def before_commit(self, step: int, end: StepEnd) -> None:
        self.open = False
        self.sync.stepped()

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ConfigError("model", None, "is split over several workers and cannot be copied; at the end it is whole")

    def __reduce__(self) -> NoReturn:
        self.__deepcopy__(None)


class _JobSync(WorkerSync):
    """Synchronizes the forwards of a group in a job."""

    def __init__(self, channel: NetworkChannel, worker: Worker, forward: SplitForward) -> None:
        super().__init__(channel)
        self._forward = forward
        assert isinstance(worker.path, PushPath)  # gradients of a split model are hidden
        self._path, self._batches = worker.path, worker.batches
        # Masks are drawn from the state of worker 0. Only worker 0 draws the order of the batches, so states differ.
        self.generator = torch.default_generator if channel.me == 0 else torch.Generator()

    def weight(self) -> float:
        return self._batches.weight()

    def begun(self) -> None:
        """Notify the worker that a backward begins here."""
        super().begun()
        self._forward.open = False
        # The worker would not notice a backward that reaches none of its parameters.
        self._path.begin()

    def exchange(self, mine: ForwardHello) -> tuple[ForwardHello, ...]:
        """Exchange hellos as `WorkerSync.exchange` does."""
        channel, key, draws = (
            self.channel,
            TensorKey(self.forwards, 0, ControlEdge.RANDOM_STATE, False),
            mine.chance != 0,
        )
        # Sent before the hello, so that no worker has to wait for it.
        for other in range(1, channel.size if draws and channel.me == 0 else 1):
            channel.send(other, key, self.generator.get_state())
        hellos = super().exchange(replace(mine, chance=int(draws)))
        if draws and channel.me != 0:
            self.generator.set_state(channel.receive(0, key)[0])
        return hellos


def samples_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the first size of the first tensor that has dimensions.

    Raises:
        ConfigError: the arguments have no such tensor.
    """
    for leaf in tree_leaves((args, dict(kwargs))):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return int(leaf.shape[0])
    raise ConfigError("model(…)", None, "a split model needs a tensor with the samples in its first dimension")


def kind_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], samples: int) -> object:
    """Return the kind of a call; calls of one kind share one program."""
    leaves, form = tree_flatten((args, dict(kwargs)))
    return str(form), tuple(_kind(leaf, samples) for leaf in leaves)


def _kind(leaf: Any, samples: int) -> object:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    sizes = list(leaf.shape)
    # The last share of an epoch may be smaller, and must not need another program.
    if samples in sizes:
        sizes[sizes.index(samples)] = -1
    return leaf.dtype, tuple(sizes)
