"""Memory and initial values for parameters that were made on the meta device."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from topotrain.config.job import ConfigError
from topotrain.parallel.placement.parameter_owners import OwnedPart, ParameterOwners, WholeTensor, tables
from topotrain.parallel.program.worker_program import hash_number


def cut_to(whole: WholeTensor, share: OwnedPart, tensor: torch.Tensor) -> torch.Tensor:
    """Cut a tensor to a share of the whole in place, and free the rest of its memory."""
    part = whole.part(share)
    # `materialise` has cut the tensors that it made.
    if tensor.shape != part.shape:
        with torch.no_grad():
            cut = torch.empty_strided(part.shape, part.stride(), dtype=tensor.dtype, device=tensor.device)
            cut.copy_(share.of(tensor))
        drop_gradient(tensor)
        set_memory(tensor, cut)
    return tensor


def set_memory(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Make a tensor an alias of another; the object stays the same."""
    tensor.data = value


def drop_gradient(tensor: torch.Tensor) -> None:
    """Free the gradient of a tensor."""
    tensor.grad = None


def drop_memory(tensor: torch.Tensor) -> None:
    """Free the memory of a tensor and of its gradient; the object stays."""
    drop_gradient(tensor)
    set_memory(tensor, torch.empty(0, dtype=tensor.dtype, device=tensor.device))


def materialise(model: nn.Module, division: ParameterOwners, me: int, seed: int = 0) -> dict[int, torch.Tensor]:
    """Allocate and fill this worker's tensors that are on the meta device.

    Returns the new tensors, by the id of the tensors that they replace.

    Raises:
        ConfigError: a module has no `reset_parameters`.
    """
    # Modules are filled one by one. So at most one whole module is in memory besides the parts that are kept.
    wholes = {id(w.tensor): w for w in division.parameters + division.buffers}
    made: dict[int, torch.Tensor] = {}
    for name, module in reversed(list(model.named_modules())):  # children first, as constructors do
        wanted = [
            (table, own, wholes[id(tensor)])
            for table in tables(module)
            for own, tensor in table.items()
            if tensor is not None and tensor.is_meta and id(tensor) in wholes
        ]
        if any(share.here(me) for _, _, whole in wanted for share in whole.shares):
            _fill(name, module, wanted, seed)
            made |= dict(_taken(wanted, me))
    return made


def _taken(wanted: Sequence[tuple[dict[str, Any], str, WholeTensor]], me: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Keep this worker's shares of a filled module."""
    for table, own, whole in wanted:
        share = next((share for share in whole.shares if share.here(me)), None)
        # A tied weight gets the values of its first module.
        if share is not None and whole.places[0].same(table, own):
            table[own] = cut_to(whole, share, table[own])
            yield id(whole.tensor), table[own]
        else:
            # Held by another worker, or filled with its first module: the memory is freed at once.
            table[own] = whole.tensor


def _fill(name: str, module: nn.Module, wanted: Sequence[tuple[dict[str, Any], str, WholeTensor]], seed: int) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if not callable(reset):
        what = f"{name}.{wanted[0][1]}".lstrip(".")
        accepted = f"is on the meta device, so {type(module).__name__} must have a method reset_parameters"
        raise ConfigError("model parameter", what, accepted)
    # The whole module is filled, since `reset_parameters` knows no parts and its draws depend on the full shape.
    for table, own, whole in wanted:
        table[own] = whole.made(whole.like("cpu"))
    with torch.random.fork_rng(devices=[]):
        # The seed depends on the module's name and not on earlier draws, because each worker fills other modules.
        torch.default_generator.manual_seed(hash_number(f"{seed} {name}".encode(), "big"))
        reset()
