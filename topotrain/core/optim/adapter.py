"""Adapter that runs any torch.optim optimizer on slices of parameters.

Only the name and the hyper-parameters of an optimizer are sent, as JSON. A server makes the same class over views of
its own values and steps it in place. An element-wise optimizer gives, bit for bit, the same result on a slice as on the
whole parameter, if slices are cut at multiples of 64 elements from the parameter's start (tested for ELEMENTWISE).
"""

import importlib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
from torch.optim import Optimizer

from topotrain.config.async_momentum import Corrector, momentum_of
from topotrain.config.job import ConfigError, Slicing
from topotrain.core.optim import kernel_choice
from topotrain.core.optim.delayed_nesterov import DelayedNesterov
from topotrain.core.optim.kernel_choice import OWN_ERRORS
from topotrain.core.optim.optimizer_part import Gradients, OptimizerPart, PartGroup

ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "RMSprop",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "ASGD",
    "Rprop",
)
WHOLE = ("Adafactor", "Muon")  # they use rows, columns or the whole matrix
OWN: Mapping[str, type[Optimizer]] = {"topotrain:DelayedNesterov": DelayedNesterov}
"""Element-wise optimizers that torch does not have, by the name that is sent."""
REFUSED = {
    "LBFGS": (
        "it evaluates the closure several times in a step, and its line search compares losses of the whole batch: a "
        "server has neither the closure nor the loss, and a worker has only the loss of its share"
    ),
    "SparseAdam": "it needs sparse gradients",
}

_TORCH = "torch.optim."
_BOOKKEEPING = ("params", "param_names")  # tensors and their names, which are no settings
_DEVICE_ONLY = ("capturable",)  # applies to the script's own device, not to the server that computes the update
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


_OPTIONAL = frozenset({"outer", "also"})
"""Names in a spec's text that may be missing."""


class UnsupportedOptimizer(ConfigError):
    """An optimizer that a server cannot run on its part of the parameters."""


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer, or several over different parameters, without their tensors.

    Attributes:
        name: "torch.optim.Adam" or "module:Class"; of several optimizers, their names with " and " between them.
        groups: the hyper-parameters of each parameter group, of one optimizer after the other.
        assignment: the group of each parameter, -1 if it is not optimized.
        also: (parameter, group) of a parameter that several optimizers have, for all of them but the first.
        several: of several optimizers, the name and the number of groups of each. Empty: there is one.
        outer: it is no optimizer of the script: it steps with what the workers have learned by their own.
    """

    name: str
    groups: tuple[dict[str, Any], ...]
    assignment: tuple[int, ...]
    several: tuple[tuple[str, int], ...] = ()
    outer: bool = False
    also: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(
        optimizers: Sequence[tuple[str, int]], groups: tuple[dict[str, Any], ...], assignment: tuple[int, ...]
    ) -> "OptimizerSpec":
        """Return the spec of these optimizers, each a name and a number of groups."""
        name = " and ".join(name for name, _ in optimizers)
        return OptimizerSpec(name, groups, assignment, tuple(optimizers) if len(optimizers) > 1 else ())

    @property
    def optimizers(self) -> tuple[tuple[str, range], ...]:
        """The name of each optimizer, and the numbers of its groups."""
        several = self.several or ((self.name, len(self.groups)),)
        ends = accumulate(count for _, count in several)
        return tuple((name, range(end - count, end)) for (name, count), end in zip(several, ends, strict=True))

    @property
    def names(self) -> tuple[str, ...]:
        """The class of each parameter group."""
        return tuple(name for name, numbers in self.optimizers for _ in numbers)

    def momentum(self, groups: Sequence[Mapping[str, Any]]) -> float:
        """Return the largest momentum in these settings of the groups."""
        return max(momentum_of(name, groups[each.start : each.stop]) for name, each in self.optimizers)

    def to_text(self) -> str:
        """Return JSON; equal specs give equal texts."""
        # Digests of jobs have this text in them, so that of one optimizer stays as it is.
        named = {"optimizers": self.several} if self.several else {"name": self.name}
        more = {**({"outer": True} if self.outer else {}), **({"also": self.also} if self.also else {})}
        return _ENCODER.encode({**named, **more, "groups": self.groups, "assignment": self.assignment})

    @staticmethod
    def from_text(text: str) -> "OptimizerSpec":
        """Read the JSON form. Raises ConfigError if `to_text` cannot have written it."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError("optimizer", text[:80], f"must be JSON: {error}") from None
        if not isinstance(data, dict) or data.keys() - {"name", "optimizers", *_OPTIONAL} != {"groups", "assignment"}:
            raise ConfigError("optimizer", text[:80], "must have name, groups and assignment")
        groups, assignment = _groups(data["groups"]), data["assignment"]
        several = data.get("optimizers", [[data.get("name"), len(groups)]])
        if not isinstance(data.get("outer", True), bool):
            raise ConfigError("optimizer.outer", data["outer"], "must be true or false")
        if (
            len(data.keys() - _OPTIONAL) != 3
            or not _are_optimizers(several)
            or sum(count for _, count in several) != len(groups)
        ):
            raise ConfigError("optimizer.optimizers", several, "must have the name and number of groups of each")
        for name, _ in several:
            if not isinstance(name, str) or not re.fullmatch(r"torch\.optim\.\w+|[\w.]+:[\w.]+", name):
                raise ConfigError("optimizer.name", name, "must be torch.optim.Class or module:Class")
        if not isinstance(assignment, list) or not all(type(g) is int and -1 <= g < len(groups) for g in assignment):
            raise ConfigError("optimizer.assignment", assignment, "must be a list of group indices, or -1 for no group")
        also = data.get("also", [])
        if not _are_pairs(also, len(assignment), len(groups)):
            raise ConfigError("optimizer.also", also, "must be pairs of a parameter and a group")
        found = OptimizerSpec.of([(name, count) for name, count in several], groups, tuple(assignment))
        return replace(found, outer=data.get("outer", False), also=tuple((each, group) for each, group in also))


def _are_optimizers(several: Any) -> bool:
    # A peer sends the list, so its lengths are checked before it is read.
    pairs = isinstance(several, list) and bool(several) and all(isinstance(e, list) and len(e) == 2 for e in several)
    return pairs and all(type(count) is int and count >= 0 for _, count in several)


def _are_pairs(pairs: Any, *ends: int) -> bool:
    if not isinstance(pairs, list) or not all(isinstance(e, list) and len(e) == 2 for e in pairs):
        return False
    return all(type(n) is int and 0 <= n < end for pair in pairs for n, end in zip(pair, ends, strict=True))


def of_optimizer(name: str) -> tuple[int | None, str]:
    """Split the name of a state entry into the optimizer's number and its own name.

    None: the first optimizer that has the parameter.
    """
    number, space, own = name.partition(" ")
    return (int(number), own) if space and number.isdecimal() else (None, name)


def describe(
    optimizer: Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    slicing: Slicing = Slicing.kElement,
    import_module: str = "",
    aside: Sequence[torch.nn.Parameter] = (),
) -> OptimizerSpec:
    """Return the description of one optimizer, see `describe_all`."""
    return describe_all((optimizer,), parameters, slicing, import_module, aside)


def describe_all(
    optimizers: Sequence[Optimizer],
    parameters: Sequence[torch.nn.Parameter],
    slicing: Slicing = Slicing.kElement,
    import_module: str = "",
    aside: Sequence[torch.nn.Parameter] = (),
) -> OptimizerSpec:
    """Return the description that a server needs to run these optimizers.

    Args:
        parameters: the parameters of the slice map, in its order.
        aside: parameters of the optimizers that are not in the map.

    Raises:
        UnsupportedOptimizer: a class cannot be run on slices, or is not in `import_module`.
        ConfigError: an optimizer holds a tensor that is not a parameter of the model.
    """
    index = {id(p): i for i, p in enumerate(parameters)}
    others = set(map(id, aside))
    assignment = [-1] * len(parameters)
    also: list[tuple[int, int]] = []
    named, first = [], 0
    for optimizer in optimizers:
        held = [id(tensor) for group in optimizer.param_groups for tensor in group["params"]]
        # An optimizer with only sparse parameters has nothing to do here, and servers would refuse its name. SGD
        # stands in.
        only_aside = bool(held) and all(each in others for each in held)
        name = _TORCH + "SGD" if only_aside else _name(type(optimizer), slicing, import_module)
        for number, group in enumerate(optimizer.param_groups):
            for tensor in group["params"]:
                if id(tensor) in others:
                    continue
                if id(tensor) not in index:
                    accepted = (
                        f"has a tensor that the model does not have, of shape {tuple(tensor.shape)} in its group "
                        f"{number}: make the optimizer after the last change of the layers, and give tt.prepare each "
                        f"model that it trains"
                    )
                    raise ConfigError("optimizer", type(optimizer).__name__, accepted)
                if 0 <= assignment[index[id(tensor)]] < first:
                    also.append((index[id(tensor)], first + number))
                else:
                    assignment[index[id(tensor)]] = first + number
        named.append((name, len(optimizer.param_groups)))
        first += len(optimizer.param_groups)
    spec = OptimizerSpec.of(named, _groups(json.loads(hyper(*optimizers))), tuple(assignment))
    return replace(spec, also=tuple(also))


def _name(cls: type, slicing: Slicing, import_module: str) -> str:
    name = cls.__qualname__
    # By identity: a user's class may have the name of one of torch's.
    if cls is getattr(torch.optim, name, None):
        if name in WHOLE and slicing is not Slicing.kTensor:
            raise UnsupportedOptimizer("optimizer", name, "needs whole tensors: cluster { slicing: kTensor }")
        if name not in ELEMENTWISE + WHOLE:
            why = f"{REFUSED[name]}; " if name in REFUSED else ""
            raise UnsupportedOptimizer(
                "optimizer", name, f"{why}must be one of {', '.join(ELEMENTWISE)}, or {' or '.join(WHOLE)} with kTensor"
            )
        return _TORCH + name
    for own, each in OWN.items():
        if each is cls:
            return own
    if import_module and _find(importlib.import_module(import_module), name) is cls:
        return f"{import_module}:{name}"
    raise UnsupportedOptimizer(
        "optimizer",
        f"{cls.__module__}.{name}",
        "servers never receive code: put the class into a module and name that module in the job's `import`"
        + (f" (now {import_module!r}, which has no such class)" if import_module else ""),
    )


def _find(module: object, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def _class(name: str, import_module: str) -> type[Optimizer]:
    """Return the class of a spec's name."""
    # The name comes from a peer: only a class of the lists above, or of the job's own module, is imported.
    if name in OWN:
        return OWN[name]
    short = name.removeprefix(_TORCH)
    if name.startswith(_TORCH):
        found = getattr(torch.optim, short, None) if short in ELEMENTWISE + WHOLE else None
    else:
        module, _, short = name.partition(":")
        if not import_module or module != import_module:
            raise UnsupportedOptimizer("optimizer", name, f"must be of the job's `import`, which is {import_module!r}")
        found = _find(importlib.import_module(module), short)
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise UnsupportedOptimizer("optimizer", name, "must be an optimizer class that this process has")
    return found


def is_elementwise(name: str) -> bool:
    """Return whether the optimizer of this name treats all elements alike."""
    return name in OWN or name.removeprefix(_TORCH) in ELEMENTWISE


# ---- hyper-parameters ------------------------------------------------------------------------------------------------


def hyper(*optimizers: Optimizer, changes: int = 0) -> bytes:
    """Return the hyper-parameters of all groups as canonical JSON.

    changes: how often the script has changed the state; the workers of a group have to agree.

    Equal values give equal bytes. A tensor of one element (a learning rate) counts as a number.

    Raises:
        UnsupportedOptimizer: one of the class's own settings is not plain.
    """
    groups = []
    for optimizer, group in ((each, group) for each in optimizers for group in each.param_groups):
        plain = {}
        for name, value in group.items():
            if name in _BOOKKEEPING or name in _DEVICE_ONLY:
                continue
            try:
                plain[name] = _plain(value)
            except TypeError:
                # Only the class's own settings matter to a server: a scheduler may leave any object in a group.
                if name in optimizer.defaults:
                    raise UnsupportedOptimizer(
                        f"optimizer.{name}", value, "must be a number, text, bool, None or a flat list of these"
                    ) from None
        groups.append(plain)
    if changes:
        groups[0]["changes of optimizer.state"] = changes
    return _ENCODER.encode(groups).encode()


def momentum_in(spec: OptimizerSpec, text: bytes) -> float:
    """Return the largest momentum in hyper-parameters as messages have them."""
    return spec.momentum(json.loads(text)) if text else 0.0


class HyperEncoder:
    """Computes `hyper(*optimizers)` at every step, and encodes it only after a change."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self._optimizers = optimizers
        self._known: list[tuple[Callable[[Any], Any], int, Any]] = []  # per group: getter, number of entries, values
        self._text = b""
        self._changes = 0

    def count_change(self) -> None:
        """The script has changed the state of an optimizer."""
        self._changes += 1
        self._known = []

    def __call__(self) -> bytes:
        """Return the text of `hyper`. Raises UnsupportedOptimizer as `hyper`."""
        first, *others = self._optimizers
        # Most jobs have one optimizer, and this runs in every step: its own list will do.
        groups = (
            [*first.param_groups, *(g for each in others for g in each.param_groups)]
            if others
            else (first.param_groups)
        )
        if not self._known or len(groups) != len(self._known) or not self._same(groups):
            self._text = hyper(*self._optimizers, changes=self._changes)
            self._known = _snapshot(groups)
        return self._text

    def _same(self, groups: Sequence[dict[str, Any]]) -> bool:
        try:
            for group, (settings, entries, values) in zip(groups, self._known, strict=True):
                if len(group) != entries or settings(group) != values:
                    return False
        except (KeyError, ValueError, TypeError, RuntimeError):  # a name was removed, or a value is an array now
            return False
        return True


def _snapshot(groups: Sequence[dict[str, Any]]) -> list[tuple[Callable[[Any], Any], int, Any]]:
    """Return the values to which `HyperEncoder` compares."""
    # Empty if a setting is a tensor or list: that may change in place, and would still equal itself.
    known: list[tuple[Callable[[Any], Any], int, Any]] = []
    for group in groups:
        names = [name for name in group if name not in _BOOKKEEPING]
        if not names or not all(_frozen(group[name]) for name in names):
            return []
        settings = itemgetter(*names)
        known.append((settings, len(group), settings(group)))
    return known


def _frozen(value: Any) -> bool:
    if type(value) is tuple:
        return all(type(item) is not tuple and _frozen(item) for item in value)
    return value is None or type(value) in (float, int, bool, str)


def _plain(value: Any, deep: bool = False) -> Any:
    kind = type(value)
    if kind is float or kind is bool or kind is int or kind is str or value is None:
        return value
    if not deep and (kind is tuple or kind is list):
        return [_plain(item, deep=True) for item in value]
    if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1:  # a tensor or a NumPy number
        return value.item()
    if isinstance(value, float | int | str):
        # A subclass, such as NumPy's float64, becomes the plain type, which JSON and comparisons take.
        return {float: float, int: int, str: str}[next(k for k in (float, int, str) if isinstance(value, k))](value)
    raise TypeError(kind)


def _groups(data: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(data, list) or not all(isinstance(group, dict) for group in data):
        raise ConfigError("optimizer.groups", data, "must be a list of groups of hyper-parameters")
    return tuple({name: _setting(name, value) for name, value in group.items()} for group in data)


def _setting(name: str, value: Any) -> Any:
    items = value if isinstance(value, list) else [value]
    if name in _BOOKKEEPING or any(isinstance(item, list | dict) for item in items):
        raise ConfigError(
            f"optimizer.groups.{name}", value, "must be a number, text, bool, null or a flat list of these"
        )
    return tuple(value) if isinstance(value, list) else value  # torch has tuples there: betas, etas, step_sizes


# ---- on a slice ------------------------------------------------------------------------------------------------------


class SliceUpdate:
    """The optimizers of one owner over its segments, and their only state.

    `segments` are (unique key, index of the parameter, value). The value is a view of the owner's memory: 1-D for a
    slice, of the parameter's shape for a whole tensor. `clip` are the bounds of every element of a gradient (SINGA's
    clip_low and clip_high). `correct` changes hyper-parameters. Not thread-safe.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        segments: Sequence[tuple[int, int, torch.Tensor]],
        import_module: str = "",
        clip: tuple[float, float] | None = None,
        correct: Corrector | None = None,
    ) -> None:
        self._correct = correct or Corrector()
        self._scale = 1.0
        self._values: dict[int, torch.Tensor] = {}
        self._count = len(spec.groups)
        self._clip = clip
        members: dict[int, list[int]] = {}
        others: dict[int, list[int]] = {}
        for each, group in spec.also:
            others.setdefault(each, []).append(group)
        for key, parameter, value in segments:
            if key in self._values:
                raise ValueError(f"segment key {key} is used twice")
            self._values[key] = value.detach()  # the same memory, without autograd's history
            if (group := spec.assignment[parameter]) >= 0:
                members.setdefault(group, []).append(key)
            for group in others.get(parameter, ()):
                members.setdefault(group, []).append(key)
        self._parts: dict[int, OptimizerPart] = {}  # of each optimizer that has segments here
        self._parts_of: dict[int, dict[int, OptimizerPart]] = {}  # by key and number, the first optimizer first
        for optimizer, (name, groups) in enumerate(spec.optimizers):
            # Also where there is nothing to optimize: a class that this process does not have is refused.
            cls = _class(name, import_module)
            # torch's groups are the spec's groups that have segments here
            parts = [self._group_of(number, members[number]) for number in groups if number in members]
            made = _make(cls, [{**spec.groups[part.number], "params": list(part.values)} for part in parts])
            if made is not None:
                self._parts[optimizer] = OptimizerPart(made, parts, joins=is_elementwise(name))
                for key in (key for part in parts for key in part.keys):
                    self._parts_of.setdefault(key, {})[optimizer] = self._parts[optimizer]
        self._hyper = b""
        self._given: tuple[Gradients | None, int | None] = None, None  # the gradients that the values have, of a step

    def _group_of(self, number: int, keys: Sequence[int]) -> PartGroup:
        # In the order of memory, so that neighbors may be updated as one tensor.
        ordered = sorted(keys, key=lambda key: self._values[key].data_ptr())
        # Tensors of its own, since each optimizer leaves its gradients there.
        return PartGroup(number, tuple(ordered), tuple(self._values[key].detach() for key in ordered))

    def apply(self, hyper: bytes, grads: Gradients, staleness: int = 0, optimizer: int | None = None) -> None:
        """Do one step in place. Gradients are only read.

        The same mapping may be given again, unchanged but for the elements of its tensors. This is faster, because the
        values still have these tensors as their gradients.

        A key without a gradient, or with None, is skipped, since Adam on None differs from Adam on zero. An optimizer
        without any gradient makes no step.

        Args:
            hyper: the result of `hyper(*optimizers)`.
            staleness: the number of updates of the values since the gradients were computed.
            optimizer: the number of the one that steps. None: all that have a gradient.

        Raises:
            KeyError: a key is not held here.
            ConfigError: the hyper-parameters are of another optimizer.
        """
        if not self._parts:
            return
        if hyper != self._hyper:
            self._set(hyper)
        self._correct_rate(self._correct.rate(staleness))
        parts = [part for number, part in self._parts.items() if optimizer in (None, number)]
        given, number = self._given
        again = grads is given and number == optimizer and all(part.is_settled for part in parts)
        self._given = None, None
        if not again:
            self._assign(grads, parts)
        for part in parts:
            if len(self._parts) == 1 or part.has_gradient:
                part.step(again)
        # Clipping makes new tensors, which the next step must not use.
        self._given = None if self._clip else grads, optimizer

    def _assign(self, grads: Gradients, parts: Sequence[OptimizerPart]) -> None:
        """Give the optimizers their gradients."""
        unknown = grads.keys() - self._values.keys()
        if unknown:
            raise KeyError(min(unknown))
        for part in parts:
            part.assign(grads, self._clip)

    def _set(self, hyper: bytes) -> None:
        groups = _groups(json.loads(hyper))
        if len(groups) != self._count or not self._parts:
            raise ConfigError("optimizer.groups", len(groups), f"must be {self._count} groups, as when the job began")
        for part in self._parts.values():
            part.set(groups, self._correct)
        self._scale = 1.0
        self._hyper = hyper

    def _correct_rate(self, scale: float) -> None:
        if scale != self._scale:
            for part in self._parts.values():
                part.scale_rates(scale)
            self._scale = scale

    def optimizes(self, key: int, name: str = "") -> bool:
        """Return whether a segment may have an entry of this name: its optimizer is here."""
        return self._owner(key, name)[0] is not None

    def _owner(self, key: int, name: str) -> tuple[OptimizerPart | None, str]:
        """The optimizer of an entry, and the name that it has there."""
        number, own = of_optimizer(name)
        parts = self._parts_of.get(key, {})
        return parts.get(min(parts, default=0) if number is None else number), own

    def state(self) -> Iterator[tuple[int, str, torch.Tensor | float]]:
        """Yield (key, name, value): the optimizers' own tensors, and plain numbers."""
        for key in self._values:
            for place, (number, part) in enumerate(self._parts_of.get(key, {}).items()):
                for name, item in part.state_of(key).items():
                    if item is None:
                        continue
                    if not isinstance(item, torch.Tensor | float | int):
                        raise UnsupportedOptimizer(f"optimizer.state.{name}", item, "must be a tensor or a number")
                    yield key, f"{number} {name}" if place else name, item

    def load_state(self, key: int, name: str, value: torch.Tensor | float) -> None:
        """Restore an entry of `state` from a copy. Restore all names of a key, or none."""
        place, (part, name) = self._values[key], self._owner(key, name)
        assert part is not None
        if isinstance(value, torch.Tensor):
            if value.shape not in (place.shape, torch.Size(())) and value.numel() == place.numel():
                value = value.view_as(place)
            value = value.detach().clone()
        part.load(key, name, value)
        self._given = None, None

    def forget(self, key: int, name: str = "") -> None:
        """Drop the state of a key, as if it was never updated.

        name: as of an entry, to drop that of its optimizer alone.
        """
        part, _ = self._owner(key, name)
        assert part is not None
        part.forget(key)
        self._given = None, None

    def state_dict(self) -> dict[str, Any]:
        """Return hyper-parameters and `state`, each tensor 1-D in the order of its memory."""
        entries = [(key, name, _dense(value)) for key, name, value in self.state()]
        return {"hyper": self._hyper, "scale": self._scale, "entries": entries}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key, name, value in state["entries"]:
            self.load_state(key, name, self._shaped(key, value))
        if state["hyper"]:  # empty before the first step, which brings them
            self._set(state["hyper"])
            self._correct_rate(state["scale"])

    def _shaped(self, key: int, value: torch.Tensor | float) -> torch.Tensor | float:
        """Return a value of `state_dict` in the shape and memory order of its segment."""
        place = self._values[key]
        if isinstance(value, torch.Tensor) and value.dim() == 1 and value.shape != place.shape:
            return value.as_strided(place.shape, place.stride())
        return value


def _dense(value: torch.Tensor | float) -> torch.Tensor | float:
    """Return the elements of a tensor in the order of memory."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.is_contiguous():
        return value
    return value.as_strided((value.numel(),), (1,))


class HyperCheck:
    """Checks hyper-parameters before any value has changed.

    Args:
        spec: the optimizer, with the groups it was made with.
        import_module: as for `SliceUpdate`.
    """

    def __init__(self, spec: OptimizerSpec, import_module: str = "") -> None:
        self._spec, self._import = spec, import_module
        self._good: tuple[dict[str, Any], ...] = spec.groups

    def check(self, hyper: bytes) -> None:
        """Check new hyper-parameters. Raises ConfigError for what the optimizer refuses."""
        try:
            groups = _groups(json.loads(hyper))
        except (ValueError, RecursionError) as error:
            raise ConfigError("optimizer.groups", None, f"must be JSON of hyper-parameters: {error}") from None
        if len(groups) != len(self._spec.groups):
            raise ConfigError(
                "optimizer.groups", len(groups), f"must be {len(self._spec.groups)} groups, as when the job began"
            )
        of_groups = zip(self._spec.names, groups, self._spec.groups, self._good, strict=True)
        for name, group, made_with, good in of_groups:
            self._check(name, group, made_with, good)
        self._good = groups

    def _check(self, name: str, group: dict[str, Any], made_with: dict[str, Any], good: dict[str, Any]) -> None:
        for setting, value in group.items():
            if not _alike(value, made_with.get(setting, value)):
                raise ConfigError(f"optimizer.groups.{setting}", value, f"must be such as {made_with[setting]!r}")
        # The class itself knows its limits, but making one at each step of a schedule would cost too much.
        if group | {"lr": 0.0} != good | {"lr": 0.0} or group.get("lr", 0.0) < 0:  # a schedule changes only the rate
            check_settings(_class(name, self._import), made_with | group)

    def state_dict(self) -> dict[str, Any]:
        """Return the hyper-parameters that were checked last."""
        return {"good": [dict(group) for group in self._good]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._good = tuple(state["good"])


def check_settings(cls: Any, settings: Mapping[str, Any]) -> None:
    """Make an optimizer of one element. Raises ConfigError if the class refuses."""
    try:
        _constructed(cls, [{**settings, "params": [torch.zeros(1)]}])
    except OWN_ERRORS as error:
        raise ConfigError("optimizer", cls.__name__, f"does not take these settings: {error}") from None


def _alike(value: Any, other: Any) -> bool:
    """Return whether two settings are of one kind, and finite numbers stay finite."""
    if isinstance(value, tuple) or isinstance(other, tuple):
        same = isinstance(value, tuple) and isinstance(other, tuple) and len(value) == len(other)
        return same and all(map(_alike, value, other))
    if isinstance(other, float | int) and not isinstance(other, bool):
        number = isinstance(value, float | int) and not isinstance(value, bool)
        return number and (math.isfinite(value) or not math.isfinite(other))
    if isinstance(other, str):
        return isinstance(value, str)
    return value is None or isinstance(value, bool | float | int)


def _make(cls: Any, groups: list[dict[str, Any]]) -> Optimizer | None:
    """Make an optimizer, or return None if no segment is optimized here."""
    if not groups:
        return None  # torch has no optimizer without parameters
    for group in groups:
        group.update(kernel_choice.choose(cls, group, kernel_choice.kinds(group["params"])))
    return _constructed(cls, groups)


def _constructed(cls: Any, groups: list[dict[str, Any]]) -> Optimizer:
    # Some settings act only in the constructor (Adagrad's initial_accumulator_value), so it gets all settings.
    known = inspect.signature(cls).parameters
    settings = {name: value for name, value in groups[0].items() if name in known and name != "params"}
    made: Optimizer = cls(groups, **settings)
    return made


def remake(spec: OptimizerSpec, parameters: Sequence[torch.nn.Parameter]) -> Optimizer:
    """Make the optimizer of a spec over these parameters; one of torch's own classes.

    Raises:
        UnsupportedOptimizer: the class is not one of torch's.
        ConfigError: the class refuses the settings, or the assignment is of other parameters.
    """
    if spec.several:
        raise UnsupportedOptimizer("optimizer", spec.name, "must be one optimizer")
    if len(spec.assignment) != len(parameters) or not any(group >= 0 for group in spec.assignment):
        raise ConfigError("optimizer.assignment", len(spec.assignment), f"must be of {len(parameters)} parameters")
    members: list[list[torch.nn.Parameter]] = [[] for _ in spec.groups]
    for parameter, group in zip(parameters, spec.assignment, strict=True):
        if group >= 0:
            members[group].append(parameter)
    try:
        return _constructed(
            _class(spec.name, ""), [{**s, "params": m} for s, m in zip(spec.groups, members, strict=True)]
        )
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError("optimizer", spec.name, f"cannot be made: {error}") from None
