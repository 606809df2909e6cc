"""Blocks of a JSON file as dataclasses, with the type of each field checked."""

import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, cast, get_args, get_origin

from topotrain.config.field_checks import ConfigError

_MOST_WHOLE = 2**63 - 1
_MOST_DIGITS = 9

T = TypeVar("T")


def block(path: str, kind: type[T], data: object) -> T:
    """Return a block of a file.

    Raises ConfigError for a field that is missing or has another type.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(path, None, "must be a block with fields")
    values = {}
    for field in fields(cast(Any, kind)):
        name = f"{path}.{field.name}" if path else field.name
        if field.name not in data:
            raise ConfigError(name, None, "is missing")
        values[field.name] = _value(name, field.type, data[field.name])
    return kind(**values)


def _value(path: str, kind: Any, data: object) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple:
        if not isinstance(data, list):
            raise ConfigError(path, None, "must be a list")
        return tuple(_value(f"{path}[{at}]", inner[0], item) for at, item in enumerate(data))
    if origin is dict:
        if not isinstance(data, Mapping):
            raise ConfigError(path, None, "must be a block with fields")
        found: dict[Any, Any] = {}
        for name, item in data.items():
            key = _key(path, inner[0], name)
            if key in found:
                raise ConfigError(path, name, "must not be given twice")
            found[key] = _value(f"{path}.{name}", inner[1], item)
        return found
    if kind is float:
        return _number(path, data)
    if kind is int:
        if not isinstance(data, int) or isinstance(data, bool) or not 0 <= data <= _MOST_WHOLE:
            raise ConfigError(path, data, f"must be a whole number, 0 to {_MOST_WHOLE}")
        return data
    if kind in (str, bool):
        if not isinstance(data, kind):
            raise ConfigError(path, data, "must be a text" if kind is str else "must be true or false")
        return data
    return block(path, kind, data)


def _number(path: str, data: object) -> float:
    # Of whole numbers JSON has any length, and a float has not.
    right = isinstance(data, int | float) and not isinstance(data, bool) and 0 <= data <= sys.float_info.max
    if not right:
        raise ConfigError(path, data, "must be a number >= 0")
    return float(cast(float, data))


def _key(path: str, kind: type, key: str) -> Any:
    # JSON has names only, and the number of processes is one.
    if kind is str:
        return key
    if not key.isdecimal() or len(key) > _MOST_DIGITS or int(key) < 1:
        raise ConfigError(path, key, "must be numbers of processes >= 1")
    return int(key)
