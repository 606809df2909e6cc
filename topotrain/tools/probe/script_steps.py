"""Measure the steps of a script: their parts, and when gradients are ready.

The script calls `tt.prepare`. A step ends with that of the first optimizer. The measurements of a step lie between two
such ends. The script gets batches of two sizes from its own loader, which is changed in place, so that the script keeps
the object that it has made. A smaller batch has the first samples of the full one, as a worker of a group has a share
of the group's batch.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property, partial
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from topotrain.parallel.api.dry_run import PreparedArguments
from topotrain.training.context import PrepareObserver
from topotrain.training.parameters.flat_parameters import ModelParts
from topotrain.training.parameters.prepared_objects import PreparedObjects, joined

SMALL_SHARE = 4
"""A full batch has so many times the samples of a small one."""


class BatchWatch:
    """The known facts of the batches that a script is given."""

    def __init__(self) -> None:
        self.small = 0  # samples in a small batch; 0: there was none
        self.alternates = False  # every second batch is small
        self.given = 0  # samples of the batches since the last step
        self.drawn_at = 0.0  # when the last batch was given, by `time.perf_counter`
        self.full = 0  # samples in the largest batch so far

    def let_alternate(self, small: int) -> None:
        """Let every second batch have so many samples; 0: all batches are full."""
        self.small, self.alternates = small or self.small, bool(small)

    def drawn(self, samples: int) -> None:
        self.given += samples
        self.full = max(self.full, samples)
        self.drawn_at = time.perf_counter()

    def step_over(self) -> int:
        given, self.given = self.given, 0
        return given


class CutBatches:
    """A batch sampler with the batches of another one, some of them made small."""

    def __init__(self, inner: Any, watch: BatchWatch) -> None:
        self._inner, self._watch, self._next_is_small = inner, watch, False
        self.sizes: deque[int] = deque()
        """Of the batches of the present pass that the loader has asked for, and not given yet."""

    def __iter__(self) -> Iterator[Any]:
        # A new one: workers of an earlier pass may have read ahead.
        sizes: deque[int] = deque()
        self.sizes = sizes
        return self._cut(sizes)

    def _cut(self, sizes: deque[int]) -> Iterator[Any]:
        for indices in map(list, self._inner):
            self._next_is_small = self._watch.alternates and not self._next_is_small
            cut = indices[: self._watch.small] if self._next_is_small else indices
            sizes.append(len(cut))
            yield cut

    def __len__(self) -> int:
        return len(self._inner)

    # Scripts ask a batch sampler for its own attributes, and set its epoch.
    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)


def watch_batches(loader: DataLoader[Any], watch: BatchWatch) -> None:
    """Count the batches of a loader, and cut them as `watch` says."""
    sampler = None if loader.batch_sampler is None else CutBatches(loader.batch_sampler, watch)
    if sampler is not None:
        # torch refuses this attribute on a finished loader, because its own parts would then disagree.
        object.__setattr__(loader, "batch_sampler", sampler)

    class WatchedLoader(type(loader)):  # type: ignore[misc]
        """The script's loader, which notes the batches that it gives."""

        def __iter__(self) -> Iterator[Any]:
            batches = super().__iter__()
            sizes = deque() if sampler is None else sampler.sizes
            for batch in batches:
                watch.drawn(sizes.popleft() if sizes else first_size(batch))
                yield batch

    loader.__class__ = WatchedLoader


def first_size(batch: Any) -> int:
    """Return the first size of the first tensor in a batch; 0 without one."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((found for found in map(first_size, batch) if found), 0)
    shape: Any = getattr(batch, "shape", ())
    return int(shape[0]) if len(shape) else 0


LEAST_STEPS = 3
"""A median of fewer steps says nothing."""


@dataclass(frozen=True)
class StepTimes:
    """The seconds of a step. other: of the loader, and of the script."""

    samples: int
    forward: float
    backward: float
    optimizer: float
    other: float

    @property
    def computing(self) -> float:
        return self.forward + self.backward


def medians(steps: Sequence[StepTimes]) -> StepTimes:
    return StepTimes(*map(median, zip(*map(astuple, steps), strict=True)))


def spread(steps: Sequence[StepTimes]) -> float:
    """Return the standard deviation of a step without its optimizer, over the mean."""
    # Half the width of the middle two thirds: an evaluation between two epochs is not the chance that is meant.
    if len(steps) < 2 * LEAST_STEPS:
        return 0.0
    own = [step.computing + step.other for step in steps]
    cuts = quantiles(own, n=6)
    return float((cuts[4] - cuts[0]) / 2 / median(own))


def synchronize(devices: Iterable[torch.device]) -> None:
    for device in devices:
        if device.type != "cpu":  # elsewhere a call returns before its work is done
            torch.accelerator.synchronize(device)


class StepRecorder(PrepareObserver):
    """Records the steps of a script that calls `tt.prepare`.

    step_over: is called at each end. Its own work counts for no step.
    """

    def __init__(self, watch: BatchWatch, step_over: Callable[[], None] = lambda: None) -> None:
        self._watch, self._step_over = watch, step_over
        self._devices: set[torch.device] = set()
        self.calls: list[PreparedObjects] = []  # what the script has prepared
        self.steps: list[StepTimes] = []  # those since `clear`
        self.count = 0  # of all steps
        self._began = self._forward_at = self._optimizer_at = 0.0
        self._forward = self._backward = self._optimizer = 0.0
        self._inside = 0  # calls of an optimizer's `step` that have not returned
        self._ready_at: list[float] = []
        self._ready: list[list[float]] = []

    # --- what the script has prepared ----------------------------------------------------------------------------

    @cached_property
    def made(self) -> PreparedArguments:
        """All that was prepared. Raises ConfigError, as a job would."""
        made = joined(self.calls)
        return PreparedArguments(made.model, made.optimizers, made.loader)

    @cached_property
    def parts(self) -> ModelParts:
        """The model as servers see it. Raises ConfigError, as a job would."""
        return self.made.parts()

    def prepared(self, call: PreparedObjects) -> None:
        if not self.calls:
            # `Tensor.backward` looks this function up at each call. This process does nothing but measure.
            torch.autograd.backward = self._timed_backward(torch.autograd.backward)
        self.calls.append(call)
        for model in call.models:
            self._devices |= {parameter.device for parameter in model.parameters()}
            model.register_forward_pre_hook(self._forward_begins, with_kwargs=True)
        for optimizer in call.optimizers:
            optimizer.register_step_pre_hook(self._optimizer_begins)
            optimizer.register_step_post_hook(self._optimizer_ends)
        if call.loader is not None:
            watch_batches(call.loader, self._watch)

    def ready(self) -> list[float]:
        """Return the share of the backward after which each gradient is there."""
        return [min(1.0, median(shares)) if shares else 1.0 for shares in self._ready]

    def clear(self) -> None:
        """Forget the steps so far; the next one begins now."""
        self.steps = []
        self._ready = [[] for _ in self._ready]
        self._begin_step()

    # --- a step --------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        """Return the time when all work on the devices of the parameters is done."""
        synchronize(self._devices)
        return time.perf_counter()

    def _begin_step(self) -> None:
        self._began = self._now()
        self._forward_at = self._forward = self._backward = self._optimizer = 0.0

    def _forward_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        # An evaluation has no backward.
        if torch.is_grad_enabled() and model.training and self._forward_at <= self._watch.drawn_at:
            self._forward_at = self._now()
            if not self._watch.given:
                self._watch.drawn(first_size((*args, *kwargs.values())))
                self._forward_at = self._watch.drawn_at

    def _timed_backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any, **kwargs: Any) -> None:
            began = self._now()
            # A script may call the parts of its model, and not the model.
            forward_at = self._forward_at or self._watch.drawn_at
            if forward_at > self._began:
                self._forward += began - forward_at
            backward(*args, **kwargs)
            ended = self._now()
            self._backward += ended - began
            self._forward_at = 0.0
            for at, shares in zip(self._ready_at, self._ready, strict=True):
                if began <= at <= ended:
                    shares.append((at - began) / max(ended - began, 1e-9))

        return timed

    def _optimizer_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # torch calls the hooks for the step of a subclass, and once more for that of its base class inside it.
        if not self._inside:
            self._optimizer_at = self._now()
        self._inside += 1

    def _optimizer_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        now = self._now()
        self._inside -= 1
        if self._inside:
            return
        self._optimizer += now - self._optimizer_at
        if not self._ready:
            self._observe_gradients()
        if optimizer is self.made.optimizers[0]:
            self._end_step(now)

    def _end_step(self, now: float) -> None:
        self.count += 1
        rest = now - self._began - self._forward - self._backward - self._optimizer
        times = (self._forward, self._backward, self._optimizer, max(0.0, rest))
        self.steps.append(StepTimes(self._watch.step_over(), *times))
        self._begin_step()
        self._step_over()
        # Without the time that the call took.
        self._begin_step()

    def _observe_gradients(self) -> None:
        """Note from here on when the gradients are there."""
        tensors = self.parts.tensors
        self._ready_at, self._ready = [0.0] * len(tensors), [[] for _ in tensors]
        for index, tensor in enumerate(tensors):
            if tensor.requires_grad:
                # torch has no types for this one.
                tensor.register_post_accumulate_grad_hook(partial(self._gradient_ready, index))  # type: ignore[no-untyped-call]

    def _gradient_ready(self, index: int, tensor: torch.Tensor) -> None:
        self._ready_at[index] = self._now()
