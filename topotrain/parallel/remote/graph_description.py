"""A model's forward as plain data: functions, numbers and workers.

Another process can run it. Data from another process is validated as if it were hostile. It is JSON. Every node names a
function of `allowed_functions`, every reference points backward, and sizes and depths have bounds. Nothing is
unpickled, imported or evaluated.

    {"inputs": [["float32", [8, 4]], …], "nodes": [[function, worker, args, kwargs, graded, line], …], "output": …}
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from topotrain.config.sharding import ITEM_BYTES
from topotrain.parallel.remote.allowed_functions import FUNCTIONS
from topotrain.parallel.remote.argument_codec import (
    MAX_TEXT,
    ReferenceBounds,
    decode,
    encode,
    fields_of,
    natural,
    refuse,
)

MAX_NODES = 100_000
MAX_STATES = 100_000
MAX_ELEMENTS = 1 << 40
_MAX_DIMS = 16


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A tensor's dtype (torch's name without "torch.") and sizes."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.sizes) * ITEM_BYTES[self.dtype]

    @staticmethod
    def of(tensor: torch.Tensor) -> "TensorForm":
        """Return the form of a tensor."""
        return TensorForm(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    def to_data(self) -> list[Any]:
        """Return the JSON form."""
        return [self.dtype, list(self.sizes)]

    @staticmethod
    def from_data(data: Any) -> "TensorForm":
        """Read the JSON form. Raises ConfigError for a field that is not valid."""
        dtype, sizes = fields_of(data, 2, "a tensor")
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            refuse("dtype", dtype, f"must be one of {', '.join(sorted(ITEM_BYTES))}")
        if not isinstance(sizes, list) or len(sizes) > _MAX_DIMS or not all(natural(s, MAX_ELEMENTS) for s in sizes):
            refuse("sizes", sizes, f"must be at most {_MAX_DIMS} whole numbers >= 0")
        # A size of 0 must not hide huge other sizes.
        if math.prod(max(1, size) for size in sizes) > MAX_ELEMENTS:
            refuse("sizes", sizes, f"must be at most {MAX_ELEMENTS} elements")
        return TensorForm(dtype, tuple(sizes))


@dataclass(frozen=True, slots=True)
class StateDescription:
    """A parameter, buffer or constant, and the worker that holds it.

    Attributes:
        graded: whether a parameter is trained; None for a buffer or constant.
        home: the server that stores it, or -1 for any.
    """

    form: TensorForm
    worker: int
    graded: bool | None = None
    home: int = -1

    def to_data(self) -> list[Any]:
        """Return the JSON form."""
        return [self.form.to_data(), self.worker, self.graded, self.home]

    @staticmethod
    def from_data(data: Any, workers: int, servers: int) -> "StateDescription":
        """Read the JSON form. Raises ConfigError for a field that is not valid."""
        form, worker, graded, home = fields_of(data, 4, "a state")
        if not natural(worker, workers - 1):
            refuse("worker", worker, f"must be 0 to {workers - 1}")
        if graded is not None and not isinstance(graded, bool):
            refuse("graded", graded, "must be true, false or null")
        if type(home) is not int or not -1 <= home < servers:
            refuse("home", home, f"must be -1 to {servers - 1}")
        return StateDescription(TensorForm.from_data(form), worker, graded, home)


def states_from(data: Any, workers: int, servers: int) -> tuple[StateDescription, ...]:
    """Read the JSON form of all states. Raises ConfigError if one is not valid."""
    if not isinstance(data, list) or len(data) > MAX_STATES:
        refuse("states", None, f"must be at most {MAX_STATES}")
    return tuple(StateDescription.from_data(item, workers, servers) for item in data)


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One call of a function.

    `args` and `kwargs` are nested and hold NodeOutput, CallInput and StateRef.

    Attributes:
        graded: computed outside `torch.no_grad()`.
        line: "file:line" of the user's code.
    """

    function: str
    worker: int
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    graded: bool = True
    line: str = ""


@dataclass(frozen=True, slots=True)
class GraphDescription:
    """A forward for arguments of these forms. `output` is nested as arguments are."""

    inputs: tuple[TensorForm, ...]
    nodes: tuple[GraphNode, ...]
    output: Any

    def to_data(self) -> dict[str, Any]:
        """Return a form for `json.dumps`."""
        return {
            "inputs": [form.to_data() for form in self.inputs],
            "nodes": [
                [n.function, n.worker, encode(list(n.args)), {k: encode(v) for k, v in n.kwargs}, n.graded, n.line]
                for n in self.nodes
            ],
            "output": encode(self.output),
        }

    @staticmethod
    def from_data(data: Any, workers: int, states: int) -> "GraphDescription":
        """Read a description from another process.

        Args:
            workers: workers of the cluster.
            states: the number of states.

        Raises:
            ConfigError: a field is not valid, or a function is not allowed. The error names the function.
        """
        if not isinstance(data, dict) or data.keys() != {"inputs", "nodes", "output"}:
            refuse("description", None, "must have inputs, nodes and output")
        inputs, nodes = data["inputs"], data["nodes"]
        if not isinstance(inputs, list) or not isinstance(nodes, list) or max(len(inputs), len(nodes)) > MAX_NODES:
            refuse("description", None, f"must have lists of at most {MAX_NODES} inputs and nodes")
        forms = tuple(map(TensorForm.from_data, inputs))
        read = []
        for number, node in enumerate(nodes):
            # References point backward only, so the nodes can be run in order and contain no cycle.
            read.append(_node(node, workers, ReferenceBounds(number, len(forms), states)))
        return GraphDescription(
            forms, tuple(read), decode(data["output"], ReferenceBounds(len(nodes), len(forms), states))
        )


def _node(data: Any, workers: int, bounds: ReferenceBounds) -> GraphNode:
    function, worker, args, kwargs, graded, line = fields_of(data, 6, "a node")
    if not isinstance(function, str) or function not in FUNCTIONS:
        refuse("function", str(function)[:MAX_TEXT], "is not a function that a session may call")
    if not natural(worker, workers - 1):
        refuse("worker", worker, f"must be 0 to {workers - 1}")
    if not isinstance(args, list) or not isinstance(kwargs, dict) or not isinstance(graded, bool):
        refuse(function, None, "must have a list of arguments, named ones, and true or false")
    if not isinstance(line, str) or len(line) > MAX_TEXT:
        refuse(function, None, "must have a line")
    named = tuple((name, decode(value, bounds)) for name, value in kwargs.items())
    return GraphNode(function, worker, tuple(decode(args, bounds)), named, graded, line)
