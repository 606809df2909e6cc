"""Hugging Face accelerate: an `Accelerator` with topotrain's `prepare`.

    from topotrain.compat.integrations.accelerate import Accelerator

accelerate sees one process, and of a job's workers only the main one is its main process. In an ordinary process this
is the plain `accelerate.Accelerator`. Only scripts import this file; it needs the extra `transformers`.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from topotrain.compat.integrations import external_loop
from topotrain.extensions.worker_values import worker_values
from topotrain.training import api
from topotrain.training import context as process
from topotrain.training.data.distributed_loader import ShardedLoader
from topotrain.training.data.loader_view import LoaderView

# Before accelerate can read the variables.
external_loop.hide_launcher()

try:
    import accelerate
    from accelerate.data_loader import DataLoaderShard
    from accelerate.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
    from accelerate.state import PartialState
except ImportError as error:
    raise external_loop.missing("accelerate", "transformers") from error


class PlacedAccelerator(accelerate.Accelerator):
    """An Accelerator that knows its worker's rank and group, and servers that clip."""

    def take_place(self) -> None:
        """Make only the job's main worker a main process."""
        if self.num_processes > 1:
            external_loop.refuse("accelerator.num_processes", self.num_processes, "must be 1: topotrain starts them")
        if (here := process.current()) is None:
            return
        external_loop.refuse("use_stateful_dataloader", self.use_stateful_dataloader, _STATEFUL)
        # One process would read for all of them, and could not send them what it has read.
        self.dataloader_config.dispatch_batches = False
        # All ways to wait end in this method. In the object it would be part of the files of TrainingArguments.
        here.at_close.callback(setattr, PartialState, _WAIT, getattr(PartialState, _WAIT))
        setattr(PartialState, _WAIT, lambda _: worker_values.exchange(_WAIT, None, "job"))
        # `self.state` copies the numbers of PartialState when it is made, so both are set.
        for state in (PartialState(), self.state):
            state.process_index = state.local_process_index = api.rank()

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip as accelerate; with `grads: kHidden` the servers clip, at the step."""
        # As accelerate does: the norm is that of the gradients without the loss scale.
        self.unscale_gradients()
        return api.clip_grad_norm_(parameters, max_norm, norm_type)

    def check_trigger(self) -> bool:
        """Return whether a worker of the group has set the trigger."""
        mine = bool(super().check_trigger())
        return any(worker_values.exchange("check_trigger", mine, "group") or [mine])

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load as accelerate, when the main process has written what others read."""
        self.wait_for_everyone()
        with external_loop.writing():
            super().load_state(*args, **kwargs)


_WAIT = "wait_for_everyone"
_SHUFFLED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_REGISTERED = "register_for_checkpointing"
_STATEFUL = "must be False: a job knows which batches count, and the loader goes on there by itself"
_TWO = "is read in a pass over another loader: train on one (StackDataset(a, b)), and validate in torch.no_grad()"
_SKIPS = "must be left out: the loader of a job that goes on leaves out the batches that count already"


class Accelerator(PlacedAccelerator):
    """`accelerate.Accelerator`; in a job `prepare` ties its arguments to the job."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.take_place()

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare as accelerate, in one call or several, until a batch is read.

        The first DataLoader that comes with an optimizer, or after one, is divided: that is the one to train on. So are
        later ones that are shuffled. In `torch.no_grad()`, and of other loaders, each worker reads everything.

        Raises:
            ConfigError: `topotrain.prepare` refuses an argument.
        """
        made = super().prepare(*args, **kwargs)
        if (here := process.current()) is None:
            return made
        found = list(made) if isinstance(made, tuple) else [made]
        optimizers = [each.optimizer for each in found if isinstance(each, AcceleratedOptimizer)]
        modules = (each for each in found if isinstance(each, nn.Module))
        # A frozen one, such as a teacher, is no part of the job.
        trained = [each for each in modules if any(p.requires_grad for p in each.parameters())]
        if objects := [*trained, *optimizers]:
            api.prepare(*objects)
        at = [i for i, each in enumerate(found) if type(each) is DataLoaderShard] if here.adopted else []
        shuffled = [i for i in at if isinstance(found[i].get_sampler(), _SHUFFLED)]
        if at and here.loader is None:
            shuffled = shuffled or at[:1]
            external_loop.divided(found[shuffled[0]].base_dataloader)
        for i in shuffled:
            found[i] = ForwardingLoader(found[i])
        return tuple(found) if isinstance(made, tuple) else found[0]

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Register as accelerate; in a job, also as objects of `tt.keep`."""
        super().register_for_checkpointing(*objects)
        if (here := process.current()) is None:
            return
        for thing in objects:
            # By their order, also where the script has several Accelerators. No name of `tt.keep` has a space.
            api.keep(**{f"{_REGISTERED} {sum(name.startswith(_REGISTERED) for name in here.kept)}": thing})

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Skip as accelerate. Raises ConfigError for the training loader of a job."""
        if isinstance(dataloader, ForwardingLoader):
            external_loop.refuse("skip_first_batches", num_batches, _SKIPS)
            return dataloader
        return super().skip_first_batches(dataloader, num_batches)


class ForwardingLoader(LoaderView):
    """A loader of accelerate that notes each batch; all else is the loader's own."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._whole = loader.base_dataloader

    @cached_property
    def _share(self) -> ShardedLoader:
        return external_loop.divided(self._whole)

    @cached_property
    def _handing(self) -> external_loop.ExternalAccounting:
        # Only when it is read: until the first batch the script may prepare more.
        return external_loop.account(self._share)

    def __iter__(self) -> Iterator[Any]:
        if not torch.is_grad_enabled():
            self._loader.base_dataloader = self._whole  # no step is made of its batches
            yield from self._loader
            return
        share = self._share
        external_loop.refuse("accelerator.prepare", share.under_way and type(self._whole.dataset).__name__, _TWO)
        handing = self._handing
        # Below accelerate's own loader, which knows from one batch ahead whether a batch is the epoch's last.
        self._loader.base_dataloader = share
        if external_loop.going_on() is not None:
            # accelerate counts the passes of this process, of which there are fewer.
            self._loader.set_epoch(share.passes)
        for batch in self._loader:
            handing.hand_on()
            yield batch

    def __len__(self) -> int:
        return len(self._share)
