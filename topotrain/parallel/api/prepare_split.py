"""Split one model over the workers of a group in `tt.prepare`.

The script keeps its objects. Until the job ends, `model.forward` runs the steps of this worker (`split_forward`), and
tensors of other workers are on the meta device. At the end the model on worker (0,0) is whole again, with the final
values and its own forward.
"""

import inspect
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from topotrain.config.job import ConfigError, Job, Placement
from topotrain.core.model.schema import COMPILED
from topotrain.extensions.tables.frontend.embedding import Embedding
from topotrain.parallel.api import device_placement
from topotrain.parallel.api.automatic_placement import place_modules
from topotrain.parallel.api.dry_run import state_factor
from topotrain.parallel.api.split_costs import PlacementRequest, check_memory
from topotrain.parallel.api.split_forward import SplitForward
from topotrain.parallel.capture import device_scopes
from topotrain.parallel.capture.capture_model import CapturedForward, capture
from topotrain.parallel.placement.assign_modules import Assignment, assignments
from topotrain.parallel.placement.parameter_owners import divide
from topotrain.parallel.runtime.gather import entries, gather, give
from topotrain.parallel.runtime.local_model import LocalModel, localise, restore
from topotrain.parallel.runtime.network_channel import NetworkChannel
from topotrain.training.context import Context, PrepareExtension, PrepareRequest
from topotrain.training.final_parameters import fetch_final, in_one_file, metadata_of
from topotrain.training.parameters.divided_model import IN_PARTS, DividedModel
from topotrain.training.parameters.flat_parameters import ModelParts, describe_model
from topotrain.training.worker import Worker

_WITHOUT_SCOPES = sys.stdlib_module_names | {"torch", "numpy", "topotrain"}
"""Packages of which no function is looked into."""
_ANY = 1 << 16
"""More workers than any group has. In a group of one worker the script may name any worker."""


def split(here: Context, model: nn.Module, optimizer: Optimizer, loader: Any) -> "SplitModel | None":
    """Split the model if the job or the script asks for it.

    Returns:
        The split model, or None if every worker holds the whole model.

    Raises:
        ConfigError: the model cannot be split like this, or not in this job.
    """
    job, workers = here.place.job, here.place.topology.workers_per_group
    captured_early = None
    if not (job.splits or tagged(model)):
        captured_early = captured_if_placed(model) if workers > 1 else None
        if captured_early is None:
            return None
    if COMPILED in dict(model.named_children()):
        raise ConfigError("tt.prepare", "a compiled model", "a split model must be prepared before torch.compile")
    captured = captured_early or capture(model)
    # One worker needs no split, but parameters that were made on the meta device have to be filled.
    if workers == 1:
        assignments(model, job, _ANY, captured)  # for its errors only
        localise(model, optimizer, divide(model, {}, 1), 0, job.seed)
        return None
    _check(job, model)
    found = assignments(model, job, workers, captured)
    topology, unit = here.place.topology, here.place.topology.unit_of(here.me)
    asked = PlacementRequest(job, topology, model, captured, found, None, state_factor(optimizer))
    if job.placement is Placement.kAuto:
        with _random_state_kept(loader):
            chosen = place_modules(asked, loader)
        found = chosen.found
        if here.is_main:
            print(chosen.text, file=sys.stderr)
    division = divide(model, found, workers)
    if not (job.splits or any(share.owners for whole in division.parameters for share in whole.shares)):
        accepted = "names workers for nothing that has parameters: place a module, or write a partition block"
        raise ConfigError("tt.device", None, accepted)
    # Before `localise` allocates anything.
    with _random_state_kept(loader):
        check_memory(replace(asked, found=found), loader, topology.hosts[unit] if topology.hosts else 0)
    return SplitModel(
        here, model, optimizer, captured, found, localise(model, optimizer, division, here.me.index, job.seed)
    )


def tagged(model: nn.Module) -> bool:
    """Whether the script has assigned some part of the model to a worker."""
    tags = {thing.__dict__.get(device_scopes.PLACE) for thing in (*model.modules(), *model.parameters())}
    return any(device_scopes.parse(tag).task is not None for tag in tags if tag)


def captured_if_placed(model: nn.Module) -> CapturedForward | None:
    """Return the captured forward if it names a worker with `tt.device`, else None."""
    # Most models are not split, and tracing takes time. So the code is looked at first.
    if not any(_mentions_device(kind.forward, kind, set()) for kind in {type(module) for module in model.modules()}):
        return None
    try:
        captured = capture(model)
    except ConfigError:  # a model that is not split may use `tt.device()` in a forward that cannot be captured
        return None
    names = {node.meta.get("device") for node in captured.graph.nodes}
    found = map(device_scopes.parse, filter(None, names))
    return captured if any(device.task is not None and device.job != "ps" for device in found) else None


def _mentions_device(thing: Any, kind: type[nn.Module], seen: set[CodeType]) -> bool:
    """Return whether a function, or one that it calls by name, uses `tt.device`.

    A function that is called in another way is not seen. Its scope raises ConfigError when it runs.
    """
    function = inspect.unwrap(thing) if isinstance(thing, FunctionType) else getattr(thing, "__func__", None)
    if not isinstance(function, FunctionType) or function.__code__ in seen:
        return False
    code = function.__code__
    seen.add(code)
    if (function.__module__ or "").partition(".")[0] in _WITHOUT_SCOPES:
        return False
    names = set(_names(code))
    known = [function.__globals__.get(name) for name in names]
    known += [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    tables = [vars(each) for each in known if isinstance(each, ModuleType | type)]
    # The object before a dot is not known, so a name is looked for in the module of the forward and in those mentioned.
    known += [inspect.getattr_static(kind, name, None) for name in names]
    known += [table[name] for table in tables for name in names & table.keys()]
    names |= {each.__name__ for each in known if isinstance(each, ModuleType)}
    if {"topotrain", "device"} <= names or any(each is device_placement.device for each in known):
        return True
    return any(_mentions_device(each, kind, seen) for each in known)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global names and attributes that code and functions in it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


@contextmanager
def _random_state_kept(loader: Any) -> Iterator[None]:
    """Restore the random state of a loader and of torch after the block."""
    sampler = getattr(loader, "sampler", None)
    held = [getattr(thing, "generator", None) for thing in (loader, sampler)]
    own = [generator for generator in held if isinstance(generator, torch.Generator)]
    states = [generator.get_state() for generator in own]
    # Looking at a batch must not change the order of the batches.
    with torch.random.fork_rng(devices=[]):
        yield
    for generator, state in zip(own, states, strict=True):
        generator.set_state(state)


def _check(job: Job, model: nn.Module) -> None:
    try:
        replace(job, placement=Placement.kAuto)  # runs the checks of jobs that split in the job file
    except ConfigError as error:
        if error.field != "placement":
            raise
        # The job file does not have this value.
        accepted = f"splits the model as placement: kAuto does, which {error.accepted}"
        raise ConfigError("tt.device", None, accepted) from None
    for name, module in model.named_modules():
        rows = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if rows or isinstance(module, Embedding):
            accepted = "sends single rows, which a split model does not support: use nn.Embedding(sparse=False)"
            raise ConfigError("model", name, accepted)


class SplitModel(DividedModel):
    """A model that this worker holds its part of. It is localized already."""

    def __init__(
        self,
        here: Context,
        model: nn.Module,
        optimizer: Optimizer,
        captured: CapturedForward,
        found: Mapping[str, Assignment],
        localised: LocalModel,
    ) -> None:
        self.parts = localised.parts
        self.over = False  # the model is whole again
        self._here, self._model, self._optimizer = here, model, optimizer
        self._localised = localised
        division = localised.division
        self.metadata = metadata_of({whole.names[0]: whole.names[1:] for whole in division.parameters})
        """Metadata for a file with the tensors that `gather` returns."""
        self._forward = SplitForward(model, here.place.job, captured, found, here.place.topology.workers_per_group)
        self._names = {module: name for name, module in model.named_modules()}
        self._hooks: list[RemovableHandle] = [
            module.register_forward_pre_hook(lambda module, args: self.check_call(module))
            for module in localised.absent
        ]
        self._hooks.append(model.register_state_dict_pre_hook(_no_state))  # type: ignore[no-untyped-call]
        # On the object, so that the forward of the class is there again when the attribute is deleted.
        model.forward = self._forward

    def start(self, worker: Worker) -> None:
        channel = self._here.connect().meet_group()
        assert isinstance(channel, NetworkChannel)
        self._forward.start(worker, channel)

    def weight_said(self) -> None:
        """Raise RuntimeError if the forward of this step has already run."""
        if self._forward.open:
            raise RuntimeError("tt.weight must come before the forward of a split model: it takes part in the backward")

    def is_of(self, model: nn.Module) -> bool:
        """Return whether `model` is the model that was split."""
        return model is self._model

    def check_call(self, module: nn.Module) -> None:
        # Only the whole model can be called: other workers take part in its forward, not in that of a module alone.
        where = self._localised.absent.get(module)
        if where and not self._forward.inside:
            accepted = f"is {where} of its group; call the whole model, on all workers of the group"
            raise ConfigError("model", self._names[module], accepted)

    def gather(self, what: str) -> dict[str, torch.Tensor] | None:
        """Collect the current parameters and buffers on worker 0 of the group.

        All workers of the group call this at the same point of the training.

        Args:
            what: the purpose in words, for error messages.

        Returns:
            On worker 0 whole contiguous tensors by their first names. They lie in one unlinked file of the workspace,
                since they may not fit in memory. On other workers None.

        Raises:
            ConfigError: another worker of the group continues without this call, or the workspace has too little space.
        """
        parts, division = self.parts, self._localised.division
        held = entries(division.parameters, parts.tensors) + entries(division.buffers, parts.buffer_tensors)
        if self._here.me.index:
            give(self._forward.sync, held, what)
            return None
        wholes = (*division.parameters, *division.buffers)
        likes = [torch.empty(whole.shape, dtype=whole.tensor.dtype, device="meta") for whole in wholes]
        found = dict(zip((whole.names[0] for whole in wholes), in_one_file(likes, self._here.workspace), strict=True))
        gather(self._forward.sync, held, found, what)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of parameters and buffers of the whole model."""
        division = self._localised.division
        wholes = (*division.parameters, *division.buffers)
        return sum(math.prod(whole.shape) * whole.tensor.dtype.itemsize for whole in wholes)

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """All names of each tensor that `gather` returns, by its first name."""
        division = self._localised.division
        return {whole.names[0]: whole.names for whole in (*division.parameters, *division.buffers)}

    def whole(self, worker: Worker) -> ModelParts:
        """Take the result of the job on worker (0,0) and make the model whole again."""
        # Tensors that do not fit in memory are in unlinked files of the workspace.
        folder = self._here.workspace
        buffers = fetch_final(worker, folder)
        values = [worker.buffers.own("params", index) for index in range(len(self.parts.tensors))]
        for index, tensor in worker.buffers.edited():
            values[index] = tensor.data
        restore(self._localised, self._optimizer, values, buffers, folder)
        for hook in self._hooks:
            hook.remove()
        del self._model.forward
        self.over = True
        return describe_model(self._model)


def _no_state(*_: Any) -> NoReturn:
    raise ConfigError("model.state_dict()", None, IN_PARTS)


class SplitExtension(PrepareExtension):
    """One model over the workers of a group."""

    def splits(self, model: nn.Module) -> bool:
        return tagged(model) or captured_if_placed(model) is not None

    def holds_elsewhere(self, here: Context, tensor: torch.Tensor) -> bool:
        task = device_scopes.parse(getattr(tensor, device_scopes.PLACE, "")).task
        return task is not None and task != here.me.index

    def divide(self, here: Context, request: PrepareRequest) -> DividedModel | None:
        if request.several or len(request.optimizers) > 1:
            if here.will_split(request.model):
                request.only_optimizer("a model that is split over the workers of a group is trained by one optimizer")
                raise ConfigError("tt.prepare", "several models", "must be one model, where it is split")
            return None
        return split(here, request.model, request.optimizers[0], request.loader)
