"""Run a worker's steps on fake tensors to find their costs.

Each step runs forward and backward by itself, so costs are known per step. Shapes and autograd are torch's own, so
memory kept for the backward is counted and not estimated. It is the memory of all tensors that autograd saves, each
once, without parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_map

from topotrain.parallel.capture.shape_propagation import flat_weights
from topotrain.parallel.estimate.flop_counter import FlopCounter, storage, tensors
from topotrain.parallel.placement.parameter_owners import ParameterOwners, WholeTensor
from topotrain.parallel.program.layouts import box, sizes_of
from topotrain.parallel.program.split_program import (
    LayoutEdge,
    LocationKind,
    Program,
    ProgramStep,
    ResultRef,
    SizeArgument,
    StepKind,
    SymbolicShape,
    ValueLocation,
)
from topotrain.parallel.program.worker_program import references, replaced

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost of one step on one worker, for one pass over its samples.

    Attributes:
        flops, backward_flops: operations.
        touched, backward_touched: bytes read and written.
        made: bytes of the result that are new memory.
        kept: bytes that stay for the backward because of this step and of no step before it.
    """

    flops: int = 0
    touched: int = 0
    backward_flops: int = 0
    backward_touched: int = 0
    made: int = 0
    kept: int = 0


@dataclass(slots=True)
class FakeRun:
    """One worker's pass: costs by step, bytes kept for the backward, peak live bytes."""

    costs: Mapping[int, StepCost]
    kept: int
    peak: int


def rehearse(
    program: Program,
    model: nn.Module,
    division: ParameterOwners,
    worker: int,
    samples: Sequence[int],
    examples: Mapping[str, Any] = NOTHING,
) -> FakeRun:
    """Run one worker's steps of a program on fake tensors.

    No memory of the size of the model is allocated.

    Args:
        model: whole or localized. Its modules keep their modes (training or evaluation).
        division: the owners of its parameters (`parameter_owners.divide`).
        samples: each worker's share of the batch.
        examples: arguments of the forward for the group's batch, by name. Arguments that are tensors may be left out.
    """
    # Modules may hold real tensors as plain attributes.
    with FakeTensorMode(allow_non_fake_inputs=True):
        return _FakeWorker(program, model, division, worker, samples, examples).run()


def with_gradient(program: Program, model: nn.Module) -> frozenset[int]:
    """Return the numbers of the steps with a result that has a gradient.

    Such a result depends on something that is trained, and is floating point.
    """
    found: set[int] = set()
    for step in program.steps:
        real = step.shape is None or getattr(torch, step.shape.dtype).is_floating_point
        cut = step.kind is StepKind.METHOD and step.target == "detach"
        read = refs(step)
        if real and not cut and (_trained(step, model) or any(ref.number in found for ref in read)):
            found.add(step.number)
    return frozenset(found)


def refs(step: ProgramStep) -> tuple[ResultRef, ...]:
    """Return the results that a step reads, in order."""
    return tuple(references((step.args, step.kwargs)))


class _FakeWorker:
    def __init__(
        self,
        program: Program,
        model: nn.Module,
        division: ParameterOwners,
        worker: int,
        samples: Sequence[int],
        examples: Mapping[str, Any],
    ) -> None:
        self._program = program
        self._model = model
        self._wholes = {
            name: whole
            for wholes in (division.parameters, division.buffers, division.passing)
            for whole in wholes
            for name in whole.names
        }
        self._worker = worker
        self._samples = samples
        self._examples = examples
        self._graded = with_gradient(program, model)
        self._results: dict[int, Any] = {}
        self._arrived: dict[int, torch.Tensor] = {}
        self._same: dict[int, int] = {}  # storage of a copy -> storage of the tensor that it represents
        self._own: dict[str, torch.Tensor] = {}  # parameters and buffers, fake, by their first name
        self._alive: list[Any] = []  # the number of a storage is unique only while the storage lives
        self._sizes: dict[int, int] = {}
        self._kept: set[int] = set()
        self._last = _last_uses(program)

    def run(self) -> FakeRun:
        costs, peak = dict[int, StepCost](), 0
        for at, step in enumerate(self._program.steps):
            if step.layout.on(self._worker):
                costs[step.number] = self._step(step)
                peak = max(peak, self._live(at, step))
        return FakeRun(costs, sum(map(self._sizes.__getitem__, self._kept)), peak)

    def _step(self, step: ProgramStep) -> StepCost:
        if step.kind is StepKind.INPUT:
            self._results[step.number] = self._input(step)
            return StepCost()
        if step.kind is StepKind.ATTRIBUTE:
            self._results[step.number] = self._attribute(step)
            return StepCost()
        before, known = self._bytes_kept(), set(self._sizes)
        leaves: list[torch.Tensor] = []
        args, kwargs = replaced((step.args, step.kwargs), lambda leaf: self._argument(leaf, step, leaves))
        state = self._states(step)
        leaves += [tensor for tensor in state.values() if tensor.requires_grad]
        forward, backward = FlopCounter(), FlopCounter()
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor), forward:
            out = self._call(step, state, args, kwargs)
        ends = [tensor for tensor in tensors(out) if tensor.requires_grad]
        if ends and leaves:
            seeds = [torch.ones_like(end) for end in ends]
            with backward:
                torch.autograd.grad(ends, leaves, seeds, allow_unused=True)
        # Each step's backward was run here, so the next step starts a graph of its own.
        self._results[step.number] = tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, out)
        made = sum(self._note(t) for t in tensors(out) if self._of(t) not in known)
        kept = self._bytes_kept() - before
        return StepCost(forward.flops, forward.touched, backward.flops, backward.touched, made, kept)

    def _call(self, step: ProgramStep, state: dict[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
        if step.kind is StepKind.FUNCTION:
            return step.target(*args, **kwargs)
        if step.kind is StepKind.METHOD:
            return getattr(args[0], step.target)(*args[1:], **kwargs)
        module = self._model.get_submodule(step.target)
        with flat_weights(module, state):
            return functional_call(module, state, args, kwargs)

    def _states(self, step: ProgramStep) -> dict[str, torch.Tensor]:
        """Return the fake parameters and buffers of a step's module by name."""
        if step.kind is not StepKind.MODULE:
            return {}
        module = self._model.get_submodule(step.target)
        names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        return {name: self._state(self._wholes[f"{step.target}.{name}".lstrip(".")]) for name in names}

    def _state(self, whole: WholeTensor) -> torch.Tensor:
        """Return this worker's part of a parameter or buffer as a fake tensor."""
        made = self._own.get(whole.names[0])
        if made is None:
            share = next(share for share in whole.shares if share.here(self._worker))
            graded = isinstance(whole.tensor, nn.Parameter) and whole.tensor.requires_grad
            made = torch.empty(share.of(whole.like()).shape, dtype=whole.tensor.dtype, requires_grad=graded)
            self._own[whole.names[0]] = made
        return made

    def _attribute(self, step: ProgramStep) -> Any:
        whole = self._wholes.get(step.target)
        if whole is not None:
            return self._state(whole)
        owner, _, name = step.target.rpartition(".")
        return getattr(self._model.get_submodule(owner), name)

    def _input(self, step: ProgramStep) -> Any:
        if step.shape is not None:
            return self._fresh(step.shape, step.layout)
        return tree_map(self._share, self._examples.get(step.target))

    def _share(self, example: Any) -> Any:
        """Return this worker's part of a tensor inside a list or dict of the arguments."""
        if not isinstance(example, torch.Tensor):
            return example
        sizes = list(example.shape)
        if sum(self._samples) in sizes:
            sizes[sizes.index(sum(self._samples))] = self._samples[self._worker]
        made = torch.empty(sizes, dtype=example.dtype)
        self._note(made)
        return made

    def _fresh(self, shape: SymbolicShape, layout: ValueLocation) -> torch.Tensor:
        part = box(layout, self._worker, shape, self._samples)
        sizes = shape.at(self._samples[self._worker]) if part is None else sizes_of(part)
        made = torch.empty(sizes, dtype=getattr(torch, shape.dtype))
        self._note(made)
        return made

    def _argument(self, leaf: ResultRef | SizeArgument, step: ProgramStep, leaves: list[torch.Tensor]) -> Any:
        """Return the argument of a step: a number of samples, or a copy of a value."""
        if isinstance(leaf, SizeArgument):
            whole = step.layout.where in (LocationKind.AT, LocationKind.FEATURE)
            samples = sum(self._samples) if whole else self._samples[self._worker]
            return leaf.per_sample * samples + leaf.more
        # Autograd may write into the copy, which counts as the same memory as the value.
        graded = leaf.number in self._graded
        found = self._results.get(leaf.number) if leaf.edge is None else self._moved(leaf.edge)
        return tree_map(lambda x: self._leaf(x, graded, leaves) if isinstance(x, torch.Tensor) else x, found)

    def _leaf(self, tensor: torch.Tensor, graded: bool, leaves: list[torch.Tensor]) -> torch.Tensor:
        leaf = tensor.detach()
        if graded and leaf.is_floating_point():
            leaf.requires_grad_()
            leaves.append(leaf)
        # A step may write to its argument in place, which autograd refuses for a leaf.
        copy = leaf.clone()
        self._alive.append(copy)
        self._same[storage(copy)] = self._of(tensor)
        return copy

    def _moved(self, number: int) -> torch.Tensor:
        if number not in self._arrived:
            edge: LayoutEdge = next(edge for edge in self._program.edges if edge.number == number)
            self._arrived[number] = self._fresh(edge.shape, edge.target)
        return self._arrived[number]

    # --- memory ----------------------------------------------------------------------------------------------------

    def _of(self, tensor: torch.Tensor) -> int:
        return self._same.get(storage(tensor), storage(tensor))

    def _note(self, tensor: torch.Tensor) -> int:
        """Remember the memory of a tensor and return its bytes."""
        self._alive.append(tensor)
        return self._sizes.setdefault(self._of(tensor), tensor.untyped_storage().nbytes())

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        # Parameters are counted as parameters, although autograd saves them, too.
        if isinstance(tensor, FakeTensor) and self._of(tensor) not in set(map(storage, self._own.values())):
            self._note(tensor)
            self._kept.add(self._of(tensor))
        return tensor

    def _bytes_kept(self) -> int:
        return sum(map(self._sizes.__getitem__, self._kept))

    def _live(self, at: int, step: ProgramStep) -> int:
        """Return the bytes that are live after a step."""
        # Kept for the backward, just made, or read by a later step or the output.
        held = set(self._kept)
        values = {ResultRef(number): value for number, value in self._results.items()}
        values |= {ResultRef(edge.value, edge.number): self._arrived.get(edge.number) for edge in self._program.edges}
        for ref, value in values.items():
            if self._last.get(ref, -1) > at or ref == ResultRef(step.number):
                held.update(self._of(tensor) for tensor in tensors(value))
        held -= set(map(storage, self._own.values()))
        return sum(self._sizes.get(number, 0) for number in held)


def _last_uses(program: Program) -> dict[ResultRef, int]:
    """Map each value, moved or not, to the position of the last step that reads it."""
    last = {ref: at for at, step in enumerate(program.steps) for ref in refs(step)}
    return last | dict.fromkeys(references(program.output), len(program.steps))


def _trained(step: ProgramStep, model: nn.Module) -> bool:
    if step.kind is StepKind.MODULE:
        return any(tensor.requires_grad for tensor in model.get_submodule(step.target).parameters())
    if step.kind is StepKind.ATTRIBUTE:
        owner, _, name = step.target.rpartition(".")
        return bool(getattr(getattr(model.get_submodule(owner), name), "requires_grad", False))
    return False
