"""A model that holds only its worker's part, and the restored whole model.

- The model stays one object with all its modules.
- A parameter of another worker is an `nn.Parameter` on the meta device, in the modules and in the optimizer. So all
  workers describe the same model.
- A part of a parameter replaces the whole: `nn.Linear` with fewer rows computes the features of these rows. Attributes
  of modules (`out_features`) keep the values of the whole.
- The script's own parameter objects are kept. Those of other workers lose their memory, and `restore` gives it back.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from topotrain.config.sharding import Parameter
from topotrain.core.model.schema import ModelBuffer, PrivateMemory
from topotrain.parallel.placement.parameter_owners import OwnedPart, ParameterOwners, WholeTensor, tables
from topotrain.parallel.runtime.meta_init import cut_to, drop_memory, materialise, set_memory
from topotrain.training.parameters.flat_parameters import HOME, FileMemory, ModelParts


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that holds only its worker's part.

    Attributes:
        parts: the parts for the worker, its buffers and the exchange. Tensors of other workers are on the meta device.
        absent: modules with a parameter of their own of which this worker holds only a part or nothing. The value is
            the location in words.
        groups: the optimizer's original parameters.
    """

    parts: ModelParts
    division: ParameterOwners
    absent: Mapping[nn.Module, str]
    groups: tuple[tuple[list[Any], list[str] | None], ...]


def localise(model: nn.Module, optimizer: Optimizer, division: ParameterOwners, me: int, seed: int = 0) -> LocalModel:
    """Free the memory of parameters that other workers hold.

    The model, the optimizer and its state are changed in place. Parameters of this worker that are on the meta device
    get memory, and `reset_parameters` of their module fills them. The random numbers for that depend only on the
    module's name and `seed`, so the values do not depend on the worker.

    Raises:
        ConfigError: such a module has no `reset_parameters`.
    """
    made = materialise(model, division, me, seed)
    entries = [_localised(whole, me, made) for whole in division.parameters]
    stored = [_localised(whole, me, made) for whole in division.buffers]
    parts = ModelParts(
        tuple(tensor for entry in entries for tensor in entry.tensors),
        tuple(described(e.whole, share) for e in entries for share in e.whole.shares),
        tuple(tensor for entry in stored for tensor in entry.tensors),
        tuple(_described_buffer(e.whole, share) for e in stored for share in e.whole.shares),
        tuple(_owners(entries)),
    )
    groups = _regroup(optimizer, entries)
    return LocalModel(parts, division, _absent(model, division, me), groups)


@dataclass(frozen=True, slots=True)
class _LocalTensor:
    """A localized parameter or buffer: the tensors of its shares, in order.

    `current` is the number of the one that is in the modules.
    """

    whole: WholeTensor
    tensors: tuple[Any, ...]
    current: int


def _localised(whole: WholeTensor, me: int, made: Mapping[int, torch.Tensor]) -> _LocalTensor:
    """Put this worker's share into the modules and free the memory of the others."""
    own = next((number for number, share in enumerate(whole.shares) if share.here(me)), -1)
    kept = made.get(id(whole.tensor), whole.tensor) if own >= 0 else None
    tensors = tuple(
        cut_to(whole, share, kept) if kept is not None and number == own else whole.made(whole.part(share))
        for number, share in enumerate(whole.shares)
    )
    # The object stays, because the script may hold it. Only its memory is freed.
    if own < 0 and not whole.tensor.is_meta:
        drop_memory(whole.tensor)
    # A worker without a share has the first one in its modules, on the meta device: each name needs a tensor.
    current = max(own, 0)
    for place in whole.places:
        place.table[place.name] = tensors[current]
    return _LocalTensor(whole, tensors, current)


def described(whole: WholeTensor, share: OwnedPart) -> Parameter:
    """Return one entry of the schema."""
    part = whole.part(share)
    names = [share.named(name) for name in whole.names]
    dtype = str(part.dtype).removeprefix("torch.")
    home = getattr(whole.tensor, HOME, -1)
    trainable = whole.tensor.requires_grad
    return Parameter(
        names[0], tuple(part.shape), part.stride(), dtype, trainable, tuple(names[1:]), home, owners=share.owners
    )


def _described_buffer(whole: WholeTensor, share: OwnedPart) -> ModelBuffer:
    part = whole.part(share)
    return ModelBuffer(share.named(whole.names[0]), str(part.dtype).removeprefix("torch."), part.numel(), share.owners)


def _owners(entries: Sequence[_LocalTensor]) -> Iterator[tuple[dict[str, nn.Parameter | None], str, int]]:
    first = 0
    for entry in entries:
        for place in entry.whole.places:
            yield place.table, place.name, first + entry.current
        first += len(entry.tensors)


def _absent(model: nn.Module, division: ParameterOwners, me: int) -> dict[nn.Module, str]:
    """Return modules with a forward that would give a wrong result on this worker."""
    places: dict[int, str] = {}
    for whole in division.parameters + division.buffers:
        words = _where(whole.shares)
        if len(whole.shares) > 1 or not whole.shares[0].here(me):
            places |= {id(place.table): words for place in whole.places}
    return {module: places[id(table)] for module in model.modules() for table in tables(module) if id(table) in places}


def _where(shares: Sequence[OwnedPart]) -> str:
    workers = [f"/worker:{worker}" for share in shares for worker in share.owners]
    return f"on {' and '.join(workers)}" if len(shares) == 1 else f"in parts on {workers[0]} to {workers[-1]}"


def _regroup(optimizer: Optimizer, entries: Sequence[_LocalTensor]) -> tuple[tuple[list[Any], list[str] | None], ...]:
    """Put the localized tensors into the optimizer, and return its original groups."""
    of = {id(entry.whole.tensor): entry for entry in entries}
    kept = []
    # One entry per share, also of other workers: all workers must give the servers the same list of parameters.
    for group in optimizer.param_groups:
        before, names = group["params"], group.get("param_names")
        kept.append((before, names))
        group["params"] = [t for p in before for t in (of[id(p)].tensors if id(p) in of else [p])]
        if names is not None:
            group["param_names"] = [
                share.named(name)
                for p, name in zip(before, names, strict=True)
                for share in (of[id(p)].whole.shares if id(p) in of else (OwnedPart(),))
            ]
    for entry in entries:
        _hand_over_state(optimizer, entry)
    return tuple(kept)


def _hand_over_state(optimizer: Optimizer, entry: _LocalTensor) -> None:
    """Give state that was loaded before to the localized tensors."""
    held = optimizer.state.pop(entry.whole.tensor, None)
    if not held:
        return
    # One worker sends all state to the servers, so state is kept also for shares of other workers.
    for share, tensor in zip(entry.whole.shares, entry.tensors, strict=True):
        optimizer.state[tensor] = {
            key: share.of(value) if isinstance(value, torch.Tensor) and value.shape == entry.whole.shape else value
            for key, value in held.items()
        }


# --- whole again -----------------------------------------------------------------------------------------------------


def restore(
    localised: LocalModel,
    optimizer: Optimizer,
    parameters: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    folder: Path | None = None,
) -> None:
    """Make the model whole again: the script's objects, with final values.

    Args:
        localised: the result of `localise`.
        optimizer: its original groups are restored.
        parameters, buffers: the final values of the entries of `parts`. A value that was not cut is not copied.
        folder: memory for a parameter that was cut is to be in a file there; None: ordinary memory.
    """
    division = localised.division
    for wholes, values in ((division.parameters, parameters), (division.buffers, buffers)):
        left = iter(values)
        for whole in wholes:
            _put(whole, _joined(whole, [next(left) for _ in whole.shares], folder))
    for group, (own, names) in zip(optimizer.param_groups, localised.groups, strict=True):
        group["params"] = own
        if names is not None:
            group["param_names"] = names


def _joined(whole: WholeTensor, values: Sequence[torch.Tensor], folder: Path | None) -> torch.Tensor:
    # Not cut: the value is taken as it is, without memory for a copy.
    if len(values) == 1:
        return values[0].detach()
    like, memory = whole.like(), PrivateMemory() if folder is None else FileMemory(folder)
    joined = memory.allocate(like.numel(), like.dtype).as_strided(like.shape, like.stride())
    for share, part in zip(whole.shares, values, strict=True):
        share.of(joined).copy_(part)
    return joined


def _put(whole: WholeTensor, value: torch.Tensor) -> None:
    """Give the value to the script's own tensor, and put that back into the modules."""
    # A tensor on the meta device cannot be given memory in place, so another object replaces it.
    tensor = whole.tensor
    if tensor.is_meta:
        tensor = whole.made(value)
    elif tensor.data_ptr() != value.data_ptr() or tensor.shape != value.shape:
        set_memory(tensor, value.to(tensor.device))
    for place in whole.places:
        place.table[place.name] = tensor
