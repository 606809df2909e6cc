"""Codec of the state of a server: plain data to bytes and back.

`core.server.component_state` defines which data a state holds. The bytes are a length, a JSON text, and the tensors. No
class is named in them. A tensor that is a view of one of the server's buffers is written as a range, and the content of
the range is written once (`buffer_views`).
"""

import json
import struct
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import astuple
from itertools import accumulate
from typing import Any

import torch

from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.model.schema import FlatBuffers, torch_dtype
from topotrain.extensions.replication.buffer_views import BufferRange, BufferViews

# Views of any dtype need an aligned start.
_ALIGN = 64
_LENGTH = struct.Struct("<Q")
_LETTERS: Mapping[type, str] = {tuple: "t", list: "l", set: "s", frozenset: "f", deque: "q"}
_MADE: Mapping[str, Callable[[list[Any]], Any]] = {"t": tuple, "l": list, "s": set, "f": frozenset, "q": deque}


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


class StateWriter:
    """Turns plain data into JSON, and collects the tensors in it.

    Args:
        buffers: the server's buffers, if it has any.
    """

    def __init__(self, buffers: FlatBuffers | None) -> None:
        self._tensors: list[torch.Tensor] = []
        self._views = None if buffers is None else BufferViews(buffers)

    def write(self, value: Any) -> Any:
        """Return a value as JSON. Raises TypeError if a state does not hold such a value."""
        # The exact type: an Address is a tuple, too, and must come back as an Address.
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is bytes:
            return {"b": value.hex()}
        if kind is Address:
            return {"a": list(map(int, value))}
        if kind is dict:
            # Keys are written as values, since JSON has only strings as keys.
            return {"d": [[self.write(key), self.write(item)] for key, item in value.items()]}
        if kind in _LETTERS:
            return {_LETTERS[kind]: [self.write(item) for item in value]}
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, m.Message):
            number, meta = m.encode(value)
            return {"m": [number, meta.hex(), self.write(value.body)]}
        raise TypeError(f"a state holds a {kind.__name__}, which is not plain data")

    def _tensor(self, value: torch.Tensor) -> Any:
        where = None if self._views is None else self._views.find(value)
        return self._own(value) if where is None else {"v": list(astuple(where))}

    def _own(self, value: torch.Tensor) -> Any:
        self._tensors.append(value.detach())
        return {"x": [len(self._tensors) - 1, str(value.dtype).removeprefix("torch."), list(value.shape)]}

    def bytes(self, **trees: Any) -> torch.Tensor:
        """Return the results of `write`, and the ranges and tensors in them, as 1-D uint8."""
        # The ranges are added to the tensors here, so the sizes are taken after them.
        found = [] if self._views is None else self._views.wanted()
        ranges = [[list(astuple(where)), self._own(part)] for where, part in found]
        sizes = [_padded(tensor.nbytes) for tensor in self._tensors]
        text = json.dumps({**trees, "ranges": ranges, "sizes": sizes}, separators=(",", ":")).encode()
        start = _padded(_LENGTH.size + len(text))
        whole = torch.zeros(start + sum(sizes), dtype=torch.uint8)
        head = _LENGTH.pack(len(text)) + text
        whole[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        for tensor, size in zip(self._tensors, sizes, strict=True):
            whole[start : start + tensor.nbytes] = tensor.contiguous().reshape(-1).view(torch.uint8)
            start += size
        return whole


class StateReader:
    """The inverse of `StateWriter`.

    All methods raise the errors that malformed bytes cause, such as ValueError or KeyError.

    Args:
        data: the bytes.
    """

    def __init__(self, data: torch.Tensor) -> None:
        (length,) = _LENGTH.unpack(bytes(data[: _LENGTH.size].tolist()))
        text = data[_LENGTH.size : _LENGTH.size + length].numpy().tobytes().decode()
        self.trees: dict[str, Any] = json.loads(text)
        self._data = data[_padded(_LENGTH.size + length) :]
        self._starts = list(accumulate(self.trees["sizes"], initial=0))
        self._buffers: FlatBuffers | None = None

    def fill(self, buffers: FlatBuffers | None) -> None:
        """Copy the ranges into the buffers of a new server, of which views are made."""
        self._buffers = buffers
        for where, part in self.trees["ranges"]:
            self._view(where).copy_(self._tensor(*part["x"]))

    def read(self, tree: Any) -> Any:
        """Return the value of the result of `StateWriter.write`."""
        if not isinstance(tree, dict):
            return tree
        ((letter, content),) = tree.items()
        if letter == "d":
            return {self.read(key): self.read(item) for key, item in content}
        if letter in _MADE:
            return _MADE[letter]([self.read(item) for item in content])
        if letter == "b":
            return bytes.fromhex(content)
        if letter == "a":
            return Address(Role(content[0]), content[1], content[2])
        if letter == "m":
            return m.decode(content[0], bytes.fromhex(content[1]), self.read(content[2]))
        if letter == "v":
            return self._view(content)
        if letter == "x":
            # A copy, because the transferred bytes are freed.
            return self._tensor(*content).clone()
        raise ValueError(f"{letter!r} is not a kind of value")

    def _view(self, where: list[Any]) -> torch.Tensor:
        if self._buffers is None:
            raise ValueError("a view of a buffer in the state of a server without a model")
        return BufferRange(*where).of(self._buffers)

    def _tensor(self, index: int, dtype: str, shape: list[int]) -> torch.Tensor:
        """Return a view of the data."""
        kind = torch_dtype(dtype)
        start, nbytes = self._starts[index], torch.Size(shape).numel() * kind.itemsize
        return self._data[start : start + nbytes].view(kind).reshape(shape)
