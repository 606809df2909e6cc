"""How the Trainer of Hugging Face goes on in a fresh process.

The Trainer has its own means: a state that it reads from a file, and epochs of which it skips the first batches. Here
both are given what the job knows: the state comes from the worker's saved state, and the batches that are skipped are
those that the servers have applied. Model, optimizer, data and random numbers are restored by the job.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.utils.data import IterableDataset

from topotrain.compat.integrations import external_loop
from topotrain.training.data.sampling import AS_IS
from topotrain.training.data.script_position import ScriptPosition


class TrainerLoop(external_loop.LoopState):
    """The state of a Trainer (`transformers.py`), its callbacks and its schedule."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._trainer = trainer
        self.batches = 0
        """Of this worker in an epoch."""
        # The last step of the schedule less that of the training. None: the same pass was checked before.
        self._lead: int | None = None

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        # Before the schedule is aligned, it may lag behind by the step that the process died in.
        lead = getattr(trainer.lr_scheduler, "last_epoch", 0) - trainer.state.global_step
        return {
            "trainer": json.dumps(asdict(trainer.full_state()), default=_plain),
            "schedule": lead if self._lead is None else self._lead,
            "steps": external_loop.steps_so_far(),
            "batches": self.batches,
        }

    def trainer_state(self, position: ScriptPosition, steps_in_epoch: int) -> str:
        """Return the Trainer's state as the text of its file; "" if none was saved."""
        saved = self.restored
        if saved is None:
            return ""
        state = json.loads(saved["trainer"])
        same = saved["batches"] == self.batches and external_loop.keeps_its_batches()
        if same or self._trainer.args.max_steps > 0:
            # Steps after the state was saved are known from the servers only.
            state["global_step"] += position.steps - saved["steps"]
        else:
            # What is left of the epoch was divided anew. The Trainer ends at the steps of all epochs.
            state["global_step"] = position.first * steps_in_epoch + self.steps(self.done(position, position.first))
        return json.dumps(state)

    def steps(self, batches: int) -> int:
        """The steps of so many batches."""
        return int(batches // self._trainer.args.gradient_accumulation_steps)

    def done(self, position: ScriptPosition, epoch: int) -> int:
        """The batches of an epoch that count already."""
        return self.batches - position.batches_left(epoch)

    def epoch_begins(self) -> None:
        """The schedule must be checked once more: a pass that goes on restores it."""
        self._lead = None if self.restored is None else self.restored["schedule"]

    def align_schedule(self) -> None:
        """Let the schedule stand at the Trainer's step.

        The process may have died between a step and the schedule's.
        """
        if self._lead is None or self.restored is None:
            return
        schedule, due = self._trainer.lr_scheduler, self._trainer.state.global_step + self._lead
        self._lead = None
        if not isinstance(schedule, LRScheduler) or isinstance(schedule, ReduceLROnPlateau):
            return
        behind = due - schedule.last_epoch
        if isinstance(schedule, LambdaLR) and behind:
            # On another layout the steps are others, forwards or backwards.
            schedule.load_state_dict({**schedule.state_dict(), "last_epoch": due - 1, "_step_count": due + 1})
            schedule.step()
        elif self.restored["batches"] == self.batches:
            for _ in range(behind):
                schedule.step()


def _plain(value: object) -> object:
    """A value of another type than JSON's: a number of numpy or torch, or its text."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return str(value)


class PartialEpoch:
    """A loader for an epoch of which the Trainer skips the first batches.

    `accelerate.skip_first_batches`, which the Trainer calls, makes another loader of its dataset. So the dataset here
    has batches. Those that are skipped have no content.

    loader: the Trainer's, which gives the batches that are left. None: there are none.
    """

    # What `skip_first_batches` asks for: the batches stay as they are, in this process.
    batch_size = prefetch_factor = sampler = batch_sampler = worker_init_fn = multiprocessing_context = generator = None
    drop_last = persistent_workers = pin_memory = False
    num_workers = timeout = 0
    pin_memory_device = ""

    def __init__(self, loader: Any, epoch: int, skipped: int, left: int) -> None:
        self.dataset = _Batches(loader if left else None, epoch, skipped)
        self._batches = skipped + left

    def __len__(self) -> int:
        return self._batches

    @staticmethod
    def collate_fn(batch: Any) -> Any:
        return batch


class _Batches(IterableDataset[Any]):
    def __init__(self, loader: Any, epoch: int, skipped: int) -> None:
        self._loader, self._epoch, self._skipped = loader, epoch, skipped
        vars(self)[AS_IS] = False  # its batches are those of the prepared loader

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._skipped):
            yield None
        if self._loader is not None:
            # The Trainer tells only the loader that `skip_first_batches` has made.
            self._loader.set_epoch(self._epoch)
            yield from self._loader
