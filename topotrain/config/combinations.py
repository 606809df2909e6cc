"""Combinations of fields that are refused: the job's own, and those of packages.

A package keeps the combinations that it excludes in a module of its own. The root of topotrain, which alone may name
all packages, lists these modules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
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
    """Name modules with `COMBINATIONS`, before the first job is checked."""
    # Names and not imports: `import topotrain` must stay cheap, and the modules import `job`.
    _MODULES.extend(modules)


@cache
def contributed() -> tuple[Combination, ...]:
    """Return the combinations of all packages."""
    return tuple(row for name in _MODULES for row in import_module(name).COMBINATIONS)


@cache
def contributed_to(block: str) -> Sequence[Combination]:
    """Return the combinations of packages that the blocks of this path refuse."""
    return tuple(row for row in contributed() if row.block == block)
