"""Optimizers of table rows: sparse ones by torch's rules, and dense ones.

A sparse update gives, bit for bit, the result of torch for a coalesced sparse gradient, on the rows alone. Dense tables
can have any element-wise optimizer.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from topotrain.config.job import ConfigError
from topotrain.core.optim.adapter import (
    HyperCheck,
    OptimizerSpec,
    SliceUpdate,
    UnsupportedOptimizer,
    check_settings,
    hyper,
)
from topotrain.core.optim.kernel_choice import OWN_ERRORS
from topotrain.extensions.tables.row_storage import RowStorage
from topotrain.extensions.tables.table_spec import TableSpec

Settings = Mapping[str, Any]
Clip = tuple[float, float] | None


def optimizer_text(optimizer: Optimizer, group: int = 0, cls: type | None = None) -> str:
    """Return the text for `TableSpec.optimizer` of a parameter group of an optimizer.

    A user's own class is named by its module, which must be the job's `import`. cls: the original class of the
    optimizer, if `optimizer.adopt` has changed it. Raises ConfigError if servers cannot run the optimizer.
    """
    cls = cls or type(optimizer)
    name = cls.__qualname__
    known = cls is getattr(torch.optim, name, None)
    full = f"torch.optim.{name}" if known else f"{cls.__module__}:{name}"
    groups = json.loads(hyper(optimizer))
    spec = OptimizerSpec(full, (groups[group],), (0,))
    # There and back: the text is checked as a server would, and equal settings give equal texts.
    return OptimizerSpec.from_text(spec.to_text()).to_text()


class RowOptimizer(Protocol):
    """Applies pushes to rows."""

    def set(self, text: str) -> bool:
        """Take new settings (or raise ConfigError). False: the text is of another one."""
        ...

    def apply(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Apply one push, or raise ConfigError.

        slots: each occurs once. rows: (slots, width). They may be changed.
        """
        ...

    @property
    def state_bytes(self) -> int: ...


def make_optimizer(rows: RowStorage, text: str, import_module: str = "", clip: Clip = None) -> RowOptimizer:
    """Make the optimizer of a table. Existing state of its rows is dropped.

    clip: bounds of every element of a gradient. Raises ConfigError.
    """
    rows.drop_columns()
    if rows.spec.dense:
        try:
            return DenseOptimizer(rows, text, import_module, clip)
        except ConfigError:
            raise
        # Errors of a user's own class, which must not end the server.
        except OWN_ERRORS as error:
            raise ConfigError("table.optimizer", text[:80], f"cannot be made: {error}") from error
    return SparseOptimizer(rows, text, clip)


def check_optimizer(spec: TableSpec, text: str, import_module: str = "") -> None:
    """Raise ConfigError if the table cannot have this optimizer."""
    # To make the optimizer for a table of one element is the check.
    small = TableSpec(spec.name, 1, 1, spec.dtype, "async", init="zeros", dense=spec.dense)
    make_optimizer(RowStorage(small, 0, 1), text, import_module)


# --- sparse --------------------------------------------------------------------------------------------------------

Update = Callable[[RowStorage, torch.Tensor, torch.Tensor, Settings, int], None]


def _sgd(rows: RowStorage, slots: torch.Tensor, grad: torch.Tensor, settings: Settings, step: int) -> None:
    # One operation, as in torch's sparse SGD, for the same bits.
    rows.scatter(slots, rows.gather(slots).add_(grad, alpha=-settings["lr"]))


def _adagrad(rows: RowStorage, slots: torch.Tensor, grad: torch.Tensor, settings: Settings, step: int) -> None:
    rows.column("sum", float(settings["initial_accumulator_value"]))
    # torch counts steps from 1.
    rate = settings["lr"] / (1 + (step - 1) * settings["lr_decay"])
    total = rows.gather(slots, "sum").add_(grad.pow(2))
    rows.scatter(slots, total, "sum")
    # `total` is in the column already, so its memory can be reused for the root.
    change = grad.div_(total.sqrt_().add_(settings["eps"]))
    rows.scatter(slots, rows.gather(slots).add_(change, alpha=-rate))


def _sparse_adam(rows: RowStorage, slots: torch.Tensor, grad: torch.Tensor, settings: Settings, step: int) -> None:
    rows.column("exp_avg", 0.0)
    rows.column("exp_avg_sq", 0.0)
    beta1, beta2 = settings["betas"]
    mean = rows.gather(slots, "exp_avg")
    square = rows.gather(slots, "exp_avg_sq")
    # The operations have the order of torch.optim.SparseAdam. Another order changes the last bits.
    mean_change = grad.sub(mean).mul_(1 - beta1)
    square_change = grad.pow(2).sub_(square).mul_(1 - beta2)
    mean.add_(mean_change)
    square.add_(square_change)
    rows.scatter(slots, mean, "exp_avg")
    rows.scatter(slots, square, "exp_avg_sq")
    size = settings["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    change = mean.div_(square.sqrt_().add_(settings["eps"])).mul_(-size)
    rows.scatter(slots, rows.gather(slots).add_(change))


_UPDATES: Mapping[str, Update] = {"SGD": _sgd, "Adagrad": _adagrad, "SparseAdam": _sparse_adam}
_MUST_BE_ZERO = ("momentum", "weight_decay")  # these would change rows without a gradient


class SparseOptimizer:
    """SGD, Adagrad (Duchi, Hazan and Singer, 2011) or SparseAdam on the pushed rows.

    Raises ConfigError for another optimizer, or settings that would change rows without a gradient.
    """

    def __init__(self, rows: RowStorage, text: str, clip: Clip = None) -> None:
        self._rows, self._clip = rows, clip
        self._name, self._settings = _sparse_settings(text)
        self.pushes = 0
        """Number of pushes applied."""

    def restore(self, pushes: int) -> None:
        self.pushes = pushes

    def set(self, text: str) -> bool:
        name, settings = _sparse_settings(text)
        if name != self._name:
            return False
        self._settings = settings
        return True

    def apply(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        # Also without rows on this shard, since torch counts the steps of the whole tensor.
        self.pushes += 1
        if not len(slots):
            return
        grad = rows if self._clip is None else rows.clamp_(*self._clip)
        grad = grad.neg_() if self._settings.get("maximize") else grad
        _UPDATES[self._name](self._rows, slots, grad, self._settings, self.pushes)

    @property
    def state_bytes(self) -> int:
        return self._rows.state_bytes


def _sparse_settings(text: str) -> tuple[str, Settings]:
    spec = OptimizerSpec.from_text(text)
    name = spec.name.removeprefix("torch.optim.")
    # `name == spec.name`: a user's own class of this name, without the prefix.
    if name not in _UPDATES or name == spec.name:
        raise UnsupportedOptimizer(
            "table.optimizer",
            spec.name,
            f"does not take sparse gradients in torch; must be one of {', '.join(_UPDATES)}",
        )
    settings = _one_group(spec)
    for key in _MUST_BE_ZERO:
        if settings.get(key):
            raise ConfigError(
                f"table.optimizer.{key}", settings[key], f"must be 0 for {name}: rows without a gradient would change"
            )
    return name, settings


def _one_group(spec: OptimizerSpec) -> Settings:
    if len(spec.groups) != 1:
        raise ConfigError("table.optimizer", len(spec.groups), "must have one parameter group")
    cls = getattr(torch.optim, spec.name.removeprefix("torch.optim."))
    check_settings(cls, spec.groups[0])
    return cls([torch.zeros(1)]).defaults | spec.groups[0]  # type: ignore[no-any-return]


# --- dense ---------------------------------------------------------------------------------------------------------


class DenseOptimizer:
    """Any optimizer of `SliceUpdate` on all values of a shard at once."""

    def __init__(self, rows: RowStorage, text: str, import_module: str = "", clip: Clip = None) -> None:
        spec = OptimizerSpec.from_text(text)
        if len(spec.groups) != 1 or not spec.assignment:
            raise ConfigError("table.optimizer", len(spec.groups), "must have one parameter group, with parameters")
        self._rows, self._name, self._import = rows, spec.name, import_module
        values = rows.block()
        segments = [] if values is None else [(0, 0, values)]
        self._values = values
        # A shard without rows checks the settings as well.
        if values is None:
            SliceUpdate(spec, [(0, 0, torch.zeros(1, dtype=rows.spec.torch_dtype))], import_module)
        self._update = SliceUpdate(spec, segments, import_module, clip)
        # Settings that change later are checked against torch's constructor, as the first ones were.
        self._check = HyperCheck(spec, import_module)
        self._hyper = _hyper(spec)

    def set(self, text: str) -> bool:
        spec = OptimizerSpec.from_text(text)
        if spec.name != self._name:
            return False
        hyper = _hyper(spec)
        self._check.check(hyper)
        self._hyper = hyper
        return True

    def apply(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Apply one push, which must have all rows of the shard in order."""
        if len(slots) != self._rows.count:
            raise ConfigError(
                "push", f"{len(slots)} rows", f"must be all {self._rows.count} that the shard has of a dense table"
            )
        if self._values is not None:
            self._update.apply(self._hyper, {0: rows.view(-1)})

    @property
    def state_bytes(self) -> int:
        return sum(item.nbytes for _, _, item in self._update.state() if isinstance(item, torch.Tensor))


def _hyper(spec: OptimizerSpec) -> bytes:
    return json.dumps(spec.groups, sort_keys=True).encode()
