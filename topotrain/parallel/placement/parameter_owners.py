"""Who of a group's workers holds which parameters and buffers of a model: all, one, some, or each a part."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn

from topotrain.config.job import ConfigError
from topotrain.training.parameters.flat_parameters import HOME

CUTS: Mapping[type[nn.Module], Mapping[str, int]] = {
    nn.Linear: {"weight": 0, "bias": 0},
    nn.Conv1d: {"weight": 0, "bias": 0},
    nn.Conv2d: {"weight": 0, "bias": 0},
    nn.Embedding: {"weight": 1},
    nn.BatchNorm1d: {"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0},
    nn.BatchNorm2d: {"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0},
}
"""Modules whose features can be divided (`partition_dim: 1`): along which dimension of which parameter or buffer."""


_PARAMETER, _STORED, _PASSING = range(3)


class ModuleAssignment(Protocol):
    """Where a module's work is done, see `assign_modules.Assignment`."""

    @property
    def dim(self) -> int: ...

    @property
    def location(self) -> int | None: ...


def cuts_of(module: nn.Module) -> Mapping[str, int]:
    """How `partition_dim: 1` cuts a module's own parameters and buffers; empty: it is not cut."""
    return CUTS.get(type(module), {})


@dataclass(frozen=True, slots=True)
class OwnedPart:
    """One entry of the schema: a parameter or a buffer of the model, or a part of one.

    owners: the workers that hold it; (): all.
    dim, lo, hi: a part along a dimension; dim -1: all of it.
    """

    owners: tuple[int, ...] = ()
    dim: int = -1
    lo: int = 0
    hi: int = 0

    def here(self, worker: int) -> bool:
        """Whether a worker holds it."""
        return not self.owners or worker in self.owners

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This part of the whole, a view."""
        return whole if self.dim < 0 else whole.narrow(self.dim, self.lo, self.hi - self.lo)

    def named(self, name: str) -> str:
        """The entry's name: that of the whole, with @WORKER behind it if it is a part."""
        return name if self.dim < 0 else f"{name}@{self.owners[0]}"


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where a parameter or buffer stands: a module's own table, and the name there."""

    table: dict[str, Any]
    name: str

    def same(self, table: dict[str, Any], name: str) -> bool:
        """Whether it is this name in this very table."""
        return self.table is table and self.name == name


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A parameter or buffer of the model, and what becomes of it.

    tensor: the script's own. names: all that it has, the first first. shares: its entries in the schema.
    """

    tensor: torch.Tensor
    names: tuple[str, ...]
    places: tuple[TensorSlot, ...]
    shares: tuple[OwnedPart, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def like(self, device: str = "meta") -> torch.Tensor:
        """Of its shape and strides, without its values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.tensor.dtype, device=device)

    def part(self, share: OwnedPart) -> torch.Tensor:
        """Like a share of it, on the meta device."""
        part = share.of(self.like())
        return torch.empty_strided(part.shape, dense_stride(part), dtype=part.dtype, device="meta")

    def made(self, values: torch.Tensor) -> torch.Tensor:
        """The values as a parameter, if this is one, with what the script has noted on it."""
        if not isinstance(self.tensor, nn.Parameter):
            return values
        parameter = nn.Parameter(values, self.tensor.requires_grad)
        if hasattr(self.tensor, HOME):
            setattr(parameter, HOME, getattr(self.tensor, HOME))
        return parameter


@dataclass(frozen=True, slots=True)
class ParameterOwners:
    """A model's unique parameters, its buffers that are stored, and those that are not (`persistent=False`), each in
    definition order. The last stay with everybody, since no server knows them.
    """

    parameters: tuple[WholeTensor, ...]
    buffers: tuple[WholeTensor, ...]
    passing: tuple[WholeTensor, ...]


def divide(model: nn.Module, assignments: Mapping[str, ModuleAssignment], workers: int) -> ParameterOwners:
    """Say who of `workers` holds what.

    assignments: by the names of modules, and of parameters and buffers; one of a container holds for what is below
        and has none of its own.

    Raises:
        ConfigError: a tied weight that is cut in one place and not, or otherwise, in another; fewer features than
            workers; a buffer that could not be filled.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    seen: dict[int, _Found] = {}
    kinds: dict[int, int] = {}
    for name, module in modules.items():
        for table in (module._parameters, module._buffers):
            for own, tensor in table.items():
                if tensor is None:
                    continue
                found = seen.setdefault(id(tensor), _Found(tensor))
                full = f"{name}.{own}".lstrip(".")
                found.add(full, TensorSlot(table, own), _use(module, own, _of(assignments, full)))
                stored = _PASSING if own in module._non_persistent_buffers_set else _STORED
                kinds[id(tensor)] = _PARAMETER if table is module._parameters else stored
    wholes = [(kinds[key], found.whole(workers)) for key, found in seen.items()]
    parameters, buffers, passing = (tuple(w for kind, w in wholes if kind == wanted) for wanted in range(3))
    for whole in passing:
        if whole.tensor.is_meta:
            raise ConfigError("model buffer", whole.names[0], "is on the meta device, so it must be persistent=True")
    return ParameterOwners(parameters, buffers, tuple(replace(whole, shares=(OwnedPart(),)) for whole in passing))


def _of(assignments: Mapping[str, ModuleAssignment], name: str) -> ModuleAssignment | None:
    while name not in assignments and name:
        name = name.rpartition(".")[0]
    return assignments.get(name)


@dataclass(frozen=True, slots=True)
class _Use:
    """What one module wants of a parameter: cut along a dimension, on one worker, or whole on all (both -1)."""

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
        elif any(use.worker < 0 for use in uses):
            shares = (OwnedPart(),)
        else:
            owners = tuple(sorted({use.worker for use in uses}))
            shares = (OwnedPart(() if len(owners) == workers else owners),)
        return WholeTensor(self.tensor, tuple(self.names), tuple(self.places), shares, shape, dense_stride(self.tensor))


def _cut(name: str, count: int, dim: int, workers: int) -> Iterator[OwnedPart]:
    if count < workers:
        raise ConfigError("partition_dim", 1, f"{name} has {count} features: fewer than {workers} workers of a group")
    for worker, (lo, hi) in enumerate(pairwise(count * k // workers for k in range(workers + 1))):
        yield OwnedPart((worker,), dim, lo, hi)


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its strides, or those of a contiguous tensor where its elements do not fill their memory just once."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return tuple(torch.empty(tensor.shape, device="meta").stride())
            expected *= size
    return tuple(tensor.stride())
