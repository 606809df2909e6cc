"""Turn a graph description into a program and this worker's part of a model.

`program_runner.Runner` runs the result. Every call is first run on fake tensors, which have sizes and no memory. That
finds every size, and any value that is too large, before anything is allocated.

- Every value is on one worker (AT). Where another worker needs it, an edge moves it.
- In a training step all workers get the loss, since all run the backward. Other outputs stay on the first worker.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from topotrain.config.field_checks import ConfigError
from topotrain.core.model.schema import torch_dtype
from topotrain.parallel.placement.assign_modules import Assignment
from topotrain.parallel.placement.parameter_owners import ParameterOwners, divide
from topotrain.parallel.program.split_program import (
    LayoutEdge,
    LocationKind,
    Program,
    ProgramStep,
    ResultRef,
    StepKind,
    SymbolicShape,
    ValueLocation,
)
from topotrain.parallel.program.worker_program import references, replaced
from topotrain.parallel.remote.allowed_functions import FUNCTIONS
from topotrain.parallel.remote.argument_codec import REFERENCES, CallInput, ComputingDevice, NodeOutput, StateRef
from topotrain.parallel.remote.graph_description import GraphDescription, GraphNode, StateDescription
from topotrain.parallel.remote.graph_description import TensorForm as Described
from topotrain.parallel.remote.graph_recorder import quiet
from topotrain.training.parameters.flat_parameters import HOME

_WHOLE = ValueLocation(LocationKind.WHOLE)
_LEAVES = (*REFERENCES, ComputingDevice)


class WorkerModel(nn.Module):
    """The states of a session's model that this worker holds, named `s0`, `s1`, ….

    States of other workers are on the meta device.

    Args:
        states: all states of the model.
        values: the tensors of this worker, by the number of their state.
    """

    def __init__(self, states: Sequence[StateDescription], values: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        # Every worker registers all states, so that names and numbers are the same on all.
        for number, state in enumerate(states):
            value = values.get(number)
            if value is None:
                value = torch.empty(state.form.sizes, dtype=torch_dtype(state.form.dtype), device="meta")
            if state.graded is None:
                self.register_buffer(f"s{number}", value)
                continue
            parameter = nn.Parameter(value, state.graded)
            if state.home >= 0:
                setattr(parameter, HOME, state.home)
            self.register_parameter(f"s{number}", parameter)

    def forward(self, **given: torch.Tensor) -> Any:
        """Declare the arguments, which are named `x0`, `x1`, …. The program runs instead."""
        raise NotImplementedError

    def divided(self, states: Sequence[StateDescription], workers: int) -> ParameterOwners:
        """Return the owners of all states."""
        places = {f"s{number}": Assignment(-1, state.worker) for number, state in enumerate(states)}
        return divide(self, places, workers)

    def parameters_in_order(self) -> list[nn.Parameter]:
        """Return its parameters by number."""
        return list(self.parameters())


@dataclass(slots=True)
class OutputCollector:
    """Takes the output of the model on the worker that computes it."""

    content: Any = None

    def __call__(self, content: Any) -> None:
        self.content = content

    def take(self) -> Any:
        """Return the output, and keep no reference to it."""
        content, self.content = self.content, None
        return content


class NoGradFunction:
    """An allowed function of torch, called inside `torch.no_grad()`."""

    def __init__(self, name: str) -> None:
        self._function = FUNCTIONS[name]
        self.__name__ = str(getattr(self._function, "__name__", self._function))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self._function(*args, **kwargs)


@dataclass(slots=True)
class _Building:
    description: GraphDescription
    states: Sequence[StateDescription]
    workers: int
    first: int
    steps: list[ProgramStep] = field(default_factory=list)
    edges: dict[tuple[int, ValueLocation], LayoutEdge] = field(default_factory=dict)
    numbers: dict[object, int] = field(default_factory=dict)
    memory: set[StorageWeakRef] = field(default_factory=set)
    bytes: int = 0

    def add(
        self,
        name: object,
        kind: StepKind,
        target: Any,
        worker: int,
        example: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        line: str = "",
    ) -> int:
        """Add a step and return its number."""
        number = self.numbers[name] = len(self.steps)
        shape = SymbolicShape(tuple(example.shape), _dtype(example)) if isinstance(example, torch.Tensor) else None
        label = getattr(target, "__name__", str(target))
        layout = ValueLocation(LocationKind.AT, worker=worker)
        self.steps.append(
            ProgramStep(number, f"{label} {number}", kind, target, layout, tuple(args), kwargs, shape, line=line)
        )
        return number

    def ref(self, number: int, layout: ValueLocation) -> ResultRef:
        """Return a reference to a step's result in the layout where it is needed."""
        # Each edge is made once, also if several steps read the value there.
        step = self.steps[number]
        if step.layout == layout:
            return ResultRef(number)
        if step.shape is None:
            raise ConfigError(
                "description", step.name, "is not a single tensor, so it cannot be sent to another worker"
            )
        key = (number, layout)
        if key not in self.edges:
            self.edges[key] = LayoutEdge(len(self.edges), number, step.layout, layout, step.shape)
        return ResultRef(number, self.edges[key].number)


def program(
    description: GraphDescription,
    states: Sequence[StateDescription],
    workers: int,
    first: int,
    box: OutputCollector | None,
    most: int,
) -> Program:
    """Build the program of a description.

    Args:
        states: the states of the model.
        workers: workers of the cluster.
        first: the worker with the connection to the session. It has the arguments.
        box: takes the output on the first worker. None: the output is the loss, and all workers get it.
        most: bytes that all values together may have.

    Raises:
        ConfigError: torch refuses a call, or the values are too large. The error names the line of the user's code.
    """
    # Sizes are found without memory, and a value that is too large is refused before it exists.
    with quiet(), FakeTensorMode():
        return _program(_Building(description, states, workers, first), box, most)


def _program(building: _Building, box: OutputCollector | None, most: int) -> Program:
    description = building.description
    examples: dict[object, Any] = {}
    for ref in _used(description):
        if isinstance(ref, CallInput) and ref not in examples:
            examples[ref] = _empty(description.inputs[ref.number], most)
            building.add(ref, StepKind.INPUT, f"x{ref.number}", building.first, examples[ref])
        elif isinstance(ref, StateRef) and ref not in examples:
            state = building.states[ref.number]
            examples[ref] = _empty(state.form, most).requires_grad_(bool(state.graded))
            building.add(ref, StepKind.ATTRIBUTE, f"s{ref.number}", state.worker, examples[ref])
    for number, node in enumerate(description.nodes):
        _add_node(building, number, node, examples, most)
    output = description.output
    if box is None:
        output = _loss(building, output, examples)
    else:
        # The output is read by a step of its own, which runs on the first worker alone.
        layout = ValueLocation(LocationKind.AT, worker=building.first)
        args = [_refs(building, output, layout, examples)]
        building.add("output", StepKind.FUNCTION, box, building.first, None, args)
        output = ()
    inputs = tuple(f"x{number}" for number in range(len(description.inputs)))
    return Program(building.workers, tuple(building.steps), tuple(building.edges.values()), inputs, output)


def _used(description: GraphDescription) -> list[Any]:
    everything = [[node.args, [value for _, value in node.kwargs]] for node in description.nodes]
    return list(references([*everything, description.output], REFERENCES))


def _add_node(building: _Building, number: int, node: GraphNode, examples: dict[object, Any], most: int) -> None:
    function = FUNCTIONS[node.function]
    args, kwargs = list(node.args), dict(node.kwargs)
    given = replaced([args, kwargs], lambda ref: _at(ref, examples), _LEAVES)
    try:
        with torch.set_grad_enabled(node.graded):
            result = function(*given[0], **given[1])
    except Exception as error:  # torch may raise anything for arguments that do not fit
        accepted = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise ConfigError(node.function, None, accepted, node.line) from None
    for leaf in tree_leaves(result):
        if not isinstance(leaf, torch.Tensor):
            continue
        # A view has no memory of its own.
        if (memory := StorageWeakRef(leaf.untyped_storage())) not in building.memory:  # type: ignore[no-untyped-call]
            building.memory.add(memory)
            building.bytes += _bytes(leaf)
        if max(building.bytes, _bytes(leaf)) > most:
            size = f"makes a value of {_bytes(leaf):,} bytes, so that the values of this call have {building.bytes:,}"
            raise ConfigError(node.function, None, f"{size}, more than the limit of this worker, {most:,}", node.line)
    examples[NodeOutput(number)] = result
    layout = ValueLocation(LocationKind.AT, worker=node.worker)
    refs = _refs(building, [args, kwargs], layout, examples)
    target = function if node.graded else NoGradFunction(node.function)
    building.add(
        NodeOutput(number),
        StepKind.FUNCTION,
        target,
        node.worker,
        result,
        refs[0],
        MappingProxyType(refs[1]),
        node.line,
    )


def _refs(building: _Building, nested: Any, layout: ValueLocation, examples: Mapping[object, Any]) -> Any:
    def leaf(ref: Any) -> Any:
        on_device = isinstance(ref, ComputingDevice)
        return _at(ref, examples) if on_device else building.ref(_step_of(building, ref, examples), layout)

    return replaced(nested, leaf, _LEAVES)


def _step_of(building: _Building, ref: Any, examples: Mapping[object, Any]) -> int:
    """Return the step with this result. A part of a tuple gets a step of its own."""
    if ref in building.numbers:
        return building.numbers[ref]
    example = _at(ref, examples)
    if not isinstance(example, torch.Tensor):
        raise ConfigError("description", str(ref), "must be a tensor")
    whole = building.numbers[NodeOutput(ref.node)]
    # The part is taken where the tuple is, because only single tensors can be sent.
    worker = building.steps[whole].layout.worker
    return building.add(ref, StepKind.FUNCTION, _Part(ref.path), worker, example, [ResultRef(whole)])


class _Part:
    """Takes a part out of the result of a function."""

    def __init__(self, path: tuple[int, ...]) -> None:
        self._path = path
        self.__name__ = f"part {'.'.join(map(str, path))}"

    def __call__(self, whole: Any) -> Any:
        return reduce(lambda nested, number: nested[number], self._path, whole)


def _at(ref: Any, examples: Mapping[object, Any]) -> Any:
    if isinstance(ref, ComputingDevice):
        return torch.device("cpu")
    if not isinstance(ref, NodeOutput):
        return examples[ref]
    found = examples[NodeOutput(ref.node)]
    for number in ref.path:
        if not isinstance(found, tuple | list) or number >= len(found):
            raise ConfigError("description", None, f"has no part {number} of the result of node {ref.node}")
        found = found[number]
    return found


def _loss(building: _Building, output: Any, examples: Mapping[object, Any]) -> ResultRef:
    """Return a reference to the loss. Raises ConfigError if there is none."""
    example = _at(output, examples) if isinstance(output, NodeOutput | CallInput | StateRef) else None
    if not isinstance(example, torch.Tensor) or example.numel() != 1 or not example.requires_grad:
        accepted = "must return the loss, a tensor with one element that depends on a parameter"
        raise ConfigError("model.forward", None, accepted)
    # All workers get the loss, since all run the backward.
    return building.ref(_step_of(building, output, examples), _WHOLE)


def _empty(form: Described, most: int) -> torch.Tensor:
    if form.nbytes > most:
        raise ConfigError("description", form.sizes, f"is larger than the limit of this worker, {most:,} bytes")
    return torch.empty(form.sizes, dtype=torch_dtype(form.dtype))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
