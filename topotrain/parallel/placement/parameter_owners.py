"""Owners of parameters and buffers: all workers, one, some, or each a part."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from topotrain.config.job import ConfigError
from topotrain.parallel.program.layouts import even
from topotrain.training.parameters.flat_parameters import HOME

CUTS: Mapping[type[nn.Module], Mapping[str, int]] = {
    nn.Linear: {"weight": 0, "bias": 0},
    nn.Conv1d: {"weight": 0, "bias": 0},
    nn.Conv2d: {"weight": 0, "bias": 0},
    nn.Embedding: {"weight": 1},
    nn.BatchNorm1d: {"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0},
    nn.BatchNorm2d: {"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0},
}
"""Modules that can be cut by features (`partition_dim: 1`): the dimension of each parameter or buffer that is cut."""


_PARAMETER, _STORED, _PASSING = range(3)


class ModuleAssignment(Protocol):
    """Where a module is computed, see `assign_modules.Assignment`."""

    @property
    def dim(self) -> int: ...

    @property
    def location(self) -> int | None: ...


def cuts_of(module: nn.Module) -> Mapping[str, int]:
    """Return the dimension of each tensor that `partition_dim: 1` cuts, or {}."""
    return CUTS.get(type(module), {})


@dataclass(frozen=True, slots=True)
class OwnedPart:
    """One entry of the schema: a parameter or buffer of the model, or a part of it.

    Attributes:
        owners: workers that hold it; () means all.
        dim, lo, hi: the range along a dimension. With dim -1 it is the whole tensor.
    """

    owners: tuple[int, ...] = ()
    dim: int = -1
    lo: int = 0
    hi: int = 0

    def here(self, worker: int) -> bool:
        """Return whether a worker holds it."""
        return not self.owners or worker in self.owners

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this part of the whole tensor as a view."""
        return whole if self.dim < 0 else whole.narrow(self.dim, self.lo, self.hi - self.lo)

    def named(self, name: str) -> str:
        """Return the entry's name: the whole's name, with @WORKER appended for a part."""
        return name if self.dim < 0 else f"{name}@{self.owners[0]}"


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """The position of a parameter or buffer: the table of a module, and a name in it."""

    table: dict[str, Any]
    name: str

    def same(self, table: dict[str, Any], name: str) -> bool:
        """Return whether it is this name in the same table object."""
        return self.table is table and self.name == name


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A parameter or buffer of the model, and how it is shared.

    Attributes:
        tensor: the script's own object.
        names: all its names in the model, in definition order.
        shares: its entries in the schema.
    """

    tensor: torch.Tensor
    names: tuple[str, ...]
    places: tuple[TensorSlot, ...]
    shares: tuple[OwnedPart, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def like(self, device: str = "meta") -> torch.Tensor:
        """Return a tensor with its shape and strides, without its values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.tensor.dtype, device=device)

    def part(self, share: OwnedPart) -> torch.Tensor:
        """Return a tensor like a share of it, on the meta device."""
        part = share.of(self.like())
        return torch.empty_strided(part.shape, dense_stride(part), dtype=part.dtype, device="meta")

    def made(self, values: torch.Tensor) -> torch.Tensor:
        """Return values as a parameter if this is one, with the script's attributes."""
        if not isinstance(self.tensor, nn.Parameter):
            return values
        parameter = nn.Parameter(values, self.tensor.requires_grad)
        if hasattr(self.tensor, HOME):
            setattr(parameter, HOME, getattr(self.tensor, HOME))
        return parameter


@dataclass(frozen=True, slots=True)
class ParameterOwners:
    """A model's parameters, stored buffers, and buffers that are not stored.

    Each is unique and in definition order. Buffers that are not stored (`persistent=False`) are on all workers, since
    no server knows them.
    """

    parameters: tuple[WholeTensor, ...]
    buffers: tuple[WholeTensor, ...]
    passing: tuple[WholeTensor, ...]


def tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a module's own parameters and buffers: its tables, which may be changed."""
    return module._parameters, module._buffers


def divide(model: nn.Module, assignments: Mapping[str, ModuleAssignment], workers: int) -> ParameterOwners:
    """Find the owners of every parameter and buffer.

    Args:
        assignments: by the names of modules, and of parameters and buffers. The assignment of a container applies to
            everything below it without an assignment of its own.
        workers: workers of a group.

    Raises:
        ConfigError: a tied weight is cut in one module and not, or differently, in another. Or there are fewer features
            than workers. Or a buffer that is not stored is on the meta device.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    seen: dict[int, _Found] = {}
    kinds: dict[int, int] = {}
    for name, module in modules.items():
        parameters_of, _ = both = tables(module)
        for table in both:
            for own, tensor in table.items():
                if tensor is None:
                    continue
                # By id, so that a tied tensor is one entry with several names.
                found = seen.setdefault(id(tensor), _Found(tensor))
                full = f"{name}.{own}".lstrip(".")
                found.add(full, TensorSlot(table, own), _use(module, own, _of(assignments, full)))
                stored = _PASSING if own in module._non_persistent_buffers_set else _STORED
                kinds[id(tensor)] = _PARAMETER if table is parameters_of else stored
    wholes = [(kinds[key], found.whole(workers)) for key, found in seen.items()]
    parameters, buffers, passing = (tuple(w for kind, w in wholes if kind == wanted) for wanted in range(3))
    for whole in passing:
        if whole.tensor.is_meta:
            raise ConfigError("model buffer", whole.names[0], "is on the meta device, so it must be persistent=True")
    # No server knows the buffers that are not stored, so every worker has them.
    return ParameterOwners(parameters, buffers, tuple(replace(whole, shares=(OwnedPart(),)) for whole in passing))


def _of(assignments: Mapping[str, ModuleAssignment], name: str) -> ModuleAssignment | None:
    while name not in assignments and name:
        name = name.rpartition(".")[0]
    return assignments.get(name)


@dataclass(frozen=True, slots=True)
class _Use:
    """How one module uses a parameter: cut, on one worker, or whole on all (both -1)."""

    dim: int = -1
    worker: int = -1


def _use(module: nn.Module, own: str, assigned: ModuleAssignment | None) -> _Use:
    if assigned is None:
        return _Use()
    if assigned.location is not None:
        return _Use(worker=assigned.location)
    return _Use(dim=cuts_of(module).get(own, -1)) if assigned.dim == 1 else _Use()


@dataclass(slots=True)
class _Found:
    tensor: torch.Tensor
    names: list[str] = field(default_factory=list)
    places: list[TensorSlot] = field(default_factory=list)
    uses: list[_Use] = field(default_factory=list)

    def add(self, name: str, place: TensorSlot, use: _Use) -> None:
        self.names.append(name)
        self.uses.append(use)
        if not any(known.same(place.table, place.name) for known in self.places):
            self.places.append(place)  # a module may have two names

    def whole(self, workers: int) -> WholeTensor:
        uses = set(self.uses)
        if len(uses) > 1 and any(use.dim >= 0 for use in uses):
            accepted = f"tied weights must be cut in the same way everywhere: {' and '.join(self.names)} are not"
            raise ConfigError("partition_dim", 1, accepted)
        shape = tuple(self.tensor.shape)
        (dim, *_) = (use.dim for use in self.uses)
        if dim >= 0:
            shares = tuple(_cut(self.names[0], shape[dim], dim, workers))
        # A tied tensor that any module uses on all workers is on all workers.
        elif any(use.worker < 0 for use in uses):
            shares = (OwnedPart(),)
        else:
            owners = tuple(sorted({use.worker for use in uses}))
            shares = (OwnedPart(() if len(owners) == workers else owners),)
        return WholeTensor(self.tensor, tuple(self.names), tuple(self.places), shares, shape, dense_stride(self.tensor))


def _cut(name: str, count: int, dim: int, workers: int) -> Iterator[OwnedPart]:
    if count < workers:
        raise ConfigError("partition_dim", 1, f"{name} has {count} features: fewer than {workers} workers of a group")
    for worker, (lo, hi) in enumerate(even(count, workers)):
        yield OwnedPart((worker,), dim, lo, hi)


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides if the elements fill memory once, else contiguous ones."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return tuple(torch.empty(tensor.shape, device="meta").stride())
            expected *= size
    return tuple(tensor.stride())
