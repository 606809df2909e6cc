"""The learning rates of a worker's optimizer, and what drives them: torch's LR schedulers, found where they are.

Rule: a scheduler is known by its class, for the next process has other objects. Where two are of one class, or one
holds what is no plain value, it is left out with a word, and `tt.keep` is the way.
"""

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from topotrain.config.job import ConfigError
from topotrain.extensions.resume.state_serialization import UnserializableState, pack, unpack
from topotrain.extensions.resume.worker_state import WorkerState

_APART = frozenset({"params", "param_names"})


class OptimizerRates:
    """Parameter groups and schedulers of one optimizer.

    Args:
        optimizer: the script's.
        kept: what the script keeps under names: schedulers among it are known by these.
        tell: told, in words, what is left out; once each.
    """

    def __init__(self, optimizer: Optimizer, kept: Mapping[str, object], tell: Callable[[str], None]) -> None:
        self._optimizer, self._kept, self._tell = optimizer, kept, tell
        self._told: set[str] = set()
        self._all: list[Any] = []
        self._named: dict[str, Any] = {}
        self._seen: tuple[list[object], tuple[object, ...]] | None = None

    def look(self) -> None:
        """An epoch begins: look for schedulers, if there may be some that are not known."""
        groups = self._optimizer.param_groups
        if "initial_lr" not in groups[0]:  # every scheduler writes it there
            return
        seen = ([group["lr"] for group in groups], self.mark())
        # Rates that no scheduler has changed that is known: there is another one. To look costs as long as some steps.
        if self._seen is None or (seen[0] != self._seen[0] and seen[1] == self._seen[1]):
            self._search()
            seen = (seen[0], self.mark())
        self._seen = seen

    def _search(self) -> None:
        owners = gc.get_referrers(self._optimizer)
        found = [o for o in owners if isinstance(o, LRScheduler)]
        dicts = [o for o in owners if isinstance(o, dict)]  # an object may have its attributes in one
        found += [o for o in gc.get_referrers(*dicts) if isinstance(o, LRScheduler)] if dicts else []
        self._all = list({id(o): o for o in found if self.has(o)}.values())
        inner = {id(i) for o in self._all for i in getattr(o, "_schedulers", ())}
        names = {id(thing): f"tt.keep {name}" for name, thing in self._kept.items()}
        by_name: dict[str, list[Any]] = {}
        for one in self._all:
            if id(one) not in inner:
                by_name.setdefault(names.get(id(one), type(one).__qualname__), []).append(one)
        self._named = {name: ones[0] for name, ones in by_name.items() if len(ones) == 1}
        for name in by_name.keys() - self._named.keys():
            self._say(f"there are several LR schedulers {name}: to have them after a restart, tt.keep(name=scheduler)")

    def has(self, thing: object) -> bool:
        """Whether this is a scheduler of the optimizer's."""
        return isinstance(thing, LRScheduler) and thing.optimizer is self._optimizer

    def _say(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(text)

    def mark(self) -> tuple[object, ...]:
        """Changes whenever a scheduler has made a step."""
        return tuple((one.last_epoch, getattr(one, "_step_count", 0)) for one in self._all)

    def pack(self, tensors: dict[str, torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """(groups, schedulers) as in `WorkerState`."""
        groups = []
        for group in self._optimizer.param_groups:
            pairs = {}
            for name, value in group.items():
                if name not in _APART:
                    try:
                        pairs[name] = pack(value, tensors)
                    except UnserializableState:
                        continue
            groups.append(pairs)
        schedulers = {}
        for name, one in self._named.items():
            try:
                schedulers[name] = pack(one.state_dict(), tensors)
            except UnserializableState as error:
                self._say(f"the LR scheduler {name} holds {error}: it is not there after a restart")
        return groups, schedulers

    def restore(self, condition: WorkerState) -> None:
        """Raises ConfigError where the script's optimizer is another one."""
        groups = self._optimizer.param_groups
        if len(groups) != len(condition.groups):
            raise ConfigError("optimizer.param_groups", len(groups), f"must be {len(condition.groups)}, as before")
        if condition.schedulers:
            self._search()
        for name, packed in condition.schedulers.items():
            one = self._named.get(name)
            if one is None:
                self._say(f"the script has made no LR scheduler {name} yet: what it was before the restart is lost")
                continue
            one.load_state_dict(unpack(packed, condition.tensors))
        for group, packed in zip(groups, condition.groups, strict=True):
            if not isinstance(packed, dict):
                raise ConfigError("optimizer.param_groups", repr(packed)[:80], "must be packed groups")
            group.update({str(name): unpack(value, condition.tensors) for name, value in packed.items()})
