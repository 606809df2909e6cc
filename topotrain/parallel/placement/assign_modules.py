"""Assignments of modules: from `partition` blocks, then the script's scopes.

A module that neither names is computed by samples. The result depends only on the model, the job and the number of
workers, so all workers find the same.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from topotrain.config.job import ConfigError, Partition
from topotrain.parallel.capture import device_scopes
from topotrain.parallel.capture.capture_model import CapturedForward
from topotrain.parallel.placement.parameter_owners import tables

_SHOWN = 8
_DIMS = (-1, 0, 1)


@dataclass(frozen=True, slots=True)
class Assignment:
    """By samples (`dim` 0), by features (1), or all on worker `location` (-1)."""

    dim: int = 0
    location: int | None = None


DEFAULT = Assignment()
"""By samples: every worker holds the whole module."""


def location_of(text: str, workers: int, where: str = "", types: Sequence[str] = device_scopes.TYPES) -> int | None:
    """Return the worker that a device name means, or None if the name leaves it open.

    Raises:
        ConfigError: the device does not exist, or is a server. Servers compute no part of a model.
    """
    if not text:
        return None
    try:
        device = device_scopes.complete(device_scopes.parse(text), workers, 0, types)
    except ConfigError as error:
        raise (error.at(where) if where else error) from None
    return device.task


def assignments(model: nn.Module, job: Any, workers: int, found: CapturedForward) -> Mapping[str, Assignment]:
    """Return the assignment of each module by name.

    A module that is not in the result follows its input. The result has modules that are one node where they are
    called, if they have parameters or buffers or were assigned explicitly, and parameters and buffers of other modules.
    A module with parts that are all assigned alike is in the result, too.

    Args:
        job: its `partition` blocks come first, in order. `match` is searched for in the names of modules and of their
            parameters. A block that matches a module also applies to all modules below it that no other block matches.
        found: the captured forward of the model.

    Raises:
        ConfigError: a block or a device scope is not possible. The error names the block or the module.
    """
    return _Assigning(model, tuple(job.partition), workers, found).all()


class _Assigning:
    def __init__(self, model: nn.Module, blocks: Sequence[Partition], workers: int, found: CapturedForward) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._names = {id(module): name for name, module in reversed(self._modules.items())}  # the first of several
        self._blocks = blocks
        self._workers = workers
        self._leaves = set(found.leaves)
        self._types = sorted({_type(p.device.type) for p in found.stored.values() if p.device.type != "meta"}) or [
            "CPU"
        ]
        self._loads = [0] * workers
        self._counted: set[tuple[int, int]] = set()
        self._open: dict[str, list[str]] = {}  # modules for the lightest worker, by their outermost module
        self._calls = self._scopes_of_calls(found)
        self._check_blocks()

    def all(self) -> dict[str, Assignment]:
        decided: dict[str, Assignment | None] = {}
        for name in self._units():
            decided[name] = self._decide(name)
            chosen = decided[name]
            if chosen is not None and chosen.location is not None:
                self._load(name, chosen.location)
        for names in self._open.values():  # after all modules with a location, so that these even out the loads
            lightest = min(range(self._workers), key=lambda k: (self._loads[k], k))
            for name in names:
                decided[name] = Assignment(-1, lightest)
                self._load(name, lightest)
        kept = {name: assignment for name, assignment in decided.items() if assignment is not None}
        for name, assignment in kept.items():
            self._check(name, assignment)
        return kept | self._owners(kept)

    def _units(self) -> Iterator[str]:
        """Yield leaves, and tensors outside all leaves, in definition order."""
        for name, module in self._modules.items():
            if self._leaf_above(name) is not None:
                continue
            if name in self._leaves or self._names[id(module)] in self._leaves:
                yield name
            else:
                for own in (name for table in tables(module) for name in table):
                    if getattr(module, own) is not None:
                        yield f"{name}.{own}".lstrip(".")

    def _leaf_above(self, name: str) -> str | None:
        return next((above for above in _above(name) if above in self._leaves), None)

    def _owners(self, kept: Mapping[str, Assignment]) -> dict[str, Assignment]:
        found: dict[str, set[Assignment]] = {}
        for name in kept:
            if name not in self._modules:
                found.setdefault(name.rpartition(".")[0], set()).add(kept[name])
        return {name: next(iter(every)) for name, every in found.items() if len(every) == 1}

    # --- deciding --------------------------------------------------------------------------------------------------

    def _decide(self, name: str) -> Assignment | None:
        # Blocks come first, also those that name a layer around this one.
        for outer in (name, *_above(name)):
            block = self._block(outer, inside=outer == name)
            if block is not None:
                return self._by_block(name, self._blocks[block], self._outermost(outer, block))
        by_tag = self._by_tags(name)
        if by_tag is not None:
            return by_tag
        module = self._modules.get(name)
        bare = module is not None and not any(True for _ in (*module.parameters(), *module.buffers()))
        # A module without parameters follows its input, so that no value moves for it.
        return None if bare else DEFAULT

    def _block(self, name: str, inside: bool = False) -> int | None:
        """Return the number of the first block that matches a name, or None."""
        texts = [name]
        # A leaf is also matched by the names of its parameters.
        if inside and name in self._modules:
            texts += [f"{name}.{own}" for own, _ in self._modules[name].named_parameters()]
        for number, block in enumerate(self._blocks):
            if any(re.search(block.match, text) for text in texts):
                return number
        return None

    def _outermost(self, name: str, block: int) -> str:
        """Return the outermost module above `name` that the same block matches."""
        for above in _above(name):
            # All modules in between must be matched by this block, too.
            if self._block(above) != block:
                break
            name = above
        return name

    def _by_block(self, name: str, block: Partition, unit: str) -> Assignment | None:
        if block.location is not None and block.location >= 0:
            return Assignment(-1, block.location)
        if block.partition_dim == -1:
            self._open.setdefault(unit, []).append(name)
            return None
        return Assignment(block.partition_dim)

    def _by_tags(self, name: str) -> Assignment | None:
        candidates = [*self._tags(name), *map(self._own_tag, _above(name))]
        for tag in filter(None, candidates):
            location = location_of(tag, self._workers, types=self._types)
            if location is not None:  # a scope that leaves the worker open is ignored
                return Assignment(-1, location)
        return None

    def _own_tag(self, name: str) -> str | None:
        return getattr(self._modules.get(name), device_scopes.PLACE, None)

    def _tags(self, name: str) -> list[str | None]:
        """Return the candidate device names of a leaf or tensor, the strongest first."""
        # Of a leaf: its own, the common one of its parameters, that of its calls.
        module = self._modules.get(name)
        if module is None:
            owner, _, own = name.rpartition(".")
            return [getattr(getattr(self._modules[owner], own), device_scopes.PLACE, None)]
        tags = {getattr(parameter, device_scopes.PLACE, None) for parameter in module.parameters()}
        inside = next(iter(tags)) if len(tags) == 1 else None
        return [self._own_tag(name), inside, self._calls.get(name)]

    def _scopes_of_calls(self, found: CapturedForward) -> dict[str, str]:
        scopes: dict[str, tuple[str, str]] = {}
        for node in found.graph.nodes:
            name = str(node.target)
            module = self._modules.get(name) if node.op == "call_module" else None
            if module is None or not any(True for _ in module.parameters()):
                continue
            scope, line = node.meta["device"], node.meta["line"]
            before = scopes.setdefault(name, (scope, line))
            if before[0] != scope and name not in self._tagged():
                accepted = (
                    f"{name} is called in another scope at {before[1]}; place it where it is made, or by tt.place"
                )
                raise ConfigError("tt.device", scope or None, accepted, line)
        return {name: scope for name, (scope, _) in scopes.items() if scope}

    def _tagged(self) -> set[str]:
        return {name for name in self._modules if self._own_tag(name) or self._block(name, True) is not None}

    # --- counting and checking -------------------------------------------------------------------------------------

    def _load(self, name: str, worker: int) -> None:
        module = self._modules.get(name)
        if module is None:
            owner, _, own = name.rpartition(".")
            tensors = [getattr(self._modules[owner], own)]
        else:
            tensors = list(module.parameters())
        for tensor in tensors:
            # A tied tensor is in a worker's memory once.
            if (id(tensor), worker) not in self._counted:
                self._counted.add((id(tensor), worker))
                self._loads[worker] += tensor.numel() * tensor.element_size()

    def _check_blocks(self) -> None:
        own = {f"{m}.{p}".lstrip(".") for m, module in self._modules.items() for p in tables(module)[0]}
        names = [*self._modules, *sorted(own)]
        for number, block in enumerate(self._blocks):
            path = f"partition[{number}]"
            if block.partition_dim not in _DIMS:
                raise ConfigError(f"{path}.partition_dim", block.partition_dim, "must be 0, 1 or -1")
            location = -1 if block.location is None else block.location
            if not -1 <= location < self._workers:
                accepted = f"must be a worker of the group, 0 to {self._workers - 1}, or -1 for any"
                raise ConfigError(f"{path}.location", block.location, accepted)
            if location >= 0 and block.partition_dim == 1:
                accepted = "must be -1 with partition_dim: 1, which is on all workers of the group"
                raise ConfigError(f"{path}.location", block.location, accepted)
            matched = [name for name in names if re.search(block.match, name)]
            if not matched:
                shown = [name for name in names if name][:_SHOWN]
                more = "" if len(names) - 1 <= _SHOWN else f" and {len(names) - 1 - _SHOWN} more"
                accepted = f"matches no module and no parameter; there are {', '.join(shown)}{more}"
                raise ConfigError(f"{path}.match", block.match, accepted)
            around = [self._leaf_above(name) for name in matched if name not in own]
            if around and None not in around and not own.intersection(matched):
                accepted = (
                    f"matches only what is inside {', '.join(sorted({*filter(None, around)}))}, which stays whole"
                )
                raise ConfigError(f"{path}.match", block.match, accepted)

    def _check(self, name: str, assignment: Assignment) -> None:
        """Refuse a module that cannot be cut by features."""
        module = self._modules.get(name)
        why = ""
        if assignment.dim != 1 or module is None:
            return
        if isinstance(module, nn.MultiheadAttention):
            why = "cannot cut nn.MultiheadAttention; use partition_dim 0, a location, or Linear layers"
        elif isinstance(module, nn.Conv1d | nn.Conv2d) and module.groups != 1:
            why = f"needs groups = 1, not {module.groups}"
        elif isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
            why = "needs an Embedding without max_norm and with sparse=False"
        if why:
            raise ConfigError("partition_dim", 1, f"module {name}: {why}")


def _above(name: str) -> Iterator[str]:
    """Yield the names of the modules around a name, the nearest first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _type(device: str) -> str:
    return "CPU" if device == "cpu" else "GPU"
