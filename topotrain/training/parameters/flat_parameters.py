"""A model's parameters as views of flat buffers.

A parameter keeps its identity: the script, the optimizer and tied modules hold the same object. Only its memory moves.

The parameters stay connected to the buffers after `load_state_dict`, `deepcopy` and torch.compile. After `.to(dtype)`,
`p.data = …` or `load_state_dict(assign=True)` they are silently disconnected, so every step checks for that. Values
that the script writes into them are its own until the step, which refuses them (`ModelBuffers.check`).
"""

import mmap
import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.config.job import ConfigError
from topotrain.config.sharding import Parameter, SliceMap, shared_by
from topotrain.core.model.safetensors_layout import NAMES
from topotrain.core.model.schema import FlatBuffers, ModelBuffer, plain_name
from topotrain.core.model.tensor_bits import same_bits
from topotrain.training.parameters.device_parameters import HostParameters, ParameterViews, mirror_for, move_to

DEVICES = ("cpu", "cuda")
HOME = "topotrain_home"
"""Attribute of a parameter: the number of the server that stores it."""


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A model's unique parameters and its buffers, with their descriptions.

    - Tied weights occur once, in definition order.
    - Buffers that are not in the state_dict are left out.
    - A tensor on the meta device belongs to another worker.
    - `owners` are the positions of the parameters in the modules: a module's table, the name there, and the index of
      the parameter.
    - `aside` are parameters of the optimizers that an extension transfers by rows, and not the worker.
    - `model` is the whole model, unless it is split.
    """

    tensors: tuple[nn.Parameter, ...]
    parameters: tuple[Parameter, ...]
    buffer_tensors: tuple[torch.Tensor, ...]
    buffers: tuple[ModelBuffer, ...]
    owners: tuple[tuple[dict[str, nn.Parameter | None], str, int], ...]
    aside: tuple[nn.Parameter, ...] = ()
    model: nn.Module | None = None

    def replaced(self) -> Iterator[tuple[int, nn.Parameter]]:
        """Yield (number, parameter) where the model has another one than is described."""
        if self.model is None:
            held = ((index, table.get(name)) for table, name, index in self.owners)
        else:
            now = parameters_by_name(self.model)
            names = ((known.name, *known.aliases) for known in self.parameters)
            held = ((index, now.get(name)) for index, each in enumerate(names) for name in each)
        for index, there in held:
            if there is not None and there is not self.tensors[index]:
                yield index, there

    def added(self) -> str:
        """Return the name of a new parameter that would be trained; "": there is none."""
        now = {} if self.model is None else parameters_by_name(self.model)
        known = {id(tensor) for tensor in (*self.tensors, *self.aside)}
        return next((name for name, tensor in now.items() if tensor.requires_grad and id(tensor) not in known), "")

    def at_end(self) -> "ModelParts":
        """Describe the model anew if parameters or buffers are others. Raises ConfigError."""
        if self.model is None:
            return self
        now = describe_model(self.model, self.aside)
        return self if now._places() == self._places() else now

    def _places(self) -> list[object]:
        names = [*((p.name, p.aliases) for p in self.parameters), *(buffer.name for buffer in self.buffers)]
        return [*names, *map(id, self.tensors), *map(id, self.buffer_tensors)]

    def with_present_buffers(self) -> "ModelParts":
        """Return the parts with the model's present buffers of equal name, size and dtype."""
        now = {} if self.model is None else {plain_name(name): buffer for name, buffer in self.model.named_buffers()}
        present = []
        for known, held in zip(self.buffers, self.buffer_tensors, strict=True):
            there = now.get(known.name, held)
            present.append(there if (there.shape, there.dtype) == (held.shape, held.dtype) else held)
        return replace(self, buffer_tensors=tuple(present))


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters, a tied one under each of its names."""
    return {plain_name(name): tensor for name, tensor in model.named_parameters(remove_duplicate=False)}


def describe_model(
    model: nn.Module, aside: Collection[nn.Parameter] = (), optimizers: Sequence[Optimizer] = ()
) -> ModelParts:
    """Take a model apart. Parameters in `aside` are left out.

    Args:
        optimizers: the job's. A parameter of none of them counts as one of the first.

    Raises:
        ConfigError: a parameter cannot be trained (it is on an unknown device, lazy, or sparse), or there is no
            parameter.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    others = set(map(id, aside))
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if id(tensor) in others:
            continue
        # By identity: a tied weight is one parameter with several names.
        names.setdefault(id(tensor), []).append(plain_name(name))
        tensors[id(tensor)] = tensor
    if not tensors and not aside:
        raise ConfigError("model", None, "has no parameters: nothing to train")
    unique = tuple(tensors.values())
    numbers: dict[int, set[int]] = {}
    for number, held in enumerate(optimizers):
        for key in (id(p) for group in held.param_groups for p in group["params"]):
            numbers.setdefault(key, set()).add(number)
    described = tuple(
        replace(_describe(names[key], tensor), optimizer=shared_by(numbers.get(key, {0})))
        for key, tensor in tensors.items()
    )
    modules = dict(model.named_modules())
    # torch has no public name for this set.
    passing = {f"{prefix}.{n}".lstrip(".") for prefix, m in modules.items() for n in m._non_persistent_buffers_set}
    buffers = [(plain_name(name), b) for name, b in model.named_buffers() if name not in passing]
    index = {key: number for number, key in enumerate(tensors)}
    return ModelParts(
        unique,
        described,
        tuple(b for _, b in buffers),
        tuple(ModelBuffer(name, str(b.dtype).removeprefix("torch."), b.numel()) for name, b in buffers),
        tuple(
            (m._parameters, n, index[id(p)])
            for m in modules.values()
            for n, p in m._parameters.items()
            if p is not None and id(p) not in others
        ),
        model=model,
    )


def _describe(names: list[str], tensor: nn.Parameter) -> Parameter:
    if isinstance(tensor, nn.parameter.UninitializedParameter):
        raise ConfigError(f"model parameter {names[0]}", "lazy", "run the model once before tt.prepare")
    if tensor.device.type not in DEVICES:
        raise ConfigError(f"model parameter {names[0]}", str(tensor.device), f"must be on {' or '.join(DEVICES)}")
    if tensor.layout is not torch.strided:
        raise ConfigError(f"model parameter {names[0]}", str(tensor.layout), "must be a dense tensor")
    # Elements of an expanded or sliced tensor overlap or have gaps. In the flat buffer it is contiguous.
    stride = tensor.stride() if _dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in NAMES:
        raise ConfigError(f"model parameter {names[0]}", dtype, f"must be one of {', '.join(NAMES)}, to fit into files")
    # Set where the script names a server for the parameter.
    home = getattr(tensor, HOME, -1)
    return Parameter(names[0], tuple(tensor.shape), tuple(stride), dtype, tensor.requires_grad, tuple(names[1:]), home)


def _dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill their memory exactly once (channels_last does)."""
    expected = 1
    # From the innermost dimension on; a dimension of size 1 may have any stride.
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class ModelBuffers(ParameterViews):
    """The flat buffers of one worker, and the views of each parameter in them.

    Args:
        flats: the worker's flat buffers. "params" becomes the memory of the parameters, or the source of their copies.
        apart: the parameters are copies in any case, which the worker changes by itself.
        regions: have the memory of "params", see `ParameterViews`.
    """

    def __init__(
        self,
        parts: ModelParts,
        slice_map: SliceMap,
        flats: FlatBuffers,
        apart: bool = False,
        regions: ProcessMemory | None = None,
    ) -> None:
        self.parts = parts
        self.map = slice_map
        self.flats, self.regions, self._apart = flats, regions, apart
        self._views: dict[tuple[str, int], torch.Tensor] = {}
        self._own: dict[tuple[str, int], torch.Tensor] = {}
        self.mirror = mirror_for(parts.tensors, self, apart)
        self.lent: Collection[int] = ()
        """The parameters that the script may change now (`tt.assign`)."""
        self._tables: list[dict[str, Any]] = [table for table, _, _ in parts.owners]
        self._names = [name for _, name, _ in parts.owners]
        # A layer that takes the place of another one has parameters of its own.
        for module in () if parts.model is None else parts.model.modules():
            self._tables += [module._modules] * len(module._modules)
            self._names += module._modules
        self._homes: list[int] = []  # the addresses of the parameters, as they should be
        self._seen: tuple[list[int], list[int]] = ([], [])  # ids and addresses of the parameters at the last check

    def view(self, name: str, index: int) -> torch.Tensor:
        """Return a parameter's view of a flat buffer, with its shape and strides."""
        # Every hook of every backward comes here, so views are made once.
        view = self._views.get((name, index))
        if view is None:
            view = self._views[(name, index)] = self._make_view(name, index)
        return view

    def own(self, name: str, index: int) -> torch.Tensor:
        """Return the same memory as a tensor with its own storage and version counter."""
        tensor = self._own.get((name, index))
        if tensor is None:
            tensor = self._own[(name, index)] = _own_storage(self.view(name, index))
        return tensor

    def _make_view(self, name: str, index: int) -> torch.Tensor:
        parameter = self.map.parameters[index]
        space, offset = self.map.offsets[index]
        flat = self.flats.flat(name, space)
        return flat[offset : offset + parameter.count].as_strided(parameter.shape, parameter.stride)

    def copy_from_model(self, name: str) -> None:
        """Copy the parameters' values into a flat buffer."""
        for index, tensor in enumerate(self.parts.tensors):
            if not tensor.is_meta:
                self.view(name, index).copy_(tensor.detach())

    def differ(self, name: str) -> bool:
        """Return whether a parameter has other bits than a flat buffer."""
        held = ((i, tensor.detach().cpu()) for i, tensor in enumerate(self.parts.tensors) if not tensor.is_meta)
        return not all(same_bits(tensor, self.view(name, index)) for index, tensor in held)

    def live_in(self, name: str) -> None:
        """Make the parameters views of a flat buffer and free their memory on the host."""
        if isinstance(self.mirror, HostParameters):
            for index, tensor in enumerate(self.parts.tensors):
                if not tensor.is_meta:
                    move_to(tensor, self.own(name, index))

    def make(self, name: str) -> None:
        """Allocate this worker's part of a flat buffer, before other code uses it."""
        # A flat buffer is made when its first view is.
        for index, tensor in enumerate(self.parts.tensors):
            if not tensor.is_meta:
                self.view(name, index)

    def move_model(self) -> None:
        """Give the parameters the values in "params", as views or copies."""
        self.mirror.move()
        # Not asked for again: `share_memory_` changes the address of memory itself.
        self._homes = list(map(torch.Tensor.data_ptr, self.parts.tensors))

    def edited(self) -> Iterator[tuple[int, nn.Parameter]]:
        """Yield (number, parameter) where the script's bits differ from the servers'.

        Memory that the script has written, and that has the servers' bits again, is given back.
        """
        written = set(self.mirror.edited())
        for index, tensor in enumerate(self.parts.tensors):
            moved = tensor.data_ptr() != self._homes[index]
            if index not in self.lent and (not self._is_copy(index) if moved else index in written):
                yield index, tensor

    def check(self, hint: str = "") -> None:
        """Look for parameters moved, replaced or written since the last values.

        One that has the servers' bits again is put back. One without a gradient is the script's own, as a buffer is.

        Args:
            hint: ends the error for one that was written.

        Raises:
            RuntimeError: another parameter was moved, replaced or written.
        """
        # Every step calls this, so the usual case takes three short passes.
        # Objects compared by id are alive in the model's parts, so no other object can have the same id.
        owned = list(map(id, map(dict.get, self._tables, self._names)))
        places = list(map(torch.Tensor.data_ptr, self.parts.tensors))
        own = set()
        if (owned, places) != self._seen:
            self._check_replaced()
            own = self._put_back(places)
            self._seen = (owned, places) if not own else ([], [])
        # A worker that changes its parameters by itself learns what the script changes like a step.
        for index in () if self._apart else self.mirror.edited():
            if self.parts.tensors[index].grad is None:
                own.add(index)
            elif index not in self.lent and index not in own:
                raise RuntimeError(
                    f"parameter {self.parts.parameters[index].name} was changed outside optimizer.step(): the "
                    f"servers hold its value, so the change would be lost; load or edit parameters before tt.prepare, "
                    f"or in a block `with tt.assign(model):`; a value that is put in for a while, as an average for "
                    f"a validation or the shift of SAM, is put back from a copy before step(), bit for bit{hint}"
                )
        # Of a worker that changes its parameters by itself, its own rule says which these are.
        if not self._apart:
            self.mirror.own = own

    def _check_replaced(self) -> None:
        for index, _ in self.parts.replaced():
            raise RuntimeError(
                f"parameter {self.parts.parameters[index].name} is not the one that tt.prepare saw: "
                f"load_state_dict(assign=True), new layers and new parameters must come before tt.prepare; values "
                f"alone are changed in `with tt.assign(model):`"
            )
        if name := self.parts.added():
            raise RuntimeError(
                f"parameter {name} is none of those that tt.prepare saw, so it would not be trained: new layers and "
                f"new parameters must come before tt.prepare"
            )

    def _put_back(self, places: list[int]) -> set[int]:
        """Put moved parameters (`p.data = …`) back; return those that the script may keep."""
        own = set()
        for index, tensor in enumerate(self.parts.tensors):
            # An empty parameter has no memory, so its address means nothing.
            known = self.parts.parameters[index]
            if places[index] == self._homes[index] or not known.count or index in self.lent:
                continue
            if tensor.grad is None:
                own.add(index)
                continue
            # Memory that something else shows, too, was put there so that both change together.
            storage = tensor.untyped_storage()
            alone = storage.nbytes() == tensor.nbytes and not storage.is_shared()
            if not alone or places.count(places[index]) > 1 or not self._fits(index, tensor):
                raise RuntimeError(
                    f"parameter {known.name} is no longer in the memory where topotrain put it: "
                    f".to() and p.data = … must come before tt.prepare; values alone are changed in "
                    f"`with tt.assign(model):`"
                )
            memory = self.mirror.memory[index]
            if not same_bits(memory, tensor.data):
                # For the check that follows this is what the script has written.
                memory.copy_(tensor.data)
            move_to(tensor, memory)
            places[index] = tensor.data_ptr()
        return own

    def _fits(self, index: int, tensor: torch.Tensor) -> bool:
        memory = self.mirror.memory[index]
        return (tensor.shape, tensor.dtype, tensor.device) == (memory.shape, memory.dtype, memory.device)

    def _is_copy(self, index: int) -> bool:
        """Whether a parameter that was moved has the servers' bits."""
        tensor = self.parts.tensors[index]
        return self._fits(index, tensor) and same_bits(tensor.data.cpu(), self.view("params", index))


class FileMemory:
    """Memory over unlinked files in a folder; it may be larger than the host's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros, 1-D. Raises ConfigError if the disk is full."""
        nbytes = numel * dtype.itemsize
        # mmap refuses a length of 0.
        if not nbytes:
            return torch.empty(0, dtype=dtype)
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                # Without blocks on the disk a write to this memory would kill the process with SIGBUS later.
                os.posix_fallocate(file.fileno(), 0, nbytes)
                memory = mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            accepted = f"has no space for {nbytes:,} more bytes: {error}"
            raise ConfigError("workspace", str(self._folder), accepted) from None
        return torch.frombuffer(memory, dtype=dtype, count=numel)


def _own_storage(view: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor with a storage of just this view."""
    count = view.numel()
    if count == 0:
        return view
    flat = view.as_strided((count,), (1,), view.storage_offset())
    # torch.frombuffer makes a storage of exactly this memory. A view would share the storage of the whole buffer. numpy
    # knows no bfloat16, so the bytes go through it as uint8.
    storage = torch.frombuffer(flat.view(torch.uint8).numpy().data, dtype=view.dtype)
    return storage.as_strided(view.shape, view.stride())
