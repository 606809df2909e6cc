"""`tt.Trainer`: a training loop driven by the job file, with SINGA's fields.

"At step N" means that N steps are done, as in SINGA. The loop is the loop of an ordinary script, so a synchronous job
ends with the bits of that script. Output lines, tests and files only read the model.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from topotrain.config import job_file
from topotrain.config.job import ConfigError, Job, Updater
from topotrain.core.optim.updater_block import build, clip, follow_schedule
from topotrain.training import api
from topotrain.training import context as process
from topotrain.training.context import Context
from topotrain.training.data.job_progress import StepProgress
from topotrain.training.data.sampling import leading
from topotrain.training.trainer.evaluation import (
    EvaluationLoader,
    EvaluationResult,
    Loss,
    Measure,
    Objective,
    Values,
    evaluate,
)
from topotrain.training.trainer.parameter_files import load_checkpoints
from topotrain.training.trainer.trainer_callbacks import KINDS, TrainerCallbacks

# A slow group may find epochs that the others have read without it; more in a row mean that there is no data.
_EMPTY_PASSES = 1000


class Trainer:
    """Trains a model as the job file says.

    Args:
        model: a torch.nn.Module.
        loss: a loss module, for batches (input, target), or a function of (model, batch).
        train: a DataLoader, read repeatedly until `train_steps` steps are done.
        test, validate: DataLoaders for `test_freq` and `validate_freq`, and for the final result.
        job: a tt.Job or the path of its file, for scripts started as plain `python script.py`. A process of a job has
            its own.
        optimizer: None builds the optimizer of the job's `updater` block.
        metrics: further measures of tests by name, called as the loss is.

    Raises:
        ConfigError: an argument has another type.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        train: DataLoader[Any],
        test: DataLoader[Any] | None = None,
        validate: DataLoader[Any] | None = None,
        job: Job | str | Path | None = None,
        *,
        optimizer: Optimizer | None = None,
        metrics: Mapping[str, Measure] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError("tt.Trainer model", type(model).__name__, "must be a torch.nn.Module")
        for name, loader, missing in (("train", train, False), ("test", test, True), ("validate", validate, True)):
            if not (isinstance(loader, DataLoader) or (missing and loader is None)):
                raise ConfigError(f"tt.Trainer {name}", type(loader).__name__, "must be a torch.utils.data.DataLoader")
        if not isinstance(job, Job | str | Path | None):
            raise ConfigError("tt.Trainer job", type(job).__name__, "must be a tt.Job, or the path of a job file")
        self.model, self.optimizer = model, optimizer
        self._objective = Objective(loss, metrics or {})
        self._train, self._given = train, job
        self._loaders = {"test": test, "validate": validate}
        self.results: list[EvaluationResult] = []
        """Results of tests, on the main worker. Those of the final parameters are added when the job ends."""

    def fit(self) -> None:
        """Train the model. Call this once.

        Raises:
            ConfigError: the job needs something that is missing (the error names the field), or cannot be trained with
                a Trainer.
        """
        # Nothing may be read or written: the plan needs only the model.
        if process.planning():
            self._prepare_all()
            process.use()
        here = process.current()
        job = self._job(here)
        _check(job, self._loaders, here)
        main = here is None or here.is_main
        for found in load_checkpoints(self.model, job.checkpoint_path):
            if main:
                print(f"checkpoint {found}", flush=True)
        if here is None:
            print(_how_to_start(self._given), file=sys.stderr, flush=True)
        held = {
            kind: EvaluationLoader(kind, loader, getattr(job, f"{kind}_steps") or -1)
            for kind, loader in self._loaders.items()
            if loader is not None
        }
        # The callbacks close their threads also if training fails.
        with ExitStack() as stack:
            split = here is not None and here.will_split(self.model)
            looks = main or (split and here is not None and here.me.group == 0)
            # Before `prepare`, so that a job that this model does not allow is refused before anything is connected.
            watch = TrainerCallbacks(self.model, self._objective, job, here, held, stack, split) if looks else None
            self.results = [] if watch is None else watch.results
            optimizer, loader = self._prepare(job, here)
            process.use()
            self._loop(job, here, optimizer, loader, watch)
        # Only reported here. The functions are called when the job has its final parameters.
        for data in held.values():
            self._report(job, data, watch)

    def _job(self, here: Context | None) -> Job:
        if here is not None:
            return here.place.job
        if isinstance(self._given, Job):
            return self._given
        if self._given is None:
            accepted = "is needed in an ordinary process; or start the script with topotrain run JOB.conf"
            raise ConfigError("tt.Trainer job", None, accepted)
        return job_file.load(self._given)

    def _prepare(self, job: Job, here: Context | None) -> tuple[Optimizer, Any]:
        if here is not None:
            _, self.optimizer, loader = self._prepare_all()
            return self.optimizer, loader
        if self.optimizer is None:
            if job.updater is None:
                raise ConfigError(
                    "updater", None, "tt.Trainer got no optimizer, so the job file needs an updater block"
                )
            self.optimizer = build(job.updater, self.model.named_parameters())
            _follow_updater(self.optimizer, job.updater)
        return self._prepare_all()[1:]

    def _prepare_all(self) -> tuple[nn.Module, Optimizer, Any]:
        if self.optimizer is None:
            model, optimizer, loader = api.prepare(self.model, None, self._train)
        else:
            model, optimizer, loader = api.prepare(self.model, self.optimizer, self._train)
        return model, optimizer, loader

    def _loop(
        self, job: Job, here: Context | None, optimizer: Optimizer, loader: Any, watch: TrainerCallbacks | None
    ) -> None:
        if watch is not None:
            watch.begin()
        groups = 1 if here is None else here.place.topology.worker_groups
        done = 0
        # A fresh process continues at its step, in the pass that was under way.
        if here is not None and here.continuing is not None and here.continuing.steps:
            done = here.continuing.steps
            loader.skip_to(here.continuing.first)
        loop = StepProgress(job.train_steps)
        process.begin_loop(loop)
        # An ordinary script's loop, so that a synchronous job has the bits of that script.
        for step, batch in enumerate(_batches(loader, job.train_steps, groups, done), done + 1):
            loop.begin(step)
            optimizer.zero_grad()
            loss = self._objective.loss(self.model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if watch is not None:
                watch.stepped(step, loss, leading(batch) or 1)
        if watch is not None:
            watch.end()

    def _report(self, job: Job, data: EvaluationLoader, watch: TrainerCallbacks | None) -> None:
        """Report the result, measured once with the final parameters."""
        # One evaluation gives all metrics, and each is reported as a function of its own.
        found: Values = {}

        def value(name: str) -> float:
            if not found:
                found.update(evaluate(self.model, self._objective, data))
                if watch is not None:
                    watch.keep(EvaluationResult(data.kind, job.train_steps, found))
            return found[name]

        def called(name: str) -> str:
            return name if data.kind == "test" and name != "loss" else f"{data.kind}_{name}"

        api.report(**{called(name): partial(value, name) for name in self._objective.names})


def _check(job: Job, loaders: Mapping[str, DataLoader[Any] | None], here: Context | None) -> None:
    if job.train_steps == 0:
        raise ConfigError("train_steps", 0, "must be at least 1: it is the number of steps of a Trainer")
    if job.resume and here is None:
        accepted = "needs a job (topotrain run): an ordinary process leaves no snapshots; see checkpoint_path"
        raise ConfigError("resume", True, accepted)
    if job.cluster.backup and here is not None:
        accepted = "must be 0 for a tt.Trainer: its steps are numbered, and a worker that is late leaves some out"
        raise ConfigError("cluster.backup", job.cluster.backup, accepted)
    if here is not None:
        # A step that is repeated would have two numbers.
        here.refuse_repeats("the steps of a tt.Trainer are numbered")
    for kind in KINDS:
        freq, steps = getattr(job, f"{kind}_freq"), getattr(job, f"{kind}_steps")
        if freq and loaders[kind] is None:
            raise ConfigError(f"{kind}_freq", freq, f"needs data: tt.Trainer(…, {kind}=DataLoader(…))")
        if freq and steps == 0:
            raise ConfigError(f"{kind}_steps", 0, f"must be a number of batches with {kind}_freq, or -1: all")


def _batches(loader: Any, steps: int, groups: int, done: int) -> Iterator[Any]:
    """Yield the batches of steps `done` + 1 to `steps`, epoch after epoch."""
    # After a restart one more pass may be empty: that of step `done`, if it was over.
    empty = -1 if done else 0
    while done < steps:
        before = done
        for batch in loader:
            done += 1
            yield batch
            if done == steps:
                break
        empty = 0 if done > before else empty + 1
        if empty >= (1 if groups == 1 else _EMPTY_PASSES):
            raise ConfigError("tt.Trainer train", "a loader", "must give at least one batch")


def _follow_updater(optimizer: Optimizer, updater: Updater) -> None:
    """Apply the updater block in an ordinary process, as workers and servers do."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.register_step_pre_hook(lambda *_: clip(updater, parameters))
    optimizer.register_step_post_hook(follow_schedule(optimizer, updater))


def _how_to_start(given: Job | str | Path | None) -> str:
    conf = "JOB.conf" if isinstance(given, Job) else str(given)
    written = " (JOB.conf: the text of topotrain.config.job_file.dumps(job))" if isinstance(given, Job) else ""
    return f"topotrain: one ordinary process; as a job: topotrain run {conf} {sys.argv[0] or 'script.py'}{written}"
