"""The cut graph as data: what is computed in which order, where each value is, and what travels.

Every worker of a group holds the same program. A value's layout says which part of it which worker has:

* BATCH: each worker its share of the samples (`partition_dim: 0`, the default).
* FEATURE: each worker an even part along one dimension of all samples' features (`partition_dim: 1`).
* AT: one worker all of it (`partition_dim: -1`, `location`).
* WHOLE: every worker all of it; a target of moves only, and what a FEATURE step reads.
* SAME: every worker computes the same without the batch (a parameter, a constant); nothing has to travel.
* OWN: computed from a worker's own share and no longer one entry per sample (a mean over the share); cannot travel.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any


class LocationKind(Enum):
    """How a value lies over the workers of a group."""

    BATCH = "batch"
    FEATURE = "feature"
    AT = "at"
    WHOLE = "whole"
    SAME = "same"
    OWN = "own"


@dataclass(frozen=True, slots=True)
class ValueLocation:
    """`dim` counts for FEATURE (never negative), `worker` for AT."""

    where: LocationKind
    dim: int = 0
    worker: int = 0

    def on(self, worker: int) -> bool:
        """Whether a worker has any of it."""
        return self.where is not LocationKind.AT or self.worker == worker


@dataclass(frozen=True, slots=True)
class SymbolicShape:
    """A tensor's sizes for any number of samples: dimension `batch` has `per_sample` entries for each; -1: none has.

    `sizes` counts elements and has 0 at `batch`; `dtype` is torch's name without "torch.".
    """

    sizes: tuple[int, ...]
    dtype: str
    batch: int = -1
    per_sample: int = 1

    def at(self, samples: int) -> tuple[int, ...]:
        """The sizes with so many samples."""
        return tuple(samples * self.per_sample if d == self.batch else size for d, size in enumerate(self.sizes))


@dataclass(frozen=True, slots=True)
class ResultRef:
    """As an argument: the result of step `number`, after move `edge` if that is not None."""

    number: int
    edge: int | None = None


@dataclass(frozen=True, slots=True)
class SizeArgument:
    """As an argument: the number `per_sample` × samples + `more`, of the samples that the step computes with."""

    per_sample: int
    more: int


class StepKind(Enum):
    """What a step does."""

    INPUT = "input"  # target: the argument's name
    MODULE = "module"  # target: the module's name in the model
    FUNCTION = "function"  # target: the callable
    METHOD = "method"  # target: the method's name; the first argument is the object
    ATTRIBUTE = "attribute"  # target: a parameter's or buffer's name in the model


@dataclass(frozen=True, slots=True)
class DropoutMask:
    """Drawn by a step: its shape, the chance of an element to stay, and its dimensions in the order of memory.

    That is the order in which elements are drawn, outermost dimension first; (): as they are counted.
    """

    shape: SymbolicShape
    keep: float
    order: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One node of the graph. `args` and `kwargs` are nested tuples, lists and dicts that may hold Ref and Size.

    layout: where its result is; the workers that have any of it run it.
    shape: of the result, None where that is no single tensor.
    random: it draws a mask like dropout's (`chance`). inside: the masks that it draws in training.
    line: "file:line" of the user's code that it stands for, or "".
    """

    number: int
    name: str
    kind: StepKind
    target: Any
    layout: ValueLocation
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    shape: SymbolicShape | None = None
    random: bool = False
    line: str = ""
    inside: tuple[DropoutMask, ...] = ()


@dataclass(frozen=True, slots=True)
class LayoutEdge:
    """A value that is needed in another layout than it has: result of step `value`, moved from `source` to `target`.

    One value that several steps need in one and the same layout travels once.
    """

    number: int
    value: int
    source: ValueLocation
    target: ValueLocation
    shape: SymbolicShape


@dataclass(frozen=True, slots=True)
class Program:
    """The cut graph. `inputs` are the names of the forward's arguments; `output` is nested and holds Refs.

    Tensors of the output are BATCH (each worker has its own samples'), WHOLE, SAME or OWN, on every worker.
    """

    workers: int
    steps: tuple[ProgramStep, ...]
    edges: tuple[LayoutEdge, ...]
    inputs: tuple[str, ...]
    output: Any
