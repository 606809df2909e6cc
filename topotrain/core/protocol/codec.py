"""Codec of messages: from a message to bytes and back.

Nothing is pickled, and no length read from a peer reaches an allocator. The typed fields of a message ("meta") are
packed with `struct`: first all fixed fields, then the variable ones, each with a length that is checked against the
bytes received. The tensor of a message, its `body`, is not part of the meta. A transport receives it into a buffer that
the receiver already owns, or passes a view of the sender's memory.

A body is a *view of a buffer* unless the class says "Snapshot". The docstring of each class says how long its view
stays valid.
"""

import struct
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from topotrain.core.message_limits import MAX_BODY as MAX_BODY
from topotrain.core.message_limits import MAX_META as MAX_META
from topotrain.core.message_limits import ProtocolError as ProtocolError
from topotrain.core.protocol.message import KINDS, Message, kind_of

if TYPE_CHECKING:
    import torch

_LARGE, _LARGEST = 32 * 1024, 1 << 22
"""Larger bytes of a field are deflated, such as the settings of hundreds of parameter groups, which repeat their names.
More than the second number is refused."""
_NO_BYTES = bytes(4)
_NOTHING: dict[str, Any] = {"bytes": b"", "ints": (), "text": ""}
_DEFLATED = 1 << 31
"""Bit of the length of bytes that are deflated."""
MAX_TEXT = 48 * 1024  # less than MAX_META, which leaves space for the other fields of a message


@dataclass(frozen=True, slots=True)
class _Codec:
    fixed: struct.Struct
    fixed_values: Callable[[Message], tuple[Any, ...]]
    variable: tuple[tuple[str, str], ...]
    names: tuple[str, ...]
    """Of the fixed and then of the variable fields."""
    in_order: bool
    """Whether the class has its fixed fields first, so that it can be made without names."""

    def without(self, left_out: Collection[str]) -> "_Codec":
        """Return the layout as of a class without these fields."""
        codes = {n: c for n, c in zip(self.names, self.fixed.format[1:], strict=False) if n not in left_out}
        variable = tuple(each for each in self.variable if each[0] not in left_out)
        fixed = struct.Struct("<" + "".join(codes.values()))
        return replace(self, fixed=fixed, fixed_values=_values_of([*codes]), variable=variable)


_CODECS: dict[type[Message], _Codec] = {}
_FIXED_CODES = {int: "q", float: "d", bool: "?"}


def _layout(cls: type[Message]) -> _Codec:
    """Make the layout of a registered message class."""
    if KINDS.get(cls.KIND) is not cls:
        raise ProtocolError(f"{cls.__name__} is not a registered message")
    fixed, names, variable = "<", [], []
    for f in fields(cls):
        if f.name == "body":
            continue
        if isinstance(f.type, type) and f.type in _FIXED_CODES:
            fixed += _FIXED_CODES[f.type]
            names.append(f.name)
        elif f.type in (str, bytes):
            variable.append((f.name, "text" if f.type is str else "bytes"))
        else:
            variable.append((f.name, "ints"))
    whole = (*names, *(name for name, _ in variable))
    declared = [f for f in fields(cls) if f.name != "body"]
    in_order = tuple(f.name for f in declared) == whole and not any(f.kw_only for f in declared)
    # All fixed fields are one `struct` call. Both sides compute the layout from the class, so its order is the format.
    _CODECS[cls] = _Codec(struct.Struct(fixed), _values_of(names), tuple(variable), whole, in_order)
    return _CODECS[cls]


def _values_of(names: list[str]) -> Callable[[Message], tuple[Any, ...]]:
    """Return a function that reads these attributes in one call."""
    # A message is sent every few microseconds. `attrgetter` of a single name returns no tuple.
    if len(names) < 2:
        return lambda message: tuple(getattr(message, name) for name in names)
    return attrgetter(*names)


_U32 = struct.Struct("<I")


def encode(message: Message, left_out: Collection[str] = ()) -> tuple[int, bytes]:
    """Return type number and meta bytes. Raises ProtocolError for more than MAX_META.

    left_out: fields that the class is taken not to have.
    """
    # Layouts are made at the first use, because extensions register messages when they are imported.
    codec = _CODECS.get(type(message)) or _layout(type(message))
    if left_out:
        codec = codec.without(left_out)
    parts = [codec.fixed.pack(*codec.fixed_values(message))]
    for name, how in codec.variable:
        value = getattr(message, name)
        # Most are empty in most messages.
        if not value:
            parts.append(_NO_BYTES)
            continue
        mark = 0
        if how == "bytes":
            raw = value
            if len(value) > _LARGE:
                raw, mark = zlib.compress(value, 1), _DEFLATED
        elif how == "ints":
            raw = struct.pack(f"<{len(value)}q", *value)
        else:
            raw = value.encode()
        parts.append(_U32.pack(len(raw) | mark))
        parts.append(raw)
    meta = b"".join(parts)
    if len(meta) > MAX_META:
        raise ProtocolError(f"{type(message).__name__} has {len(meta)} bytes of fields, the limit is {MAX_META}")
    return message.KIND, meta


def decode(kind: int, meta: bytes, body: "torch.Tensor | None" = None) -> Message:
    """Return the message of a type number and its meta.

    Raises:
        ProtocolError: the type is unknown, or the bytes are not exactly such a message.
    """
    cls = kind_of(kind)
    codec = _CODECS.get(cls) or _layout(cls)
    if len(meta) < codec.fixed.size:
        raise ProtocolError(f"{cls.__name__}: {len(meta)} bytes of fields, too few")
    values, at = list(codec.fixed.unpack_from(meta)), codec.fixed.size
    for _, how in codec.variable:
        value, at = _variable(cls, how, meta, at)
        values.append(value)
    # Trailing bytes would hide a peer of another version.
    if at != len(meta):
        raise ProtocolError(f"{cls.__name__}: {len(meta) - at} bytes too many")
    if codec.in_order:
        return cls(*values, body=body)
    return cls(**dict(zip(codec.names, values, strict=True)), body=body)


def _variable(cls: type[Message], how: str, meta: bytes, at: int) -> tuple[Any, int]:
    if at + 4 > len(meta):
        raise ProtocolError(f"{cls.__name__}: cut short")
    (length,) = _U32.unpack_from(meta, at)
    if not length:
        return _NOTHING[how], at + 4
    deflated = length & _DEFLATED if how == "bytes" else 0
    length -= deflated
    start, end = at + 4, at + 4 + length
    # Before the slice: a length that a peer claims must not be used.
    if end > len(meta):
        raise ProtocolError(f"{cls.__name__}: cut short")
    raw = bytes(meta[start:end])
    if how == "bytes":
        return _inflated(cls, raw) if deflated else raw, end
    if how == "ints":
        if length % 8:
            raise ProtocolError(f"{cls.__name__}: a list of integers of {length} bytes")
        return struct.unpack(f"<{length // 8}q", raw), end
    try:
        return raw.decode(), end
    except UnicodeDecodeError as error:
        raise ProtocolError(f"{cls.__name__}: text is not UTF-8") from error


def _inflated(cls: type[Message], raw: bytes) -> bytes:
    stream = zlib.decompressobj()
    try:
        value = stream.decompress(raw, _LARGEST)
    except zlib.error as error:
        raise ProtocolError(f"{cls.__name__}: bytes that are not deflated: {error}") from None
    if not stream.eof or stream.unused_data or len(value) <= _LARGE:
        raise ProtocolError(f"{cls.__name__}: deflated bytes that are cut short, too many or too few")
    return value
