"""Notice training with a loader outside the job: every worker would read it all.

Only a loader that is read while gradients are on can have a part in a step. A validation reads its loader to the end,
or leaves it, without a backward.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch.utils.data import DataLoader

from topotrain.config.job import ConfigError
from topotrain.training.data.distributed_loader import ShardedLoader
from topotrain.training.data.sampling import AS_IS, is_as_is
from topotrain.training.worker import Worker
from topotrain.training.worker_extension import WorkerExtension


@dataclass(slots=True)
class _Reading:
    """One pass over such a loader.

    Attributes:
        loader: a description of it.
        backwards: those of the script when it was given its last batch.
        steps: as many.
        open: the pass has neither ended nor been dropped.
        trains: a backward followed while it was open.
    """

    loader: str
    backwards: int = 0
    steps: int = 0
    open: bool = True
    trains: bool = False


class _Pass(Iterator[Any]):
    """A pass over a loader that is not in the job; as torch's iterator otherwise."""

    def __init__(self, batches: Any, loader: DataLoader[Any], watch: "UnpreparedLoaders") -> None:
        self._batches, self._watch = batches, watch
        self._loader = "" if is_as_is(loader) else f"{type(loader).__name__} of {type(loader.dataset).__name__}"
        self._reading: _Reading | None = None

    def __next__(self) -> Any:
        self._watch.look(self._reading)
        try:
            batch = next(self._batches)
        except BaseException:
            self._close()
            raise
        if not self._loader:
            self._watch.meant = self._watch.steps
        elif torch.is_grad_enabled():
            self._reading = self._watch.read(self._reading, self._loader)
        return batch

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # not there yet: this object is being copied
            raise AttributeError(name)
        return getattr(self._batches, name)

    def _close(self) -> None:
        if self._reading is not None:
            self._reading.open = False

    def __del__(self) -> None:
        self._close()


class UnpreparedLoaders(WorkerExtension):
    """Watches the loaders of a script that are not in the job.

    Args:
        worker: the worker.
        loader: one that is in the job.
        at_close: gives torch its own function back.
    """

    def __init__(self, worker: Worker, loader: ShardedLoader, at_close: ExitStack) -> None:
        self._worker, self._prepared, self._thread = worker, loader, threading.get_ident()
        self._readings: list[_Reading] = []
        self.steps = self._backwards = 0
        """Steps so far."""
        self._gradient: Callable[[], torch.Tensor | None] = lambda: None  # one of the last step
        self.meant = -1
        """The step before which the script was last given a batch of a loader of `tt.as_is`."""
        # torch has no hook for the begin of a pass. Only worker processes of a job are changed.
        original = DataLoader.__iter__

        def watched(loader: DataLoader[Any]) -> Any:
            batches = original(loader)
            # The dataset, too: a library may make a new loader over batches that are divided already.
            plain = getattr(loader, AS_IS, True) and getattr(loader.dataset, AS_IS, True)
            ours = threading.get_ident() == self._thread and plain
            return _Pass(batches, loader, self) if ours else batches

        at_close.callback(setattr, DataLoader, "__iter__", original)
        setattr(DataLoader, "__iter__", watched)  # noqa: B010  # a type checker refuses a method

    def look(self, reading: _Reading | None) -> None:
        """The next batch is asked for."""
        if reading is not None:
            reading.trains = reading.trains or self._worker.tally.backwards > reading.backwards

    def read(self, reading: _Reading | None, loader: str) -> _Reading:
        """The script is given a batch."""
        if reading is None or reading not in self._readings:
            reading = _Reading(loader)
            self._readings.append(reading)
        reading.backwards, reading.steps = self._worker.tally.backwards, self.steps
        return reading

    def before_step(self) -> None:
        """As `WorkerExtension.before_step`.

        Raises:
            ConfigError: a batch of such a loader has a part in the step.
        """
        known, tally = self._prepared.in_step or self.meant == self.steps, self._worker.tally
        gradient = next((p.grad for p in self._worker.parts.tensors if p.grad is not None), None)
        # The script has set gradients without a backward, of whatever it has read.
        made = tally.backwards == self._backwards and gradient is not None and gradient is not self._gradient()
        for reading in self._readings:
            # A batch of a pass that is over may have been one to validate with, before the backward.
            if reading.open or not known:
                self.look(reading)
            if reading.trains or (made and not known and reading.steps == self.steps):
                accepted = (
                    "gives batches to train with, and was not given to tt.prepare or accelerator.prepare: every worker "
                    "would train on all of it. Read what prepare returns, and give it each loader to train with, also "
                    "one that is new in each epoch (loader = prepare(loader)); or say that each worker is to read all "
                    "of it: tt.as_is(loader)"
                )
                raise ConfigError("loader", reading.loader, accepted)
        self.steps, self._backwards = self.steps + 1, tally.backwards
        self._gradient = (lambda: None) if gradient is None else ref(gradient)
        self._readings = [reading for reading in self._readings if reading.open]
