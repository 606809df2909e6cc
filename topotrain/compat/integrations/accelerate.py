"""Hugging Face accelerate: an `Accelerator` with topotrain's `prepare`.

    from topotrain.compat.integrations.accelerate import Accelerator

accelerate sees one process, and of a job's workers only the main one is its main process. In an ordinary process this
is the plain `accelerate.Accelerator`. Only scripts import this file; it needs the extra `transformers`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from topotrain.compat.integrations import external_loop
from topotrain.training import api
from topotrain.training import context as process
from topotrain.training.data.distributed_loader import ShardedLoader

# Before accelerate can read the variables.
external_loop.hide_launcher()

try:
    import accelerate
    from accelerate.data_loader import DataLoaderShard
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import PartialState
except ImportError as error:
    raise external_loop.missing("accelerate", "transformers") from error


class PlacedAccelerator(accelerate.Accelerator):
    """An Accelerator that knows its worker's rank, and that servers may clip."""

    def take_place(self) -> None:
        """Make only the job's main worker a main process, which logs, prints and saves."""
        if self.num_processes > 1:
            external_loop.refuse(
                "accelerate's number of processes", self.num_processes, "must be 1: topotrain starts them"
            )
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


_REGISTERED = "register_for_checkpointing"
_SKIPS = "must be left out: the loader of a job that goes on leaves out the batches that count already"


class Accelerator(PlacedAccelerator):
    """`accelerate.Accelerator`; in a job `prepare` ties its arguments to the job."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.take_place()
        self._trains = self._divides = False  # an optimizer was prepared; so was the loader to train on

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare as accelerate, in any order and in one call or several, until a batch is read.

        The first DataLoader that comes with an optimizer, or after one, is divided: that is the one to train on. Others
        stay whole.

        Raises:
            ConfigError: `topotrain.prepare` refuses an argument.
        """
        made = super().prepare(*args, **kwargs)
        if process.current() is None:
            return made
        found = list(made) if isinstance(made, tuple) else [made]
        optimizers = [each.optimizer for each in found if isinstance(each, AcceleratedOptimizer)]
        modules = (each for each in found if isinstance(each, nn.Module))
        # A frozen one, such as a teacher, is no part of the job.
        trained = [each for each in modules if any(p.requires_grad for p in each.parameters())]
        objects = [*trained, *optimizers]
        self._trains = self._trains or bool(optimizers)
        at = next((i for i, each in enumerate(found) if type(each) is DataLoaderShard), None)
        if at is not None and self._trains and not self._divides:
            self._divides = True
            # Below accelerate's own loader, which knows from one batch ahead whether a batch is the epoch's last.
            share = found[at].base_dataloader = external_loop.divided(found[at].base_dataloader, *objects)
            found[at] = ForwardingLoader(found[at], share)
        elif objects:
            api.prepare(*objects)
        return tuple(found) if isinstance(made, tuple) else found[0]

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Register as accelerate; in a job, also as objects of `tt.keep`."""
        super().register_for_checkpointing(*objects)
        here = process.current()
        if here is None:
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


class ForwardingLoader:
    """A loader of accelerate that notes each batch; all else is the loader's own."""

    def __init__(self, loader: Any, share: ShardedLoader) -> None:
        self._loader, self._share = loader, share
        self._handing: external_loop.ExternalAccounting | None = None

    def __iter__(self) -> Iterator[Any]:
        # Only now: until the first batch the script may prepare more.
        if self._handing is None:
            self._handing = external_loop.account(self._share)
        if external_loop.going_on() is not None:
            # accelerate counts the passes of this process, of which there are fewer.
            self._loader.set_epoch(self._loader.base_dataloader.passes)
        for batch in self._loader:
            self._handing.hand_on()
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        # Not set yet: this object is being copied or unpickled.
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)
