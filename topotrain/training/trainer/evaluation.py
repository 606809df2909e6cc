"""Evaluation of a model on held-out data, at once or concurrent with training.

An evaluation leaves no trace in the model, in random generators or in the job.

A concurrent evaluation uses a copy of the model with the values that the worker has just pulled. A split model has no
copy. All workers of its group stop: the first worker passes the whole batches, and the others one sample of each, so
that they compute their parts.
"""

import contextlib
import copy
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from topotrain.config.job import ConfigError
from topotrain.core.model.schema import COMPILED
from topotrain.training.context import outside_step
from topotrain.training.data.sampling import leading, share_of_loaded

Values = dict[str, float]
Loss = nn.Module | Callable[[nn.Module, Any], torch.Tensor]
Measure = Callable[[Any, Any], Any]

_SEED = 0  # a shuffled loader gives the same batches at every evaluation, so that results can be compared
_NICE = 19  # lowest priority: a waiting group costs more than a late test


class Objective:
    """The loss that is minimized, and further metrics.

    Args:
        loss: a loss module, called with (model(input), target) for batches (input, target). Or any function of (model,
            batch) that returns a tensor with one element, the mean over the batch.
        metrics: functions by name, called as `loss` is: with (model(input), target), or with (model, batch). They
            return means.

    Raises:
        ConfigError: `loss` is something else, or has parameters. Or a metric is called "loss".
    """

    def __init__(self, loss: Loss, metrics: Mapping[str, Measure]) -> None:
        if not callable(loss):
            raise ConfigError("tt.Trainer loss", loss, "must be a loss module, or a function of (model, batch)")
        # The optimizer does not have them, so they would not be trained.
        if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
            raise ConfigError("tt.Trainer loss", type(loss).__name__, "has parameters: make it a part of the model")
        for name, metric in metrics.items():
            if name == "loss" or not callable(metric):
                raise ConfigError(f"tt.Trainer metrics[{name!r}]", metric, "must be a function, and not called loss")
        self._loss, self._metrics = loss, dict(metrics)
        self.names = ("loss", *self._metrics)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of a batch."""
        return torch.as_tensor(self._all(model, batch, {"loss": self._loss})["loss"])

    def measure(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Return the loss and all metrics of a batch."""
        return self._all(model, batch, {"loss": self._loss, **self._metrics})

    def follow(self, model: nn.Module, batch: Any) -> None:
        """Call the model as often as `measure` does, while another worker measures."""
        # A loss module is called outside the model, so this worker has no part in it.
        if isinstance(self._loss, nn.Module):
            self._all(model, batch, {})
        else:
            self.measure(model, batch)

    def _all(self, model: nn.Module, batch: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(self._loss, nn.Module):
            return {name: of(model, batch) for name, of in wanted.items()}
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            accepted = "needs batches (input, target); for other batches make the loss a function of (model, batch)"
            raise ConfigError("tt.Trainer loss", type(self._loss).__name__, accepted)
        here = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
        # A worker may hold nothing of a split model.
        device = next(here, torch.device("cpu"))
        given, target = (part.to(device) if isinstance(part, torch.Tensor) else part for part in batch)
        output = model(given)
        return {name: of(output, target) for name, of in wanted.items()}


class EvaluationLoader:
    """A copy of the script's loader with a separate random generator.

    Args:
        kind: "test" or "validate".
        batches: the number of batches from the first; -1: all.
    """

    def __init__(self, kind: str, loader: DataLoader[Any], batches: int) -> None:
        self.kind = kind
        self._batches = None if batches < 0 else batches
        self._generator = torch.Generator()
        self._loader = copy.copy(loader)
        # `copy` has copied the iterator of persistent processes, which belongs to the script's loader.
        own = {"generator": self._generator, "_iterator": None, "sampler": self._with_generator(loader.sampler)}
        if isinstance(loader.batch_sampler, BatchSampler) and hasattr(loader.batch_sampler, "sampler"):
            own["batch_sampler"] = copy.copy(loader.batch_sampler)
            own["batch_sampler"].sampler = self._with_generator(loader.batch_sampler.sampler)
        for name, value in own.items():
            object.__setattr__(self._loader, name, value)  # DataLoader refuses ordinary assignment

    def _with_generator(self, sampler: Any) -> Any:
        if getattr(sampler, "generator", self) is not None:  # it has its own, or does not use one
            return sampler
        # A copy, since the training loader may use the sampler as well.
        own = copy.copy(sampler)
        own.generator = self._generator
        return own

    def __iter__(self) -> Iterator[Any]:
        # At each pass, so that every evaluation sees the same batches.
        self._generator.manual_seed(_SEED)
        return islice(self._loader, self._batches)


def evaluate(
    model: nn.Module, objective: Objective, data: EvaluationLoader, stop: threading.Event | None = None
) -> Values:
    """Return the means over all samples of `data`, or those before `stop` was set.

    Raises ConfigError if the loader gives no batch.
    """
    sums: Values = {}
    samples = 0
    with _in_evaluation(model):
        for batch in data:
            # Batches count by their samples, since the last one may be smaller.
            count = leading(batch) or 1
            for name, value in objective.measure(model, batch).items():
                sums[name] = sums.get(name, 0.0) + float(value) * count
            samples += count
            if stop is not None and stop.is_set():
                break
    if not samples:
        raise ConfigError(f"tt.Trainer {data.kind}", "a loader", "must give at least one batch")
    return {name: total / samples for name, total in sums.items()}


def follow(model: nn.Module, objective: Objective, data: EvaluationLoader) -> None:
    """Compute this worker's part of a split model that another worker evaluates."""
    with _in_evaluation(model):
        for batch in data:
            samples = leading(batch)
            # This worker's own input does not count, so one sample of it is enough.
            objective.follow(model, batch if samples is None else share_of_loaded(batch, samples, (0, 1), 1)[0])


@contextlib.contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    # A script may have set parts of a model to eval mode, and `model.train()` would lose that.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        # `outside_step`: calls of `tt.weight` and `tt.local` in the model are no part of the script's step.
        with torch.no_grad(), outside_step():
            yield
    finally:
        for module, training in modes:
            module.training = training


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The values measured with the parameters of step `step`."""

    kind: str
    step: int
    values: Values


class BackgroundEvaluator:
    """Evaluates a copy of the model in a separate thread of low priority.

    Raises:
        ConfigError: the model cannot be copied.
    """

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        # torch.compile wraps a module. The module itself has the same parameters, and can be copied.
        model = getattr(model, COMPILED, model)
        try:
            self._copy = copy.deepcopy(model)
        except Exception as error:
            accepted = f"cannot be copied for testing beside the training (copy.deepcopy): {error}"
            raise ConfigError("tt.Trainer model", type(model).__name__, accepted) from error
        self._model, self._objective = model, objective
        self._stop = threading.Event()
        # No process of its own: torch's kernels run without Python's lock.
        self._pool = ThreadPoolExecutor(1, "evaluation", _lower_priority)
        self._running: Future[list[EvaluationResult]] | None = None
        self._stream: torch.cuda.Stream | None = None

    def offer(self, step: int, data: list[EvaluationLoader]) -> bool:
        """Start to evaluate the present model; False if the last evaluation still runs."""
        if self._running is not None:
            return False
        with torch.no_grad():
            for into, now in zip(_contents(self._copy), _contents(self._model), strict=True):
                # On the script's thread: the values must not change while they are copied.
                into.copy_(now)
        # On a GPU the copy may still run when this returns, so the evaluation waits for this event.
        copied = _mark(next(self._copy.parameters()).device)
        self._running = self._pool.submit(self._evaluate, step, data, copied)
        return True

    def results(self, wait: bool) -> list[EvaluationResult]:
        """Return the results of an evaluation that has ended, or raise its error."""
        running = self._running
        if running is None or not (wait or running.done()):
            return []
        # First, because `result` may raise the evaluation's error, and then too it is over.
        self._running = None
        return running.result()

    def close(self) -> None:
        """Stop a running evaluation after its current batch."""
        self._stop.set()
        # With `wait`: a thread that still runs torch kernels at interpreter shutdown may crash.
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _evaluate(
        self, step: int, data: list[EvaluationLoader], copied: torch.cuda.Event | None
    ) -> list[EvaluationResult]:
        with self._on_own_stream(copied):
            found = [(one.kind, evaluate(self._copy, self._objective, one, self._stop)) for one in data]
        return [EvaluationResult(kind, step, values) for kind, values in found]

    def _on_own_stream(self, copied: torch.cuda.Event | None) -> contextlib.AbstractContextManager[Any]:
        """Use a separate GPU stream, so that training does not wait for the evaluation."""
        if copied is None:
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(next(self._copy.parameters()).device)  # type: ignore[no-untyped-call]
        self._stream.wait_event(copied)
        return torch.cuda.stream(self._stream)


def _contents(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _mark(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _lower_priority() -> None:
    with contextlib.suppress(OSError):  # a thread's own priority, as Linux has it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


@contextlib.contextmanager
def rng_restored(model: nn.Module) -> Iterator[None]:
    """Restore the random state after the block."""
    # Some models draw random numbers even in eval mode.
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices, key=str)):
        yield
