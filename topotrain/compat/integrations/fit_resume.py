"""How the loops of Lightning go on in a fresh process.

Lightning has its own means: loops and callbacks have a state, and a loop that was loaded goes on where the state says.
The state here comes from the worker's saved state, and how far an epoch has come from the servers. Model, optimizer,
schedulers, data and random numbers are restored by the job.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from topotrain.compat.integrations import external_loop
from topotrain.core.events import Notice
from topotrain.extensions.resume.state_serialization import UnserializableState, pack
from topotrain.training import context as process
from topotrain.training.data.loader_view import LoaderView
from topotrain.training.data.script_position import ScriptPosition

# Parts of a checkpoint of Lightning that the job has itself.
_APART = ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers")


class FitState(external_loop.LoopState):
    """The state of a trainer's loops, its callbacks and its module."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._trainer = trainer
        self._left_out: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        trainer, module = self._trainer, self._trainer.lightning_module
        # As Lightning makes a checkpoint; hooks expect all these keys.
        checkpoint: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "state_dict": module.state_dict(),
            "loops": {"fit_loop": trainer.fit_loop.state_dict()},
            "callbacks": {each.state_key: each.state_dict() for each in trainer.callbacks},
            "optimizer_states": [],
            "lr_schedulers": [],
            "precision": trainer.precision_plugin.state_dict(),
        }
        if trainer.datamodule is not None:
            checkpoint["datamodule"] = trainer.datamodule.state_dict()
        for callback in trainer.callbacks:
            callback.on_save_checkpoint(trainer, module, checkpoint)
        module.on_save_checkpoint(checkpoint)
        kept = {name: value for name, value in checkpoint.items() if name not in _APART}
        kept["callbacks"] = self._plain("callback ", kept["callbacks"])
        return {"checkpoint": self._plain("", kept), "steps": external_loop.steps_so_far()}

    def _plain(self, what: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values that a state can hold; the others are named once."""
        plain = {}
        for name, value in values.items():
            try:
                pack(value, {})
            except UnserializableState as error:
                here, full = process.current(), f"{what}{name}"
                if full not in self._left_out and here is not None:
                    self._left_out.add(full)
                    text = f"the checkpoint's {full} holds {error}: it is not there after a restart"
                    here.emit(Notice(str(here.me), text))
            else:
                plain[name] = value
        return plain

    def restore(self, position: ScriptPosition, done: int, left: int) -> None:
        """Restore loops and callbacks. `done`, `left`: batches of the epoch under way."""
        if self.restored is None:
            return
        trainer, module = self._trainer, self._trainer.lightning_module
        checkpoint = dict(self.restored["checkpoint"])
        checkpoint |= {"state_dict": module.state_dict(), "optimizer_states": [], "lr_schedulers": []}
        module.on_load_checkpoint(checkpoint)
        if trainer.datamodule is not None and "datamodule" in checkpoint:
            trainer.datamodule.load_state_dict(checkpoint["datamodule"])
        trainer.precision_plugin.load_state_dict(checkpoint.get("precision", {}))
        for callback in trainer.callbacks:
            callback.on_load_checkpoint(trainer, module, checkpoint)
            if callback.state_key in checkpoint["callbacks"]:
                callback.load_state_dict(checkpoint["callbacks"][callback.state_key])
        taken = position.steps - self.restored["steps"]
        loops = _at_epoch(checkpoint["loops"]["fit_loop"], position.first, taken)
        fit = trainer.fit_loop
        if left or not done:
            fit.load_state_dict(loops)
            # The epoch begins once more, and its first batches are left out (`RestOfEpoch`).
            for loop in (fit, fit.epoch_loop, fit.epoch_loop.val_loop):
                loop.on_iteration_done()
        else:
            fit.load_state_dict(_at_validation(loops, done))


def _all(tracker: Mapping[str, int], count: int) -> dict[str, int]:
    """A tracker of Lightning at a moment at which nothing is under way."""
    return dict.fromkeys(tracker, count)


def _progress(progress: Mapping[str, Any], total: int, current: int) -> dict[str, Any]:
    found = {**progress, "total": _all(progress["total"], total), "current": _all(progress["current"], current)}
    return {**found, "is_last_batch": False} if "is_last_batch" in found else found


def _at_epoch(loops: Mapping[str, Any], epoch: int, taken: int) -> dict[str, Any]:
    """The state of the loops at the begin of an epoch, and `taken` steps later."""
    found = dict(loops)
    batches = loops["epoch_loop.batch_progress"]
    begun = batches["total"]["completed"] - batches["current"]["completed"]
    # That of a loader with a state of its own. The job knows its position.
    found["state_dict"] = {}
    found["epoch_progress"] = _progress(loops["epoch_progress"], epoch, epoch)
    found["epoch_loop.batch_progress"] = _progress(batches, begun, 0)
    own = loops["epoch_loop.state_dict"]
    found["epoch_loop.state_dict"] = {"_batches_that_stepped": own["_batches_that_stepped"] + taken}
    steps = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    counts = {name: _progress(each, each["total"]["completed"] + taken, 0) for name, each in steps.items()}
    found["epoch_loop.automatic_optimization.optim_progress"] = {"optimizer": counts}
    manual = loops["epoch_loop.manual_optimization.optim_step_progress"]
    found["epoch_loop.manual_optimization.optim_step_progress"] = _progress(
        manual, manual["total"]["completed"] + taken, 0
    )
    return found


def _at_validation(loops: dict[str, Any], batches: int) -> dict[str, Any]:
    """The same state when an epoch's batches are done and its validation is not."""
    found = dict(loops)
    epoch, trained = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    found["epoch_progress"] = {name: {**each, "ready": each["ready"] + 1} for name, each in epoch.items()}
    for each in found["epoch_progress"].values():
        each["started"] += 1
    total = trained["total"]["completed"] + batches
    found["epoch_loop.batch_progress"] = {**_progress(trained, total, batches), "is_last_batch": True}
    validated = _progress(loops["epoch_loop.val_loop.batch_progress"], 0, 0)
    for name in ("total", "current"):
        validated[name] |= {"ready": 1, "started": 1}
    found["epoch_loop.val_loop.batch_progress"] = validated
    # Lightning counts the step once more behind the validation.
    own = loops["epoch_loop.state_dict"]["_batches_that_stepped"]
    found["epoch_loop.state_dict"] = {"_batches_that_stepped": own - 1}
    return found


class RestOfEpoch(LoaderView):
    """This worker's share, in a process that goes on: epochs may be over in part."""

    def __init__(self, share: Any, trainer: Any, position: ScriptPosition) -> None:
        super().__init__(share)
        self._trainer, self._position = trainer, position
        self._first = position.first
        share.skip_to(position.first)

    def __len__(self) -> int:
        return len(self._loader)

    def done(self, epoch: int) -> int:
        """The batches of an epoch that count already."""
        return len(self._loader) - self._position.batches_left(epoch)

    def left(self, epoch: int) -> int:
        """The batches of an epoch that Lightning still has to read."""
        batches, limit = len(self._loader), self._trainer.limit_train_batches
        # As Lightning reads it: a number of batches, or a part of them.
        most = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        return max(0, most - self.done(epoch))

    def __iter__(self) -> Iterator[Any]:
        epoch = self._loader.passes
        if epoch == self._first and self.done(epoch) and not self.left(epoch):
            return iter(())
        if epoch == self._first or self.done(epoch):
            return self._rest(epoch)
        return iter(self._loader)

    def _rest(self, epoch: int) -> Iterator[Any]:
        # Lightning asks for two iterators of the first epoch. The pass begins when the first batch is drawn, when the
        # counters of the epoch are at 0.
        done, loop = self.done(epoch), self._trainer.fit_loop
        batches = iter(self._loader)
        loop.epoch_loop.batch_progress.increment_by(done)
        loop._data_fetcher.fetched += done
        yield from batches

    def finish(self) -> None:
        """The first epoch has no batch left: open its pass, which restores the schedulers."""
        opened = iter(self._loader)
        if self._position.batches_left(self._first):
            # `limit_train_batches` leaves some of them out.
            opened.close()
        for _ in opened:
            raise RuntimeError(f"epoch {self._first} has a batch that was applied before")
        # Lightning steps these after the last batch of an epoch, and no state was saved since.
        self._trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
