"""Serialize `state_dict`s as JSON and tensors, without pickle.

Numbers, texts, lists, tuples, dicts, counters and tensors come back with their types. No stored type names code.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from topotrain.config.job import ConfigError

_PLAIN = (bool, int, float, str)
_KINDS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_MAKERS: Mapping[str, Callable[[list[Any]], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda p: Counter(dict(p)),
}
# Far below Python's recursion limit, for states that contain themselves as well.
_DEPTH = 32


class UnserializableState(Exception):
    """A state has a value of a type that cannot be stored."""


def pack(value: Any, tensors: dict[str, torch.Tensor], depth: int = 0) -> Any:
    """Return a value for JSON. Its tensors go to `tensors`, as copies on the CPU.

    Raises UnserializableState for a part that cannot be stored.
    """
    # By exact type: a subclass would come back as its base.
    if value is None or type(value) in _PLAIN:
        return value
    if depth > _DEPTH:
        raise UnserializableState("it is nested too deeply")
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta:
            raise UnserializableState(f"a {value.layout} tensor on {value.device}")
        name = f"t{len(tensors)}"
        # A copy: the state is sent later, while training goes on.
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if type(value) in (list, tuple):
        return {type(value).__name__: [pack(item, tensors, depth + 1) for item in value]}
    if type(value) in _KINDS:
        # Pairs and not an object, because JSON has only texts as keys.
        pairs = [[pack(k, tensors, depth + 1), pack(v, tensors, depth + 1)] for k, v in value.items()]
        return {_KINDS[type(value)]: pairs}
    raise UnserializableState(f"a {type(value).__name__}")


def unpack(packed: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value that `pack` has stored. Raises ConfigError for anything else."""
    try:
        return _unpacked(packed, tensors, 0)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError("a packed state", repr(packed)[:80], f"must be as it was packed: {error}") from None


def _unpacked(packed: Any, tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
    if packed is None or type(packed) in _PLAIN:
        return packed
    if depth > _DEPTH:
        raise ValueError("it is nested too deeply")
    # Each packed container is an object with one key, so nothing else is accepted.
    ((kind, inside),) = packed.items()
    if kind == "tensor":
        # The same state may be restored twice (`PreviousRun.restores`), and a scheduler keeps what it loads.
        return tensors[inside].clone()
    if kind in ("list", "tuple"):
        items = [_unpacked(item, tensors, depth + 1) for item in inside]
        return items if kind == "list" else tuple(items)
    pairs = [(_unpacked(k, tensors, depth + 1), _unpacked(v, tensors, depth + 1)) for k, v in inside]
    return _MAKERS[kind](pairs)
