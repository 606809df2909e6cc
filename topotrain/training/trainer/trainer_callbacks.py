"""Side tasks of a `tt.Trainer`: output lines, tests and checkpoints.

The job says when, and the main worker does them. Side tasks read the values that the worker has just pulled, which do
not change before its next `step()`.

A split model is in parts on the workers of the group. So each worker computes its part of a test and sends its part of
a checkpoint. All of them count the same steps of the same job, so no message is needed to start this.
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from topotrain.config.intervals import StepInterval
from topotrain.config.job import ConfigError, Job
from topotrain.core.events import Notice, Tested
from topotrain.training.context import Context
from topotrain.training.final_parameters import tensors_of
from topotrain.training.parameters.divided_model import DividedModel
from topotrain.training.parameters.flat_parameters import describe_model
from topotrain.training.parameters.prepared_objects import RowModule
from topotrain.training.trainer.evaluation import (
    BackgroundEvaluator,
    EvaluationLoader,
    EvaluationResult,
    Objective,
    evaluate,
    follow,
    rng_restored,
)
from topotrain.training.trainer.parameter_files import ParameterFiles

KINDS = ("test", "validate")
_CHECKPOINT = "a checkpoint (checkpoint_freq)"


class TrainerCallbacks:
    """Side tasks of the main worker, and of its group if the model is split.

    Args:
        model: the model before training.
        here: the context of this process; None in an ordinary process.
        held: the evaluation data by kind.
        stack: closes resources.
        split: the model will be split over the group.

    Raises:
        ConfigError: the job needs tests or checkpoints, which this model does not allow.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        job: Job,
        here: Context | None,
        held: Mapping[str, EvaluationLoader],
        stack: ExitStack,
        split: bool = False,
    ) -> None:
        self._main = here is None or here.is_main
        self._model, self._objective, self._job, self._here = model, objective, job, here
        self._held, self._stack = held, stack
        self.results: list[EvaluationResult] = []
        self._intervals = {what: StepInterval.of(job, what) for what in ("disp", "checkpoint", *KINDS)}
        self._beside: BackgroundEvaluator | None = None
        self._checkpoints: ParameterFiles | None = None
        self._skipped = 0
        self._loss: float | torch.Tensor = 0.0
        self._samples = self._steps = 0
        self._since = 0.0
        tests = any(self._intervals[kind].freq for kind in KINDS)
        if tests or self._intervals["checkpoint"].freq:
            _refuse_tables(job, self._model)
        # An ordinary process has no group that would wait, so it tests in its loop.
        if tests and here is not None and not split:
            self._beside = BackgroundEvaluator(self._model, objective)
            stack.callback(self._beside.close)

    def begin(self) -> None:
        """Start, with the job's initial values in the model."""
        if self._intervals["checkpoint"].freq and self._main:
            folder = Path(self._job.workspace) if self._here is None else self._here.workspace
            self._checkpoints = ParameterFiles(folder)
            self._stack.callback(self._checkpoints.close)
        self._run_due(0)
        self._since = time.monotonic()

    def stepped(self, step: int, loss: torch.Tensor, samples: int) -> None:
        """Handle the end of step `step`, with its loss and its number of samples."""
        value = loss.detach()
        # To read a value from a GPU would wait for it, at every step.
        self._loss += float(value) if value.device.type == "cpu" else value.double()
        self._steps += 1
        self._samples += samples
        if self._main and self._intervals["disp"].due(step):
            self._display(step)
        self._run_due(step)

    def end(self) -> None:
        """Finish all side tasks after the last step."""
        for result in [] if self._beside is None else self._beside.results(wait=True):
            self._found(result)
        if self._checkpoints is not None:
            self._checkpoints.wait()
        if self._skipped and self._here is not None:
            words = f"{self._skipped} evaluations were left out, because the previous evaluation was still running"
            self._here.emit(Notice(str(self._here.me), words))

    def keep(self, result: EvaluationResult) -> None:
        """Keep a result and send it to the report."""
        self.results.append(result)
        if self._here is not None:
            who = str(self._here.me)
            self._here.emit(Tested(who, result.kind, result.step, dict(result.values), self._skipped))

    def _display(self, step: int) -> None:
        now = time.monotonic()
        rate = self._samples / max(now - self._since, 1e-9)
        print(f"step {step}  loss {float(self._loss) / self._steps:.6g}  {rate:,.0f} samples/s", flush=True)
        self._loss, self._samples, self._steps, self._since = 0.0, 0, 0, now

    def _run_due(self, step: int) -> None:
        if self._beside is not None:
            for result in self._beside.results(wait=False):
                self._found(result)
        last = step == self._job.train_steps
        # As in SINGA the last values are always written; they are tested as the job's result.
        write = self._intervals["checkpoint"].freq > 0 and (last or self._intervals["checkpoint"].due(step))
        due = [] if last else [self._held[kind] for kind in KINDS if self._intervals[kind].due(step)]
        # With `pull: kLazy` some values are still on their way.
        if (write or due) and self._here is not None and self._here.worker is not None:
            self._here.worker.client.values.settle()
        if due:
            self._test(step, due)
        if write and self._checkpoints is not None:
            # Before the next copy of the model, so that there is one at a time.
            self._checkpoints.wait()
            self._checkpoints.write(step, *self._values())
        elif write:
            # Another worker of the main worker's group: only its part of a split model is wanted.
            self._split().gather(_CHECKPOINT)

    def _test(self, step: int, due: list[EvaluationLoader]) -> None:
        if self._beside is not None:
            self._skipped += 0 if self._beside.offer(step, due) else len(due)
            return
        with rng_restored(self._model):
            for data in due:
                if self._main:
                    self._found(EvaluationResult(data.kind, step, evaluate(self._model, self._objective, data)))
                else:
                    follow(self._model, self._objective, data)

    def _split(self) -> DividedModel:
        assert self._here is not None
        assert self._here.split is not None
        return self._here.split

    def _values(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return copies of the main worker's tensors by name, and a file's metadata."""
        if self._here is not None and self._here.split is not None:
            return self._split().gather(_CHECKPOINT) or {}, self._split().metadata
        worker = None if self._here is None else self._here.worker
        tensors, metadata = tensors_of(describe_model(self._model) if worker is None else worker.parts)
        return {name: tensor.clone() for name, tensor in tensors.items()}, metadata

    def _found(self, result: EvaluationResult) -> None:
        values = "  ".join(f"{name} {value:.6g}" for name, value in result.values.items())
        print(f"{result.kind} @ step {result.step}  {values}", flush=True)
        self.keep(result)


def _refuse_tables(job: Job, model: nn.Module) -> None:
    """Refuse tests and checkpoints of models with tables."""
    # Rows are pulled over the worker's own connections, one request at a time, and are in no checkpoint.
    kinds = (nn.Embedding, nn.EmbeddingBag)
    if any(isinstance(m, RowModule) or (isinstance(m, kinds) and m.sparse) for m in model.modules()):
        for what in ("checkpoint", *KINDS):
            freq = getattr(job, f"{what}_freq")
            if freq:
                accepted = "must be 0 for a model with tables or sparse weights, which is tested and written at the end"
                raise ConfigError(f"{what}_freq", freq, accepted)
