"""Combinations of fields that are refused: the job's own, and those of packages.

A package that is optional keeps the combinations that it excludes in a module of its own. The root of topotrain, which
alone may name all packages, lists these modules, and the fields of each package. If a package is deleted, its fields
must have their defaults.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True, slots=True)
class Combination:
    """Fields of one block that exclude each other.

    field: the path of the field that the error names. refused: whether a block has the combination, looking at that
    block and those inside it. accepted: the accepted values. inside: the path of that block; None: the field's own.
    """

    field: str
    refused: Callable[[Any], object]
    accepted: str
    inside: str | None = None

    @property
    def block(self) -> str:
        """The path of the block that is checked."""
        return self.field.rpartition(".")[0] if self.inside is None else self.inside


_MODULES: list[str] = []
_FIELDS: dict[str, tuple[str, ...]] = {}


def contribute(*modules: str) -> None:
    """Name modules with `COMBINATIONS`, before the first job is checked."""
    # Names and not imports: `import topotrain` must stay cheap, and the modules import `job`.
    _MODULES.extend(modules)


def need(package: str, *paths: str) -> None:
    """Name fields that need a package, before the first job is checked.

    paths: of fields, or of values of them, such as "cluster.agreement: kGossip".
    """
    _FIELDS[package] = paths


@cache
def contributed() -> tuple[Combination, ...]:
    """Return the combinations of all packages, and a row per field of a missing one."""
    rows = [row for name in _MODULES if _exists(name) for row in import_module(name).COMBINATIONS]
    for package, paths in _FIELDS.items():
        if not _exists(package):
            accepted = f"needs {package}, which this installation does not have"
            rows += [_missing(path, accepted) for path in paths]
    return tuple(rows)


def _exists(module: str) -> bool:
    # In this order: to look for a module imports its package, and raises if that is missing.
    return bool(find_spec(module.rpartition(".")[0]) and find_spec(module))


def _missing(path: str, accepted: str) -> Combination:
    field, _, value = path.partition(": ")
    name = field.rpartition(".")[2]
    return Combination(field, partial(_has, name, value) if value else partial(_differs, name), accepted)


def _has(name: str, value: str, block: Any) -> bool:
    return bool(getattr(block, name) == value)


def _differs(name: str, block: Any) -> bool:
    """Return whether a field of a block does not have its default."""
    # Compared with the declared default, because the block itself has no record of what was given.
    (found,) = (field for field in fields(block) if field.name == name)
    return bool(getattr(block, name) != found.default)


@cache
def contributed_to(block: str) -> Sequence[Combination]:
    """Return the combinations of packages that the blocks of this path refuse."""
    return tuple(row for row in contributed() if row.block == block)
