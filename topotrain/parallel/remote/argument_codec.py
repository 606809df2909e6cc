"""Arguments of a graph description as JSON: numbers, texts and references.

Input is validated as if a hostile process had written it. A list is a list. Anything else without a form in JSON is
{kind: value}: {"value": [3, []]} is the result of node 3 and {"value": [3, [1]]} its second part, {"input": 0} an
argument of the call, {"stated": 2} a parameter.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from topotrain.config.field_checks import ConfigError
from topotrain.config.sharding import ITEM_BYTES
from topotrain.core.model.schema import torch_dtype

MAX_PATH = 100_000
MAX_TEXT = 4096
_MAX_DEPTH = 12
_INT64 = 1 << 63
# Only these names are looked up in torch.
_FORMATS = {
    "memory_format": {"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"},
    "layout": {"strided"},
}


@dataclass(frozen=True, slots=True)
class NodeOutput:
    """The result of node `node`, or the part of it at the end of `path`."""

    node: int
    path: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CallInput:
    """The argument of the call with this number."""

    number: int


@dataclass(frozen=True, slots=True)
class StateRef:
    """The state with this number."""

    number: int


_KINDS: Mapping[type, str] = {CallInput: "input", StateRef: "stated"}


class ComputingDevice:
    """Stands for the device of the worker that computes."""


REFERENCES = (NodeOutput, CallInput, StateRef)
"""Kinds of leaves, for `worker_program.references` and `worker_program.replaced`."""


@dataclass(frozen=True, slots=True)
class ReferenceBounds:
    """The numbers of nodes, inputs and states that references may use."""

    nodes: int
    inputs: int
    states: int


def encode(value: Any) -> Any:
    """Return an argument in its JSON form. Raises TypeError if it has none."""
    if isinstance(value, NodeOutput):
        return {"value": [value.node, list(value.path)]}
    if isinstance(value, CallInput | StateRef):
        return {_KINDS[type(value)]: value.number}
    if isinstance(value, ComputingDevice | torch.device):
        # The device of the script has no meaning on the worker that computes.
        return {"device": []}
    if value is Ellipsis:
        return {"ellipsis": []}
    # JSON has no numbers for these.
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, slice):
        return {"slice": [encode(part) for part in (value.start, value.stop, value.step)]}
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {"dict": {key: encode(item) for key, item in value.items()}}
    for kind in (torch.dtype, torch.memory_format, torch.layout):
        if isinstance(value, kind):
            return {kind.__name__: str(value).removeprefix("torch.")}
    raise TypeError(type(value).__name__)


def decode(data: Any, bounds: ReferenceBounds, depth: int = 0) -> Any:
    """Return the argument that `encode` has written. Raises ConfigError otherwise."""
    # Bounded before it recurses, since Python's stack is.
    if depth > _MAX_DEPTH:
        refuse("description", None, f"must be nested at most {_MAX_DEPTH} deep")
    # Exact types, because True is an int, too.
    if data is None or type(data) in (bool, float):
        return data
    if type(data) is int and -_INT64 <= data < _INT64:
        return data
    if type(data) is str and len(data) <= MAX_TEXT:
        return data
    if type(data) is list:
        return [decode(item, bounds, depth + 1) for item in data]
    if type(data) is not dict or len(data) != 1:
        refuse("argument", None, "must be a plain value, a list, or an object with one key")
    ((kind, inside),) = data.items()
    reader = _READERS.get(kind)
    if reader is None:
        refuse("argument", str(kind)[:80], "is not a kind of argument that a description may have")
    return reader(inside, bounds, depth + 1)


def _value(inside: Any, bounds: ReferenceBounds, depth: int) -> NodeOutput:
    node, path = fields_of(inside, 2, "a value")
    if not natural(node, bounds.nodes - 1) or not isinstance(path, list) or len(path) > _MAX_DEPTH:
        refuse("value", None, "must be the result of a node before")
    if not all(natural(step, MAX_PATH) for step in path):
        refuse("value", None, "must have a path of whole numbers")
    return NodeOutput(node, tuple(path))


def _numbered(kind: type[CallInput] | type[StateRef], field: str) -> Callable[[Any, ReferenceBounds, int], Any]:
    def read(inside: Any, bounds: ReferenceBounds, depth: int) -> Any:
        if not natural(inside, getattr(bounds, field) - 1):
            refuse(_KINDS[kind], inside, f"must be one of {getattr(bounds, field)}")
        return kind(inside)

    return read


def _of_torch(kind: str) -> Callable[[Any, ReferenceBounds, int], Any]:
    def read(inside: Any, bounds: ReferenceBounds, depth: int) -> Any:
        if not isinstance(inside, str) or inside not in _FORMATS[kind]:
            refuse(kind, str(inside)[:80], f"must be one of {', '.join(sorted(_FORMATS[kind]))}")
        return getattr(torch, inside)

    return read


def _tuple(inside: Any, bounds: ReferenceBounds, depth: int) -> tuple[Any, ...]:
    if not isinstance(inside, list):
        refuse("tuple", None, "must be a list")
    return tuple(decode(item, bounds, depth) for item in inside)


def _dict(inside: Any, bounds: ReferenceBounds, depth: int) -> dict[str, Any]:
    if not isinstance(inside, dict):
        refuse("dict", None, "must be an object")
    return {key: decode(item, bounds, depth) for key, item in inside.items()}


def _slice(inside: Any, bounds: ReferenceBounds, depth: int) -> slice:
    return slice(*(decode(part, bounds, depth) for part in fields_of(inside, 3, "a slice")))


def _float(inside: Any, bounds: ReferenceBounds, depth: int) -> float:
    if inside not in ("inf", "-inf", "nan"):
        refuse("float", None, "must be inf, -inf or nan")
    return float(inside)


def _dtype(inside: Any, bounds: ReferenceBounds, depth: int) -> torch.dtype:
    if not isinstance(inside, str) or inside not in ITEM_BYTES:
        refuse("dtype", str(inside)[:80], f"must be one of {', '.join(sorted(ITEM_BYTES))}")
    return torch_dtype(inside)


_READERS: dict[str, Callable[[Any, ReferenceBounds, int], Any]] = {
    "value": _value,
    "input": _numbered(CallInput, "inputs"),
    "stated": _numbered(StateRef, "states"),
    "device": lambda *_: ComputingDevice(),
    "ellipsis": lambda *_: ...,
    "float": _float,
    "slice": _slice,
    "tuple": _tuple,
    "dict": _dict,
    "dtype": _dtype,
    "memory_format": _of_torch("memory_format"),
    "layout": _of_torch("layout"),
}


def read_json(text: bytes) -> Any:
    """Parse JSON without NaN and infinities. Raises ConfigError for other text."""
    try:
        return json.loads(text, parse_constant=lambda name: refuse("description", name, "must be a finite number"))
    # The parser itself recurses into nested lists.
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("description", None, f"must be JSON: {error}") from None


def natural(value: Any, most: int) -> bool:
    """Return whether `value` is an integer from 0 to `most`."""
    return type(value) is int and 0 <= value <= most


def fields_of(data: Any, count: int, what: str) -> Sequence[Any]:
    """Return `data`, which must be a list of `count` items, else raise ConfigError."""
    if not isinstance(data, list) or len(data) != count:
        refuse("description", None, f"{what} must be a list of {count}")
    found: list[Any] = data
    return found


def refuse(field: str, value: object, accepted: str) -> NoReturn:
    raise ConfigError(field, value, accepted)
