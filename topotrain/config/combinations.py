"""Combinations of fields that are refused: the job's own, and those of packages.

A package that is optional keeps the combinations that it excludes in a module of its own. The root of topotrain, which
alone may name all packages, lists these modules. They are imported when the first job is checked. If a package is
deleted, its combinations are gone with it, and the other ones still count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
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


def contribute(*modules: str) -> None:
    """Name modules of packages that have combinations in `COMBINATIONS`.

    This must happen before the first job is checked.
    """
    _MODULES.extend(modules)


@cache
def contributed() -> tuple[Combination, ...]:
    """Return the combinations of all packages that are there."""
    # In this order: to look for a module imports its package.
    there = [name for name in _MODULES if find_spec(name.rpartition(".")[0]) and find_spec(name)]
    return tuple(row for name in there for row in import_module(name).COMBINATIONS)


@cache
def contributed_to(block: str) -> Sequence[Combination]:
    """Return the combinations of packages that the blocks of this path refuse."""
    return tuple(row for row in contributed() if row.block == block)
