"""Save and restore learning rates and LR schedulers of a worker's optimizers.

The script does not hand over its schedulers, so they are found by their references to an optimizer. Two schedulers of
one class over one optimizer, or one with state that is not plain data, are left out with a notice. For these the script
calls `tt.keep`.

A process may die between a step and the scheduler's. A scheduler that had stepped with each step, within a pass, is
then one behind the servers, and steps once more when it is restored. Behind the first step of all, only the other
workers of the group may know that it steps with each (`previous_run`). With several optimizers the script repeats its
last batch, and with it the scheduler's step.
"""

import gc
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from topotrain.config.job import ConfigError
from topotrain.core.events import Notifier
from topotrain.extensions.resume.state_serialization import UnserializableState, pack, unpack
from topotrain.extensions.resume.worker_state import WorkerState

# Entries of a parameter group that name its parameters, and are not settings.
_APART = frozenset({"params", "param_names"})


class OptimizerRates:
    """Parameter groups and schedulers of the optimizers.

    kept: the objects of `tt.keep` by name. notifier: shows each notice once.
    """

    def __init__(self, optimizers: Sequence[Optimizer], kept: Mapping[str, object], notifier: Notifier) -> None:
        self._optimizers, self._kept, self._notifier = tuple(optimizers), kept, notifier
        self._notified: set[str] = set()
        self._all: list[Any] = []
        self._named: dict[str, Any] = {}
        self._seen: tuple[list[object], tuple[object, ...]] | None = None
        # Names of schedulers that have stepped within a pass.
        self._within: set[str] = set()
        self._noted: tuple[object, ...] = ()

    def find(self) -> None:
        """Search for schedulers at the begin of an epoch, if there may be new ones."""
        groups = self._groups()
        # Every scheduler writes this key.
        if not any("initial_lr" in group for group in groups):
            return
        seen = ([group["lr"] for group in groups], self.mark())
        # The rates have changed and no known scheduler has: there is another one. A search takes as long as some steps.
        if self._seen is None or (seen[0] != self._seen[0] and seen[1] == self._seen[1]):
            self._search()
            seen = (seen[0], self.mark())
        self._seen = seen

    def _search(self) -> None:
        # PyTorch has no list of an optimizer's schedulers.
        owners = gc.get_referrers(*self._optimizers)
        found = [o for o in owners if isinstance(o, LRScheduler)]
        # Before Python 3.13 the attributes of an object may be in a dict, which then is the referrer.
        dicts = [o for o in owners if isinstance(o, dict)]
        found += [o for o in gc.get_referrers(*dicts) if isinstance(o, LRScheduler)] if dicts else []
        self._all = list({id(o): o for o in found if self.has(o)}.values())
        # SequentialLR and ChainedScheduler have the states of their inner schedulers in their own.
        inner = {id(i) for o in self._all for i in getattr(o, "_schedulers", ())}
        names = {id(thing): f"tt.keep {name}" for name, thing in self._kept.items()}
        by_name: dict[str, list[Any]] = {}
        for one in self._all:
            if id(one) not in inner:
                # By class, because the next process has other objects. An object of `tt.keep` has a name of its own.
                by_name.setdefault(names.get(id(one), self._name_of(one)), []).append(one)
        self._named = {name: ones[0] for name, ones in by_name.items() if len(ones) == 1}
        for name in by_name.keys() - self._named.keys():
            self._notify_once(
                f"there are several LR schedulers {name}: to have them after a restart, tt.keep(name=scheduler)"
            )

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _name_of(self, scheduler: LRScheduler) -> str:
        kind = type(scheduler).__qualname__
        if len(self._optimizers) == 1:
            return kind
        at = next(number for number, each in enumerate(self._optimizers) if each is scheduler.optimizer)
        return f"{kind} of optimizer {at} ({type(scheduler.optimizer).__name__})"

    def has(self, thing: object) -> bool:
        """Whether this is a scheduler of one of the optimizers."""
        return isinstance(thing, LRScheduler) and any(thing.optimizer is each for each in self._optimizers)

    def _notify_once(self, text: str) -> None:
        if text not in self._notified:
            self._notified.add(text)
            self._notifier.notify(text)

    def begin_pass(self) -> None:
        """A pass begins: search, and forget the steps of schedulers since the pass before."""
        self.find()
        self._noted = self.mark()

    def note_steps(self) -> bool:
        """Note which schedulers have stepped since the last call, within the pass.

        Returns:
            whether one has.
        """
        before, self._noted = self._noted, self.mark()
        if before == self._noted:
            return False
        stepped = {id(one) for one, was, now in zip(self._all, before, self._noted, strict=True) if was != now}
        self._within |= {name for name, one in self._named.items() if id(one) in stepped}
        return True

    def mark(self) -> tuple[object, ...]:
        """Return a value that changes with every step of a scheduler."""
        return tuple((one.last_epoch, getattr(one, "_step_count", 0)) for one in self._all)

    def pack(self, state: WorkerState) -> WorkerState:
        """Return the state with groups and schedulers."""
        tensors = state.tensors
        groups = []
        for group in self._groups():
            pairs = {}
            for name, value in group.items():
                if name not in _APART:
                    try:
                        pairs[name] = pack(value, tensors)
                    # A setting that is not plain data. The script sets it again.
                    except UnserializableState:
                        continue
            groups.append(pairs)
        schedulers = {}
        for name, one in self._named.items():
            try:
                schedulers[name] = pack(one.state_dict(), tensors)
            except UnserializableState as error:
                self._notify_once(f"the LR scheduler {name} holds {error}: it is not there after a restart")
        return replace(state, groups=groups, schedulers=schedulers, within=sorted(self._within))

    def restore(self, state: WorkerState, steps: int) -> None:
        """Restore groups and schedulers, after `steps` steps.

        Raises:
            ConfigError: the state is that of another optimizer.
        """
        groups = self._groups()
        if len(groups) != len(state.groups):
            raise ConfigError("optimizer.param_groups", len(groups), f"must be {len(state.groups)}, as before")
        if state.schedulers:
            # `find` looks at the begin of an epoch, and this is earlier.
            self._search()
        for name, packed in state.schedulers.items():
            one = self._named.get(name)
            if one is None:
                self._notify_once(
                    f"the script has made no LR scheduler {name} yet: what it was before the restart is lost"
                )
                continue
            one.load_state_dict(unpack(packed, state.tensors))
        # After the schedulers: loading one does not set the rates, and its constructor has changed them.
        for group, packed in zip(groups, state.groups, strict=True):
            if not isinstance(packed, dict):
                raise ConfigError("optimizer.param_groups", repr(packed)[:80], "must be packed groups")
            group.update({str(name): unpack(value, state.tensors) for name, value in packed.items()})
        self._within = {str(name) for name in state.within}
        if steps == state.steps + 1 and len(self._optimizers) == 1:
            self._catch_up(state.steps)

    def _catch_up(self, steps: int) -> None:
        """The process died after a step, perhaps before the scheduler's. Make up for it.

        Otherwise the workers of a group would disagree about the rate.
        """
        for name, one in self._named.items():
            # Only schedulers that have stepped with each of the steps so far. One that steps after each epoch has as
            # many steps where an epoch is one batch.
            if name in self._within and one.last_epoch == steps and not isinstance(one, ReduceLROnPlateau):
                with warnings.catch_warnings():
                    # PyTorch warns where the first step of the optimizer was made by another process.
                    warnings.simplefilter("ignore")
                    one.step()
