"""The objects that a script gives to `tt.prepare`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from topotrain.config.job import ConfigError
from topotrain.training.data.distributed_loader import ShardedLoader
from topotrain.training.data.sampling import is_as_is


class RowModule(nn.Module, ABC):
    """A module with rows outside the model's parameters, such as `tt.Embedding`."""

    @abstractmethod
    def follow(self, optimizer: Optimizer) -> None:
        """In an ordinary process: let `step()` update rows, `zero_grad()` clear them."""


class Stateful(Protocol):
    """Has a state that a restart restores: a scheduler, a scaler, an average."""

    def state_dict(self) -> Any:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Restore the state."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedObjects:
    """The objects of one call of `tt.prepare`, or of several calls.

    Attributes:
        given: all of them, in their order.
        models: the modules among them.
        optimizers: the optimizers. Empty: the job's updater block builds it, in the place of the first None.
        loaders: those that are divided.
        stateful: what has a state besides.
        built: the optimizer of the updater block, if the call has one.
    """

    given: tuple[object, ...]
    models: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]
    loaders: tuple[DataLoader[Any], ...]
    stateful: tuple[Stateful, ...]
    built: Optimizer | None = None

    @property
    def loader(self) -> DataLoader[Any] | None:
        """The first of the loaders."""
        return next(iter(self.loaders), None)

    @property
    def _filled(self) -> list[nn.Module]:
        # A module without contents, a loss function say, gets no number.
        return [model for model in self.models if _has_contents(model)] or list(self.models)

    @property
    def several(self) -> bool:
        """Whether there are several models."""
        return len(self._filled) > 1

    @property
    def model(self) -> nn.Module:
        """The model. Of several it is a list, and their parameters have numbers in front."""
        return nn.ModuleList(self._filled) if self.several else self._filled[0]

    @property
    def needs_updater(self) -> bool:
        """Whether the job's updater block builds the optimizer."""
        return bool(self.models) and not self.optimizers and None in self.given

    def with_built(self, optimizer: Optimizer) -> "PreparedObjects":
        """The same call with the optimizer that was built in the place of the first None."""
        at = self.given.index(None)
        given = (*self.given[:at], optimizer, *self.given[at + 1 :])
        return replace(self, given=given, optimizers=(optimizer,), built=optimizer)

    def returned(self, divided: Callable[[DataLoader[Any]], object]) -> Any:
        """Return what the call returns: as many objects, or the only one."""
        by_id = {id(loader): divided(loader) for loader in self.loaders}
        found = [by_id.get(id(thing), thing) for thing in self.given]
        return tuple(found) if len(found) != 1 else found[0]


def sort_objects(objects: Sequence[object]) -> PreparedObjects:
    """Sort the arguments of a call by their kinds.

    Raises:
        ConfigError: an object is of no such kind, or there is no model, no optimizer and no loader.
    """
    models, optimizers, stateful = [], [], []
    loaders: list[DataLoader[Any]] = []
    for thing in objects:
        match thing:
            case None:
                continue
            case nn.Module():
                models.append(thing)
            case Optimizer():
                optimizers.append(thing)
            case _ if _is_loader(thing):
                if isinstance(thing, DataLoader) and not is_as_is(thing):
                    loaders.append(thing)
            case _ if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
                stateful.append(thing)
            case _:
                accepted = (
                    "must be a torch.nn.Module, a torch.optim optimizer, a torch.utils.data.DataLoader, None, or have "
                    "state_dict and load_state_dict; several are given one by one"
                )
                raise ConfigError("tt.prepare", type(thing).__name__, accepted)
    if not (models or optimizers or any(map(_is_loader, objects))):
        raise ConfigError("tt.prepare", None, "must have a torch.nn.Module, or an optimizer of one that is prepared")
    return PreparedObjects(tuple(objects), _unique(models), _unique(optimizers), _unique(loaders), tuple(stateful))


def joined(calls: Sequence[PreparedObjects], complete: bool = True) -> PreparedObjects:
    """Join the objects of several calls; complete: no more follow.

    Raises:
        ConfigError: there is no model or optimizer.
    """
    given = tuple(chain.from_iterable(call.given for call in calls))
    models = _unique(chain.from_iterable(call.models for call in calls))
    optimizers = _unique(chain.from_iterable(call.optimizers for call in calls))
    loaders = _unique(chain.from_iterable(call.loaders for call in calls))
    stateful = tuple(chain.from_iterable(call.stateful for call in calls))
    made = PreparedObjects(given, models, optimizers, loaders, stateful)
    if not complete:
        return made
    if not models:
        names = " and ".join(type(each).__name__ for each in optimizers)
        raise ConfigError("tt.prepare", names, "must come with the torch.nn.Module that it trains")
    if not optimizers and not made.needs_updater:
        accepted = (
            "must have an optimizer, or None in its place for the one of the job file's updater block: "
            "model, optimizer = tt.prepare(model, None)"
        )
        raise ConfigError("tt.prepare", type(models[0]).__name__, accepted)
    return made


def _is_loader(thing: object) -> bool:
    # What is prepared already may be given once more, and stays as it is.
    return isinstance(thing, DataLoader | ShardedLoader) or is_as_is(thing)


def _unique(things: Any) -> Any:
    # By identity: several calls may name the same model.
    return tuple({id(thing): thing for thing in things}.values())


def _has_contents(model: nn.Module) -> bool:
    held = chain(model.parameters(), model.buffers(), (m for m in model.modules() if isinstance(m, RowModule)))
    return next(held, None) is not None
