"""The program of a split model as data: steps, layouts of values, and edges.

Every worker of a group holds the same program, with its steps in order. The layout of a value is the part of it that
each worker has:

- BATCH: each worker has its share of the samples (`partition_dim: 0`, the default).
- FEATURE: each worker has an even part along one dimension, of all samples (`partition_dim: 1`).
- AT: one worker has the whole value (`partition_dim: -1`, `location`).
- WHOLE: every worker has the whole value. Only edges have it as target, and FEATURE steps read it.
- SAME: every worker computes the same value without the batch (a parameter, a constant), so it is never sent.
- OWN: each worker computes the value from its own share, and it no longer has one entry per sample (a mean over the
  share). It cannot be sent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any


class LocationKind(Enum):
    """How a value is distributed over the workers of a group."""

    BATCH = "batch"
    FEATURE = "feature"
    AT = "at"
    WHOLE = "whole"
    SAME = "same"
    OWN = "own"


@dataclass(frozen=True, slots=True)
class ValueLocation:
    """The layout of a value. FEATURE uses `dim` (never negative), AT uses `worker`."""

    where: LocationKind
    dim: int = 0
    worker: int = 0

    def on(self, worker: int) -> bool:
        """Return whether a worker has any part of the value."""
        return self.where is not LocationKind.AT or self.worker == worker


@dataclass(frozen=True, slots=True)
class SymbolicShape:
    """A tensor's sizes for any number of samples.

    Dimension `batch` has `per_sample` entries per sample; -1 means no such dimension. `sizes` are in elements, with 0
    at `batch`. `dtype` is torch's name without "torch.".
    """

    sizes: tuple[int, ...]
    dtype: str
    batch: int = -1
    per_sample: int = 1

    def at(self, samples: int) -> tuple[int, ...]:
        """Return the sizes with `samples` samples."""
        return tuple(samples * self.per_sample if d == self.batch else size for d, size in enumerate(self.sizes))


@dataclass(frozen=True, slots=True)
class ResultRef:
    """As an argument: the result of step `number`, after edge `edge` if not None."""

    number: int
    edge: int | None = None


@dataclass(frozen=True, slots=True)
class SizeArgument:
    """As an argument: the number `per_sample` × samples + `more`.

    The samples are those with which the step computes.
    """

    per_sample: int
    more: int


class StepKind(Enum):
    """The kind of a step."""

    INPUT = "input"  # target: the argument's name
    MODULE = "module"  # target: the module's name in the model
    FUNCTION = "function"  # target: the callable
    METHOD = "method"  # target: the method's name; the first argument is the object
    ATTRIBUTE = "attribute"  # target: a parameter's or buffer's name in the model


@dataclass(frozen=True, slots=True)
class DropoutMask:
    """A mask that a step draws: its shape, and the probability to keep an element.

    `order` has the dimensions in the order of memory, which is the order in which elements are drawn, outermost first.
    () means that the mask is contiguous.
    """

    shape: SymbolicShape
    keep: float
    order: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One node of the graph.

    `args` and `kwargs` are nested tuples, lists and dicts that may hold ResultRef and SizeArgument.

    Attributes:
        layout: the layout of its result. All workers that have a part of it run the step.
        shape: the shape of the result, or None if it is not a single tensor.
        random: the step draws a mask as dropout does (`runtime/dropout.py`).
        inside: the masks that it draws in training.
        line: "file:line" of the user's code, or "".
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
    """A move of the result of step `value` from layout `source` to layout `target`.

    A value that several steps need in the same layout is moved once.
    """

    number: int
    value: int
    source: ValueLocation
    target: ValueLocation
    shape: SymbolicShape


@dataclass(frozen=True, slots=True)
class Program:
    """The program of a split model.

    `inputs` are the names of the forward's arguments. `output` is nested and holds ResultRefs. Its tensors are BATCH
    (each worker has those of its own samples), WHOLE, SAME or OWN, on every worker.
    """

    workers: int
    steps: tuple[ProgramStep, ...]
    edges: tuple[LayoutEdge, ...]
    inputs: tuple[str, ...]
    output: Any
