"""Check settings: the error, rules for single values, and checks of whole blocks.

This module knows no field: `job.py` assigns the rules.
"""

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, ClassVar, cast, get_args, get_origin

from topotrain.config.combinations import Combination, contributed_to

# The types of numbers in job.proto: a larger one would pass here and fail in `dumps`.
INT32 = 2**31 - 1
INT64 = 2**63 - 1


class ConfigError(ValueError):
    """An invalid setting: path of the field, value (or None), accepted values, place."""

    def __init__(self, field: str, value: object, accepted: str, where: str = "") -> None:
        # All arguments, so that a copy or a pickle (another process) can be made again from `args`.
        super().__init__(field, value, accepted, where)
        self.field = field
        self.value = value
        self.accepted = accepted
        self.where = where

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        name = self.field if self.value is None else f"{self.field} = {_shown(self.value)}"
        return f"{place}{name}: {self.accepted}" if name else f"{place}{self.accepted}"

    def renamed(self, field: str) -> "ConfigError":
        """Return the same error with another path of the field."""
        return ConfigError(field, self.value, self.accepted, self.where)

    def at(self, where: str) -> "ConfigError":
        """Return the same error with a place such as "job.conf:3:5"."""
        return ConfigError(self.field, self.value, self.accepted, where)


def _shown(value: object) -> str:
    # As a job file has it.
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple) and value and all(map(is_dataclass, value)):
        return " ".join(map(_shown, value))
    if is_dataclass(value) and not isinstance(value, type):
        given = [f"{f.name}: {_shown(v)}" for f in fields(value) if (v := getattr(value, f.name)) != f.default]
        return " ".join(["{", *given, "}"])
    return repr(value)


Rule = Callable[[str, Any], Any]  # (path, value) -> the value to keep; raises ConfigError


def whole(least: int, most: int = INT32) -> Rule:
    """Return the rule for a whole number within these bounds, both included."""
    accepted = f"must be a whole number >= {least}" if most >= INT32 else f"must be a whole number, {least} to {most}"

    def check(path: str, value: Any) -> int:
        # bool is a subclass of int, and `true` is no number.
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(path, value, accepted)
        return value

    return check


def whole_or_zero(least: int, most: int) -> Rule:
    """Return the rule for 0, or a whole number within these bounds."""

    def check(path: str, value: Any) -> int:
        # False and 0.0 equal 0, but are not whole numbers.
        if value != 0 or isinstance(value, bool | float):
            with_bounds = whole(least, most)
            try:
                return int(with_bounds(path, value))
            except ConfigError:
                raise ConfigError(path, value, f"must be 0, or a whole number, {least} to {most}") from None
        return 0

    return check


def number(
    accepted: str,
    least: float = -math.inf,
    most: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> Rule:
    """Return the rule for a finite number within these bounds.

    `least` and `most` are included, `above` and `below` are not. accepted: the condition in words.
    """

    def check(path: str, value: Any) -> float:
        # A whole number may be too large for a float.
        right = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        if not right or not (least <= value <= most and above < value < below):
            raise ConfigError(path, value, f"must be {accepted}")
        return float(value)

    return check


def one_of(kind: type[Enum]) -> Rule:
    """Return the rule for a member of an enum, or its name."""
    names = ", ".join(str(member.value) for member in kind)

    def check(path: str, value: Any) -> Enum:
        try:
            # The names are the values of the enum, so this takes both.
            return kind(value)
        except ValueError:
            raise ConfigError(path, value, f"must be one of {names}") from None

    return check


def _instance(kind: type) -> Rule:
    accepted = {bool: "true or false", str: "a text"}.get(kind, f"a {kind.__name__}")

    def check(path: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise ConfigError(path, value, f"must be {accepted}")
        return value

    return check


def _many(rule: Rule) -> Rule:
    def check(path: str, value: Any) -> tuple[Any, ...]:
        # A text is a sequence, too, of its characters.
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ConfigError(path, value, "must be a list")
        return tuple(rule(f"{path}[{index}]", item) for index, item in enumerate(value))

    return check


def pattern(path: str, value: Any) -> str:
    """Check a regular expression."""
    try:
        re.compile(value)
    except (re.error, TypeError) as error:
        raise ConfigError(path, value, f"must be a regular expression ({error})") from None
    return str(value)


def filled(path: str, value: Any) -> str:
    """Check a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigError(path, value, "must be a text that is not empty")
    return value


# Cached: every job and every block of it asks for the rules of all fields.
@cache
def rule_of(kind: Any) -> Rule:
    """Return the check of a field's type: that of Annotated, or of the type itself."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return cast(Rule, inner[1])
    if origin is tuple:
        return _many(rule_of(inner[0]))
    if type(None) in inner:
        # `X | None`: None means that the field is not given.
        rule = rule_of(inner[0])
        return lambda path, value: None if value is None else rule(path, value)
    return one_of(kind) if issubclass(kind, Enum) else _instance(kind)


class Checked:
    """A block that checks its fields, and then their combinations."""

    # Without it the slots of subclasses would be of no use.
    __slots__ = ()
    PATH: ClassVar[str]
    TABLE: ClassVar[Sequence[Combination]] = ()

    def __post_init__(self) -> None:
        prefix = self.PATH + "." if self.PATH else ""
        for f in fields(self):  # type: ignore[arg-type]
            kind: Any = f.type
            # The dataclass is frozen. A rule may turn a list into a tuple, and a name into an enum.
            object.__setattr__(self, f.name, rule_of(kind)(prefix + f.name.rstrip("_"), getattr(self, f.name)))
        # After the fields: a combination may compare their values. Those of packages come first: they name the setting
        # that rules a field out, and those of the job say what else the field would need.
        for row in (*contributed_to(self.PATH), *self.TABLE):
            if row.refused(self):
                raise ConfigError(row.field, attrgetter(row.field.removeprefix(prefix))(self), row.accepted)
