"""Lightning: a strategy for one device that takes its steps in a job.

    Trainer(accelerator="cpu", devices=1, strategy=TopotrainStrategy())

Lightning sees one process, and of a job's workers only the main one is its global zero. In an ordinary process this is
the plain strategy for one device. Only scripts import this file; it needs the extra `lightning`. It works with
`pytorch_lightning` and with `lightning`: the one that the script has imported, else the one that is installed.
"""

import os
import signal
import sys
import threading
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from topotrain.compat.integrations import external_loop
from topotrain.compat.integrations.fit_resume import FitState, RestOfEpoch
from topotrain.config.job import ConfigError, Grads
from topotrain.extensions.worker_values import worker_values
from topotrain.training import api
from topotrain.training import context as process

# Before Lightning can choose its environment by these variables.
external_loop.hide_launcher()

# Older releases have no `on_iteration_done`, and other counters.
_OLD = "this version of Lightning resumes in another way"
_NAMES = ("pytorch_lightning", "lightning.pytorch")


def _package() -> str:
    """Return the name of the package that the script uses."""
    # Objects of one package are refused by the other, so the imported one comes first; of two, the later one.
    there = [name for name in sys.modules if name in _NAMES][::-1]
    there += [name for name in _NAMES if find_spec(name.split(".")[0]) is not None]
    if not there:
        raise external_loop.missing("Lightning", "lightning")
    return there[0]


_SEARCHING = (
    "must be left out: the search goes by the loss of one worker's share of each batch. Search in an ordinary process "
    "(python instead of topotrain run), and set what it has found"
)
_REFUSED = {
    "BatchSizeFinder": _SEARCHING,
    "LearningRateFinder": _SEARCHING,
    "BaseFinetuning": "must be left out: give the optimizer all parameters in configure_optimizers, and let a callback "
    "set requires_grad of those that train later",
    "ModelPruning": "must be left out: it replaces parameters that the servers hold. Prune what the job ends with",
}

_package()
if TYPE_CHECKING:
    from lightning_utilities.core.rank_zero import rank_zero_only
    from pytorch_lightning.strategies import SingleDeviceStrategy
else:
    rank_zero_only = import_module("lightning_utilities.core.rank_zero").rank_zero_only
    SingleDeviceStrategy = object


class TopotrainStrategy(SingleDeviceStrategy):
    """One device in a job: `fit` ties model, optimizer and training loader to it.

    device, more: as for `SingleDeviceStrategy`. Raises ConfigError at `fit`, for settings that fail in a job: several
    training loaders, one that is loaded again, clipping by Lightning where the script does not see the mean.
    """

    strategy_name = "topotrain"

    def __new__(cls, *args: Any, **more: Any) -> "TopotrainStrategy":
        # Only now: the script may import Lightning after this file.
        base = import_module(_package() + ".strategies").SingleDeviceStrategy
        made: TopotrainStrategy = super().__new__(cls if issubclass(cls, base) else type(cls.__name__, (cls, base), {}))
        return made

    def __init__(self, device: torch.device | str = "cpu", **more: Any) -> None:
        super().__init__(device, **more)
        # Lightning's `rank_zero_only` reads its own attribute, and not the strategy's.
        self.global_rank = self.local_rank = rank_zero_only.rank = api.rank()
        self._handing: external_loop.ExternalAccounting | None = None
        # Set in a process that goes on in an epoch of which all batches are trained, until that epoch is over.
        self._finished: RestOfEpoch | None = None
        # The handler of SIGTERM before Lightning's.
        self._sigterm: Any = signal.SIG_DFL

    def setup_environment(self) -> None:
        self._sigterm = signal.getsignal(signal.SIGTERM)
        # Of an earlier `fit`.
        self._handing = self._finished = None
        super().setup_environment()

    def setup_optimizers(self, trainer: Any) -> None:
        for each in trainer.callbacks:
            for base in type(each).__mro__:
                external_loop.refuse(type(each).__name__, base.__name__ in _REFUSED, _REFUSED.get(base.__name__, ""))
        super().setup_optimizers(trainer)
        strategy: Any = self
        renewed = {each: external_loop.renewed(each) for each in strategy.optimizers}
        for config in strategy.lr_scheduler_configs:
            if getattr(config.scheduler, "optimizer", None) in renewed:
                config.scheduler.optimizer = renewed[config.scheduler.optimizer]
        strategy.optimizers = list(renewed.values())

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker logs and writes."""
        return api.is_main()

    # --- what Lightning asks of processes that train together, answered over the workers of the group

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        worker_values.broadcast(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        external_loop.refuse("broadcast src", src, "must be 0, the first worker of the group")
        return worker_values.broadcast(obj)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        name = str(reduce_op).rpartition(".")[2].lower().replace("avg", "mean")
        value = tensor if tensor.is_floating_point() or name != "mean" else tensor.float()
        return getattr(worker_values, name)(value) if self._trains else tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        return worker_values.gather(tensor, sync_grads and tensor.requires_grad) if self._trains else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return bool((worker_values.min if all else worker_values.max)(int(decision)))

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning reduces what is logged: it would divide loaders, too."""
        return self._handing is not None and self._trains and self.lightning_module.trainer.train_dataloader is not None

    @property
    def _trains(self) -> bool:
        """Whether a value is of this worker's share: validation has the whole data."""
        return bool(self.lightning_module.trainer.training)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # The main worker has written its own best one, and a metric may differ in its last bits.
        path = worker_values.broadcast(os.fspath(checkpoint_path), over="job")
        found: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        return found

    def process_dataloader(self, dataloader: object) -> object:
        """Divide the first loader of a fit, after the sanity check's. Others stay whole."""
        trainer = self.lightning_module.trainer
        if process.current() is None or trainer.state.fn != "fit" or trainer.sanity_checking:
            return dataloader
        if self._handing is not None:
            # Only set when the training loaders are complete: before that, this is a second training loader.
            if trainer.train_dataloader is None:
                raise ConfigError("train_dataloaders", "several", "one DataLoader, divided among the workers")
            return dataloader
        self._check(trainer, dataloader)
        # Lightning would end this process after its batch. The launcher decides: a last snapshot comes first.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._sigterm)
        state = FitState(trainer)
        # Lightning reads no batch ahead of a loader with a length.
        how: dict[str, Any] = {"counted": True, "state": state, "ahead": False}
        old = "" if hasattr(trainer.fit_loop, "on_iteration_done") else _OLD
        share, self._handing = external_loop.tie(self.model, self.optimizers, dataloader, unrepeatable=old, **how)
        position = external_loop.going_on()
        if position is None:
            return share
        rest = RestOfEpoch(share, trainer, position)
        done, left = rest.done(position.first), rest.left(position.first)
        state.restore(position, done, left)
        self._finished = rest if done and not left else None
        return rest

    def on_train_start(self) -> None:
        super().on_train_start()
        if self._finished is not None:
            self._finished.finish()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self._finished is not None:
            # The validation that was interrupted is over, and the epoch ends as any other.
            self._finished = None
            self.lightning_module.trainer.fit_loop.on_iteration_done()

    def _check(self, trainer: Any, loader: object) -> None:
        here = process.current()
        assert here is not None
        if not isinstance(loader, DataLoader):
            raise ConfigError("train_dataloaders", type(loader).__name__, "must be a torch.utils.data.DataLoader")
        # The hook runs early if `configure_optimizers` asks for the number of steps, which needs the loader.
        if not self.optimizers:
            accepted = "is not known yet in configure_optimizers: give Trainer(max_steps=...)"
            raise ConfigError("trainer.estimated_stepping_batches", None, accepted)
        again = trainer.reload_dataloaders_every_n_epochs
        external_loop.refuse("reload_dataloaders_every_n_epochs", again, "must be 0: the loader is divided once")
        if here.place.job.grads is Grads.kHidden:
            accepted = "must be left out with grads: kHidden; let the servers clip: updater { clip_norm: ... }"
            external_loop.refuse("gradient_clip_val", trainer.gradient_clip_val, accepted)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # Lightning may have read a batch ahead: the oldest one goes to the model now.
        if self._handing is not None:
            self._handing.hand_on()
        return super().training_step(*args, **kwargs)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state, gathered from the servers, on the worker that writes it."""
        return super().optimizer_state(optimizer) if self.is_global_zero else {}
