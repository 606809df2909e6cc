"""The forward of a split model in a job."""

from collections.abc import Callable, Mapping
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
from topotrain.parallel.runtime.channel import STEPPED, ActivationChannel, TensorKey
from topotrain.parallel.runtime.program_runner import Runner
from topotrain.parallel.runtime.worker_sync import ForwardHello, WorkerSync
from topotrain.training.data.data_client import DataClient
from topotrain.training.parameters.gradient_hooks import PushPath
from topotrain.training.worker import Worker
from topotrain.training.worker_extension import WorkerExtension

_DICE = STEPPED - 1
"""`TensorKey.edge` of messages with the state of torch's random generator."""


class SplitForward(WorkerExtension):
    """Replaces `model.forward` in a job.

    Programs are built on first use: one for each kind of arguments (dtypes, sizes apart from the samples, values that
    are not tensors), and one for each mode if the forward depends on it.
    """

    def __init__(
        self, model: nn.Module, job: Job, captured: CapturedForward, found: Mapping[str, Assignment], workers: int
    ) -> None:
        self._model, self._job = model, job
        self._captured, self._found, self._workers = captured, found, workers
        self._runners: dict[object, Runner] = {}
        self._passage: ActivationChannel | None = None
        self._weight: Callable[[], float] = lambda: 1.0
        self._last: Runner | None = None
        self.open = False  # a forward has run, and its backward has not begun
        self.inside = False

    def start(self, worker: Worker, passage: ActivationChannel) -> None:
        """Connect to the worker and to the other workers of the group."""
        self._passage, self._weight = passage, worker.batches.weight
        self.meeting = _JobMeeting(passage, worker, self._begun)
        worker.client.extension(DataClient).observe(self.meeting)
        worker.attach(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the steps of this worker and return the output for its samples."""
        if self._passage is None:
            raise ConfigError("model", None, "is split: it can be called once tt.prepare has returned")
        self.inside = True
        try:
            runner = self._runner(self._passage, args, kwargs)
            if torch.is_grad_enabled():  # a forward without gradients does not count for the step
                self._last, self.open = runner, True
            return runner(*args, **kwargs)
        finally:
            self.inside = False

    def _runner(self, passage: ActivationChannel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Runner:
        samples = samples_of(args, kwargs)
        training = self._model.training
        key = (kind_of(args, kwargs, samples), training if self._captured.by_mode else None)
        if key not in self._runners:
            cut = program(
                self._captured, self._found, self._model, args, kwargs, samples, self._workers, training=training
            )
            job = self._job
            self._runners[key] = Runner(
                cut,
                self._model,
                passage,
                self._weight,
                job.microbatches,
                job.schedule.value,
                self.meeting,
                self.meeting.dice,
            )
        return self._runners[key]

    def weight(self) -> float:
        """As `WorkerExtension.weight`."""
        return self._weight() if self._last is None else self._last.counts

    def _begun(self) -> None:
        self.open = False

    def before_commit(self, step: int, end: StepEnd) -> None:
        """As `WorkerExtension.before_commit`."""
        self.open = False
        self.meeting.stepped()

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ConfigError("model", None, "is split over several workers and cannot be copied; at the end it is whole")

    def __reduce__(self) -> NoReturn:
        self.__deepcopy__(None)


class _JobMeeting(WorkerSync):
    """Synchronizes the forwards of a group in a job.

    - The worker is notified of each backward, since it would not notice one that reaches none of its parameters.
    - All workers draw dropout masks from the random state of worker 0. Their own states differ, because only one of
      them draws the order of the batches, as the only process of an ordinary script does.
    """

    def __init__(self, passage: ActivationChannel, worker: Worker, begins: Callable[[], None]) -> None:
        super().__init__(passage)
        self._begins = begins
        assert isinstance(worker.path, PushPath)  # gradients of a split model are hidden
        self._path = worker.path
        self.dice = torch.default_generator if passage.me == 0 else torch.Generator()

    def begun(self) -> None:
        """Notify the worker that a backward begins here."""
        super().begun()
        self._begins()
        self._path.begin()

    def meet(self, mine: ForwardHello) -> tuple[ForwardHello, ...]:
        """Exchange hellos as `WorkerSync.meet` does.

        Worker 0 sends its random state before its hello, so that no worker has to wait for it.
        """
        passage, key, draws = self.passage, TensorKey(self.forwards, 0, _DICE, False), mine.chance != 0
        for other in range(1, passage.size if draws and passage.me == 0 else 1):
            passage.send(other, key, self.dice.get_state())
        hellos = super().meet(replace(mine, chance=int(draws)))
        if draws and passage.me != 0:
            self.dice.set_state(passage.take(0, key)[0])
        return hellos


def samples_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the number of samples in the arguments of a call.

    It is the first size of the first tensor that has dimensions.

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
    if samples in sizes:
        sizes[sizes.index(samples)] = -1
    return leaf.dtype, tuple(sizes)
