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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch.optim import Optimizer

from topotrain.config.async_momentum import Corrector
from topotrain.config.job import ConfigError, Slicing
from topotrain.core.optim import kernel_choice
from topotrain.core.optim.kernel_choice import OWN_ERRORS

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


class UnsupportedOptimizer(ConfigError):
    """An optimizer that a server cannot run on its part of the parameters."""


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer without its tensors.

    Attributes:
        name: "torch.optim.Adam" or "module:Class".
        groups: the hyper-parameters of each parameter group.
        assignment: the group of each parameter, -1 if it is not optimized.
    """

    name: str
    groups: tuple[dict[str, Any], ...]
    assignment: tuple[int, ...]

    def to_text(self) -> str:
        """Return JSON; equal specs give equal texts."""
        return _ENCODER.encode({"name": self.name, "groups": self.groups, "assignment": self.assignment})

    @staticmethod
    def from_text(text: str) -> "OptimizerSpec":
        """Read the JSON form. Raises ConfigError if `to_text` cannot have written it."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError("optimizer", text[:80], f"must be JSON: {error}") from None
        if not isinstance(data, dict) or data.keys() != {"name", "groups", "assignment"}:
            raise ConfigError("optimizer", text[:80], "must have name, groups and assignment")
        name, groups, assignment = data["name"], _groups(data["groups"]), data["assignment"]
        if not isinstance(name, str) or not re.fullmatch(r"torch\.optim\.\w+|[\w.]+:[\w.]+", name):
            raise ConfigError("optimizer.name", name, "must be torch.optim.Class or module:Class")
        if not isinstance(assignment, list) or not all(type(g) is int and -1 <= g < len(groups) for g in assignment):
            raise ConfigError("optimizer.assignment", assignment, "must be a list of group indices, or -1 for no group")
        return OptimizerSpec(name, groups, tuple(assignment))


def describe(
    optimizer: Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    slicing: Slicing = Slicing.kElement,
    import_module: str = "",
    aside: Sequence[torch.nn.Parameter] = (),
) -> OptimizerSpec:
    """Return the description that a server needs to run an optimizer.

    Args:
        parameters: the parameters of the slice map, in its order.
        aside: parameters of the optimizer that are not in the map.

    Raises:
        UnsupportedOptimizer: the class cannot be run on slices, or is not in `import_module`.
        ConfigError: the optimizer holds a tensor that is not a parameter of the model.
    """
    # An optimizer with only sparse parameters has nothing to do here, and servers would refuse its name. SGD stands in.
    name = _name(type(optimizer), slicing, import_module) if parameters or not aside else _TORCH + "SGD"
    index = {id(p): i for i, p in enumerate(parameters)}
    others = set(map(id, aside))
    assignment = [-1] * len(parameters)
    for number, group in enumerate(optimizer.param_groups):
        for tensor in group["params"]:
            if id(tensor) in others:
                continue
            if id(tensor) not in index:
                raise ConfigError(
                    "optimizer", tuple(tensor.shape), f"group {number} has a tensor that the model does not have"
                )
            assignment[index[id(tensor)]] = number
    return OptimizerSpec(name, _groups(json.loads(hyper(optimizer))), tuple(assignment))


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


# ---- hyper-parameters ------------------------------------------------------------------------------------------------


def hyper(optimizer: Optimizer) -> bytes:
    """Return the hyper-parameters of all groups as canonical JSON.

    Equal values give equal bytes. A tensor of one element (a learning rate) counts as a number.

    Raises:
        UnsupportedOptimizer: one of the class's own settings is not plain.
    """
    groups = []
    for group in optimizer.param_groups:
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
    return _ENCODER.encode(groups).encode()


class HyperEncoder:
    """Computes `hyper(optimizer)` at every step, and encodes it only after a change."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._known: list[tuple[Callable[[Any], Any], int, Any]] = []  # per group: getter, number of entries, values
        self._text = b""

    def __call__(self) -> bytes:
        """Return the text of `hyper`. Raises UnsupportedOptimizer as `hyper`."""
        groups = self._optimizer.param_groups
        if not self._known or len(groups) != len(self._known) or not self._same(groups):
            self._text = hyper(self._optimizer)
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
    """One optimizer over the segments of one owner, with the only copy of their state.

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
        self._rates: list[float] = []  # the learning rate of each group, before it is corrected
        self._scale = 1.0
        cls = _class(spec.name, import_module)
        self._values: dict[int, torch.Tensor] = {}
        self._count = len(spec.groups)
        self._clip = clip
        members: dict[int, list[torch.Tensor]] = {}
        for key, parameter, value in segments:
            if key in self._values:
                raise ValueError(f"segment key {key} is used twice")
            self._values[key] = value.detach()  # the same memory, without autograd's history
            if (group := spec.assignment[parameter]) >= 0:
                members.setdefault(group, []).append(self._values[key])
        self._numbers = sorted(members)  # torch's groups are the spec's groups that have segments here
        self._kinds = [kernel_choice.kinds(members[n]) for n in self._numbers]
        self._optimizer = _make(cls, [{**spec.groups[n], "params": members[n]} for n in self._numbers])
        self._hyper = b""

    def apply(self, hyper: bytes, grads: Mapping[int, torch.Tensor | None], staleness: int = 0) -> None:
        """Do one step in place. Gradients are only read, and not kept.

        A key without a gradient, or with None, is skipped, since Adam on None differs from Adam on zero.

        Args:
            hyper: the result of `hyper(optimizer)`.
            staleness: the number of updates of the values since the gradients were computed.

        Raises:
            KeyError: a key is not held here.
            ConfigError: the hyper-parameters are of another optimizer.
        """
        if self._optimizer is None:
            return
        if hyper != self._hyper:
            self._set(hyper)
        self._correct_rate(self._correct.rate(staleness))
        # Keys that are not named keep `.grad` None, with which torch skips them.
        try:
            for key, grad in grads.items():
                value = self._values[key]
                value.grad = None if grad is None else self._clipped(grad).view_as(value)
            self._stepped(self._optimizer)
        finally:
            # The gradients are views of buffers that the next step overwrites.
            _clear(self._values.values())

    def _stepped(self, optimizer: Optimizer) -> None:
        # The class may be the user's own: its error ends the group with a message, and not the server.
        try:
            self._step(optimizer)
        except OWN_ERRORS as error:
            raise ConfigError("optimizer", type(optimizer).__name__, f"cannot go on: {error!r}") from error

    def _step(self, optimizer: Optimizer) -> None:
        """Step the optimizer, values with a first gradient before the others."""
        # A parameter that was frozen so far, or that no worker's batch has used. torch's fused SGD fails if only some
        # of its momentum buffers exist.
        late = list(_without_momentum(optimizer))
        if late:
            first = {id(value) for value in late}
            waiting = [(value, value.grad) for value in self._values.values() if id(value) not in first]
            _clear(value for value, _ in waiting)
            optimizer.step()
            _clear(late)
            for value, grad in waiting:
                value.grad = grad
        optimizer.step()

    def _clipped(self, grad: torch.Tensor) -> torch.Tensor:
        return grad if self._clip is None else grad.clamp(*self._clip)

    def _set(self, hyper: bytes) -> None:
        groups = _groups(json.loads(hyper))
        if len(groups) != self._count or self._optimizer is None:
            raise ConfigError("optimizer.groups", len(groups), f"must be {self._count} groups, as when the job began")
        # New settings may have another fused kernel, so each change chooses again.
        for group, number, kinds in zip(self._optimizer.param_groups, self._numbers, self._kinds, strict=True):
            group.update(groups[number])
            group.update(kernel_choice.choose(type(self._optimizer), group, kinds))
            if self._correct.less_momentum and "momentum" in group:
                group["momentum"] = self._correct.momentum(group["momentum"])
        self._rates = [group["lr"] for group in self._optimizer.param_groups] if self._correct.by_staleness else []
        self._scale = 1.0
        self._hyper = hyper

    def _correct_rate(self, scale: float) -> None:
        if self._optimizer is not None and self._rates and scale != self._scale:
            # From the rate that was sent, so that corrections do not multiply.
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * scale
            self._scale = scale

    def optimizes(self, key: int) -> bool:
        """Return whether a segment is optimized."""
        value = self._values[key]
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        # By identity: `in` would compare the elements of tensors.
        return any(member is value for group in groups for member in group["params"])

    def state(self) -> Iterator[tuple[int, str, torch.Tensor | float]]:
        """Yield (key, name, value): the optimizer's own tensors, and plain numbers."""
        states = self._optimizer.state if self._optimizer is not None else {}
        for key, value in self._values.items():
            for name, item in states.get(value, {}).items():
                if item is None:
                    continue
                if not isinstance(item, torch.Tensor | float | int):
                    raise UnsupportedOptimizer(f"optimizer.state.{name}", item, "must be a tensor or a number")
                yield key, name, item

    def load_state(self, key: int, name: str, value: torch.Tensor | float) -> None:
        """Restore an entry of `state` from a copy. Restore all names of a key, or none."""
        place = self._values[key]
        if self._optimizer is None:
            raise KeyError(key)
        if isinstance(value, torch.Tensor):
            if value.shape not in (place.shape, torch.Size(())) and value.numel() == place.numel():
                value = value.view_as(place)
            value = value.detach().clone()
        # Directly, because `Optimizer.load_state_dict` expects the state of all parameters at once.
        self._optimizer.state[place][name] = value

    def state_dict(self) -> dict[str, Any]:
        """Return hyper-parameters and `state`, each tensor 1-D in the order of its memory."""
        entries = [(key, name, _dense(value)) for key, name, value in self.state()]
        return {"hyper": self._hyper, "scale": self._scale, "entries": entries}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
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
        for group, made_with, good in zip(groups, self._spec.groups, self._good, strict=True):
            self._check(group, made_with, good)
        self._good = groups

    def _check(self, group: dict[str, Any], made_with: dict[str, Any], good: dict[str, Any]) -> None:
        for name, value in group.items():
            if not _alike(value, made_with.get(name, value)):
                raise ConfigError(f"optimizer.groups.{name}", value, f"must be such as {made_with[name]!r}")
        # The class itself knows its limits, but making one at each step of a schedule would cost too much.
        if group | {"lr": 0.0} != good | {"lr": 0.0} or group.get("lr", 0.0) < 0:  # a schedule changes only the rate
            check_settings(_class(self._spec.name, self._import), made_with | group)

    def state_dict(self) -> dict[str, Any]:
        """Return the hyper-parameters that were checked last."""
        return {"good": [dict(group) for group in self._good]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
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


def _clear(values: Iterable[torch.Tensor]) -> None:
    for value in values:
        value.grad = None


def _without_momentum(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield values of fused SGD with momentum that get a first gradient after others."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"]:
            here = [value for value in group["params"] if value.grad is not None]
            new = [value for value in here if optimizer.state[value].get("momentum_buffer") is None]
            if len(new) < len(here):
                yield from new


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
