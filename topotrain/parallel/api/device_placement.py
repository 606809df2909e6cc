"""Device scopes of a script: `tt.device("/job:worker/task:1")` and `tt.place`.

Outside a job, and in groups of one worker, scopes only check and record their names. On a worker of a larger group, a
layer that is made inside the scope of another worker gives its memory back as soon as it is complete. With a scope
around each part, no worker holds more than its own part and one layer.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import TypeVar, overload

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from topotrain.config.job import ConfigError, Placement
from topotrain.parallel.capture import device_scopes
from topotrain.parallel.placement.parameter_owners import tables
from topotrain.training import context as process
from topotrain.training.parameters.devices import device_of

Module = TypeVar("Module", bound=nn.Module)

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of malloc.h
_OWN_REFERENCES = 3  # of a parameter: the module's table, a local name, and the one that counts


@overload
def device() -> torch.device: ...
@overload
def device(name: str) -> AbstractContextManager[None]: ...
def device(name: str | None = None) -> torch.device | AbstractContextManager[None]:
    """Return the device of this worker, or with a name open a scope.

    A scope is used as `with tt.device("/job:worker/task:1"):`.

    This worker computes on the GPU that the job's `gpu` field gives it, or one of the machine's in turn. Without a GPU
    it computes on the CPU. In an ordinary process on the first GPU, or the CPU. Nothing is moved there by itself.

    Modules that are made in a scope, and results that a forward computes in one, belong to that worker of the group
    (TensorFlow's names: /job:worker/task:1). Parameters that are made in "/job:ps/task:0" are stored by that server.
    Outside a job, and where a group has one worker, a scope does nothing.

    Raises:
        ConfigError: the `gpu` field names a GPU that this machine does not have, or `name` is not the name of a device.
    """
    if name is not None:
        return scope(name)
    return device_of(process.current(), torch.cuda.device_count())


def place(module: Module, name: str) -> Module:
    """Give a module, as one piece, to a worker of the group.

    For example `tt.place(model.head, "/job:worker/task:1")`. Its forward is not looked into. Outside a job this does
    nothing.

    Args:
        module: a part of the model that `tt.prepare` gets.
        name: a task of the job "worker", in TensorFlow's form.

    Returns:
        the module.

    Raises:
        ConfigError: it is no module; the name is none, or leaves open which task.
    """
    device_scopes.place(module, name)
    return module


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Assign modules that are made and values that are computed inside to a device.

    Raises ConfigError if `name` is not the name of a device.
    """
    _check_seen(name)
    me = _releases()
    with device_scopes.scope(name):
        if me is None:
            yield
            return
        release = _Release(me)
        hook = register_module_parameter_registration_hook(release.registered)
        try:
            with _returned_at_once():
                yield
                release.finished()
        finally:
            hook.remove()


def _check_seen(name: str) -> None:
    here, named = process.current(), device_scopes.parse(name)
    if here is None or here.worker is None or here.split is not None or here.place.topology.workers_per_group == 1:
        return
    if named.task is not None and named.job != "ps":
        accepted = "comes too late: name a worker where modules are made, with tt.place, or in a partition block"
        raise ConfigError("tt.device", name, accepted)


def _releases() -> int | None:
    """Return the index of this worker, or None if layers must not be released early."""
    # Memory of layers that belong to other workers can be given back before `tt.prepare` sees the whole model.
    here = process.current()
    if here is None or process.planning() or here.worker is not None:
        return None
    job, workers = here.place.job, here.place.topology.workers_per_group
    # `partition` blocks and kAuto may move a layer to another worker than its scope names.
    decided_elsewhere = bool(job.partition) or job.placement is Placement.kAuto
    return None if workers == 1 or decided_elsewhere else here.me.index


@contextmanager
def _returned_at_once() -> Iterator[None]:
    """Make the C library return the memory of released layers to the system at once."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        yield
        return
    # By default the heap would keep the memory in fragments. The settings of malloc cannot be read, so the values set
    # afterwards are those to which malloc adapts by itself (see mallopt(3)).
    mallopt(_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 64 << 20)


class _Release:
    """Releases the memory of layers that were made in the scope of another worker."""

    def __init__(self, me: int) -> None:
        self._me = me
        self._made: dict[int, nn.Module] = {}

    def registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Release the layers that are complete, and note the layer of this parameter."""
        # The hook runs when a module gets a parameter. Layers that were noted before and are no longer under
        # construction are complete then.
        building = _under_construction()
        # Released only when made: every worker draws the random numbers of all layers, and gets the same values.
        for key in [key for key in self._made if key not in building and key != id(module)]:
            _give_back(self._made.pop(key))
        here = device_scopes.current()
        if here is not None and here.job != "ps" and here.task is not None and here.task != self._me:
            self._made[id(module)] = module

    def finished(self) -> None:
        """Release the remaining layers at the end of the scope."""
        building = _under_construction()
        for key, module in self._made.items():
            # Modules around the scope that are still under construction stay until `tt.prepare`.
            if key not in building:
                _give_back(module)


def _under_construction() -> set[int]:
    """Return the ids of the modules that are inside their `__init__` now."""
    found = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(module := frame.f_locals.get("self"), nn.Module):
            found.add(id(module))
        frame = frame.f_back
    return found


def _give_back(module: nn.Module) -> None:
    parameters, _ = tables(module)
    for name in list(parameters):
        parameter = parameters[name]
        # A parameter with further references may be tied to another module: `localise` handles it later.
        if parameter is None or parameter.is_meta or sys.getrefcount(parameter) > _OWN_REFERENCES:
            continue
        like = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
        empty = nn.Parameter(like, parameter.requires_grad)
        empty.__dict__.update(parameter.__dict__)  # keep attributes such as the device of its scope
        parameters[name] = empty
