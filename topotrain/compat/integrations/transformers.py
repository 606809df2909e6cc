"""The Trainer of Hugging Face transformers, with its steps taken by a job.

    from topotrain.compat.integrations.transformers import Trainer

The Trainer sees one process. Its batch is the group's, its dataloader gives this worker's share, and only the main
worker logs and saves. In an ordinary process this is the plain `transformers.Trainer`. Only scripts import this file;
it needs the extra `transformers`.
"""

from contextlib import ExitStack
from dataclasses import replace
from operator import length_hint
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from topotrain.compat.integrations import accelerate, external_loop
from topotrain.compat.integrations.trainer_resume import PartialEpoch, TrainerLoop
from topotrain.config.job import ConfigError
from topotrain.training import api
from topotrain.training import context as process
from topotrain.training.worker_extension import WorkerExtension

try:
    import transformers
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState
except ImportError as error:
    raise external_loop.missing("transformers", "transformers") from error

_RESUME = "must be left out: a job goes on from its own snapshots, with `topotrain run --resume WORKSPACE`"
_SKIP = "must be false: the batches that count are skipped when a job goes on"
_TOO_SMALL = "a batch has fewer samples than the group has workers: with accumulation drop the last, or make it larger"
# The Trainer's methods in which it resumes, and which are overridden below. Older releases do not have them.
_RESUMES = ("_init_training_state", "_run_epoch", "_load_callback_state")
_DIVISOR = (
    "must divide a sum over the labels by num_items_in_batch, with loss_is_scaled_for_ga = True, or call tt.weight(n) "
    "with the number of labels of its mean: otherwise the part of each worker would count by its samples"
)
_OLD = "this version of transformers resumes in another way"
_SECOND = "must train the model of the job's first train(): that of another one, as in a search, is a job of its own"
_BEST = "must be false: the job's result is the servers' values at its end"


class Trainer(transformers.Trainer):
    """`transformers.Trainer`, with the same arguments.

    In a job it raises ConfigError for the Trainer's own resuming, and for loading the best model at the end.
    """

    # Set by transformers, and assigned below, too.
    state: TrainerState
    control: TrainerControl

    _handing: external_loop.ExternalAccounting | None = None
    _loop: TrainerLoop | None = None
    # Of the present batch: it counts, its labels are one for each token, the divisor that transformers gives the loss,
    # and whether the loss is known to be divided by it.
    _counted = _per_item = _divided = False
    _items: Any = None

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # transformers has no hook for the class of its accelerator.
        self.accelerator.__class__ = accelerate.PlacedAccelerator
        self.accelerator.take_place()

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as transformers. Raises ConfigError for settings that fail in a job."""
        external_loop.refuse("resume_from_checkpoint", resume_from_checkpoint, _RESUME)
        external_loop.refuse("ignore_data_skip", self.args.ignore_data_skip, _SKIP)
        external_loop.refuse("load_best_model_at_end", self.args.load_best_model_at_end, _BEST)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.__dict__.pop("create_optimizer", None)

    def get_train_dataloader(self) -> Any:
        """Return the loader; when training begins, tie it to the job."""
        loader, here = super().get_train_dataloader(), process.current()
        if self.is_in_train and here is not None:
            # Wrapped before it is tied: wrapping sends the state through load_state_dict.
            if here.worker is not None and not here.knows((self.model,)):
                raise ConfigError("Trainer", type(self.model).__name__, _SECOND)
            made = self.create_optimizer()
            plain = made.optimizer if isinstance(made, accelerate.AcceleratedOptimizer) else made
            known = external_loop.renewed(plain)
            self.optimizer = self.accelerator.prepare(made if known is plain else known)
            # transformers calls it once more, and one that the script overrides may make another optimizer.
            self.__dict__["create_optimizer"] = self._made_optimizer
            # Before the schedule is made, since a group's epoch may have fewer steps.
            self._loop = TrainerLoop(self)
            old = "" if all(hasattr(transformers.Trainer, name) for name in _RESUMES) else _OLD
            # Below accelerate's own loader, which knows from one batch ahead whether a batch is the epoch's last.
            loader.base_dataloader, self._handing = external_loop.tie(
                self.model, [known], loader.base_dataloader, counted=True, state=self._loop, unrepeatable=old
            )
            self._loop.batches = length_hint(loader.base_dataloader)
            position = external_loop.going_on()
            if position is not None:
                loader.base_dataloader.skip_to(position.first)
        return loader

    def _made_optimizer(self, *_: Any) -> Any:
        return self.optimizer

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        """Take the state of the earlier process, as from a checkpoint."""
        position = external_loop.going_on()
        numbers = (max_steps, num_update_steps_per_epoch, num_train_epochs)
        if self._loop is None or position is None:
            begun: tuple[int, int] = super()._init_training_state(*numbers, checkpoint, trial)
            return begun
        text = self._loop.trainer_state(position, num_update_steps_per_epoch)
        if not text:
            super()._init_training_state(*numbers, None, trial)
        else:
            with TemporaryDirectory(prefix="topotrain-") as folder:
                Path(folder, TRAINER_STATE_NAME).write_text(text)
                super()._init_training_state(*numbers, folder, trial)
        # Batches are skipped by epoch, in `_run_epoch`: those of the next epoch may be applied in part, too.
        return position.first, 0

    def _load_callback_state(self) -> None:
        """Restore the callbacks.

        After a death this is done also where the arguments do not ask for it.
        """
        if external_loop.going_on() is None:
            super()._load_callback_state()
            return
        saved = {
            name: iter(states if isinstance(states, list) else [states])
            for name, states in self.state.stateful_callbacks.items()
        }
        for callback in self._stateful():
            state = next(saved.get(type(callback).__name__, iter(())), None)
            if state is None:
                continue
            if callback is self.control:
                self.control = TrainerControl(**state["args"])
            # In place, other than the Trainer: the script may hold the object.
            for name, value in state["attributes"].items():
                setattr(callback, name, value)

    def _stateful(self) -> list[Any]:
        callbacks = (*self.callback_handler.callbacks, self.control)
        return [each for each in callbacks if isinstance(each, ExportableState)]

    def full_state(self) -> TrainerState:
        """The Trainer's state and those of its callbacks, as in its checkpoints."""
        return replace(self.state, stateful_callbacks=self._stateful())

    def _run_epoch(self, **how: Any) -> None:
        """Run an epoch; of one that was under way, the batches that are left."""
        position, here = external_loop.going_on(), process.current()
        if self._loop is not None and position is not None and here is not None:
            epoch, loader = how["epoch"], how["train_dataloader"]
            self._loop.epoch_begins()
            done, left = self._loop.done(position, epoch), position.batches_left(epoch)
            if left and self.state.global_step >= self.state.max_steps:
                # The Trainer looks behind a step only, and the last one was made by the earlier process.
                self.control = replace(self.control, should_training_stop=True)
                return
            if epoch > position.first:
                step = self.state.global_step + self._loop.steps(done)
                self.state = replace(self.state, global_step=step)
            if done and not left:
                # The pass is over for this worker. It is opened all the same, which restores the schedule.
                loader.set_epoch(epoch)
                for _ in loader.base_dataloader:
                    raise RuntimeError(f"epoch {epoch} has a batch that was applied before")
                self._loop.align_schedule()
            if done:
                how |= {
                    "train_dataloader": PartialEpoch(loader, epoch, done, left),
                    "epochs_trained": epoch,
                    "steps_trained_in_current_epoch": done,
                    # A folder without files of the Trainer: the job restores what they would hold.
                    "resume_from_checkpoint": str(here.workspace),
                }
        super()._run_epoch(**how)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Draw the batches of a step. A state of the job is one between two steps."""
        drawn = super().get_batch_samples(*args, **kwargs)
        if self._handing is not None:
            self._handing.begin_step(len(drawn[0]))
        return drawn

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Take a step as transformers.

        Raises:
            ConfigError: it is not known by which number of items the loss is divided.
        """
        if self._handing is not None:
            self._counted = self._handing.hand_on() > 0
            assert self._loop is not None
            self._loop.align_schedule()
            labels = inputs.get("labels")
            self._per_item = torch.is_tensor(labels) and labels.dim() == 2 and not labels.is_floating_point()
            self._items = num_items_in_batch
            # transformers' own loss is divided by them.
            self._divided = self.compute_loss_func is not None or bool(self.loss_is_scaled_for_ga)
            if num_items_in_batch is not None and not self._counted and self.current_gradient_accumulation_steps > 1:
                # The other workers' losses are divided by what all batches of the step have, here as well as there.
                raise ConfigError("dataloader_drop_last", self.args.dataloader_drop_last, _TOO_SMALL)
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss as transformers."""
        self._divided = self._divided or num_items_in_batch is not None
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def compute_loss_context_manager(self) -> ExitStack:
        """As transformers; behind the loss, its weight in the group's mean is set."""
        stack: ExitStack = super().compute_loss_context_manager()
        if self._handing is not None and self._counted and self.model.training:
            stack.callback(self._weigh)
        return stack

    def _weigh(self) -> None:
        if external_loop.weight_given():
            return
        # A loss that is a sum over items counts by this worker's number of items, and a mean over samples by those.
        if self._items is not None and self._divided:
            api.weight(float(self._items))
        elif self._per_item:
            raise ConfigError("compute_loss", type(self).__name__, _DIVISOR)

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate; during training on the main worker only."""
        # All workers must evaluate where training depends on the result.
        if api.is_main() or self._steered():
            return super()._evaluate(*args, **kwargs)  # type: ignore[no-any-return]
        return {}

    def _steered(self) -> bool:
        """Whether a metric may change training, on all workers alike."""
        if self.args.metric_for_best_model is not None or isinstance(self.lr_scheduler, ReduceLROnPlateau):
            return True
        # A callback of the script may do anything with a metric, such as stop the training.
        return any(
            type(callback).on_evaluate is not transformers.TrainerCallback.on_evaluate
            for callback in self.callback_handler.callbacks
            if not type(callback).__module__.startswith("transformers.")
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as transformers."""
        super().save_model(output_dir, _internal_call)
        # Where groups end one after the other, the final parameters come later, and are saved once more then.
        if not _internal_call:
            external_loop.with_final_values(_FinalSave(self, output_dir))


class _FinalSave(WorkerExtension):
    """Saves the job's result where the script has saved the model."""

    def __init__(self, trainer: Trainer, output_dir: str | None) -> None:
        self._trainer, self._output_dir = trainer, output_dir

    def job_over(self) -> None:
        self._trainer.save_model(self._output_dir, _internal_call=True)
