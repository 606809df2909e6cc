"""Optimizer state of parameters as plain data, and the layout of its files.

This module does not import torch. A server reports the state that its optimizer holds at that moment, which is empty
before the first gradient. All servers of a parameter must report the same. Numbers (a step count) are in the table
itself, tensors in the file of the optimizer's state.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from topotrain.config.sharding import Parameter
from topotrain.core.model.safetensors_layout import NAMES, FlatFile, TensorDescription, lay_out

ELEMENTS, WHOLE, NUMBER = "elements", "whole", "number"
PLAIN = ("float", "int", "bool")
"""Types of numbers that are not tensors."""

_MOST_DIMENSIONS = 64  # torch's own limit
_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


class StateError(ValueError):
    """Reports of servers about optimizer state contradict each other or are not valid."""


@dataclass(frozen=True, slots=True)
class StateValue:
    """One entry of a parameter's state.

    - ELEMENTS: a tensor of the parameter's shape, of this dtype.
    - WHOLE: a tensor of another `shape`.
    - NUMBER: `value`, where `dtype` is that of a tensor without dimensions, or one of PLAIN.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...] = ()
    value: float | int = 0

    def as_data(self) -> list[Any]:
        """Return the JSON form."""
        return [self.kind, self.dtype, list(self.shape), self.value]


State = Mapping[str, StateValue]
Table = Mapping[int, State]
"""Index of a parameter -> its entries by name. Parameters without state are left out."""


def to_rows(table: Table) -> list[Any]:
    """Return the JSON form of a table."""
    # Parameters with equal state share a row, usually all of them: the manifest stays small for large models.
    by_state: dict[str, list[int]] = {}
    for index in sorted(table):
        data = {name: held.as_data() for name, held in table[index].items()}
        by_state.setdefault(_JSON.encode(data), []).append(index)
    return [[_runs(indices), json.loads(text)] for text, indices in by_state.items()]


def from_rows(rows: Any, parameters: Sequence[Parameter]) -> dict[int, State]:
    """Read the JSON form of a table. Raises StateError if `to_rows` did not write it."""
    if not isinstance(rows, list):
        raise StateError("the state of the optimizer must be a list of rows")
    table: dict[int, State] = {}
    for row in rows:
        if not (isinstance(row, list) and len(row) == 2 and isinstance(row[1], dict)):
            raise StateError(f"not a row of an optimizer's state: {str(row)[:80]}")
        state = {name: _held(name, data) for name, data in row[1].items()}
        for index in _indices(row[0], len(parameters)):
            if index in table:
                raise StateError(f"two rows about parameter {parameters[index].name}")
            table[index] = state
    return table


def merge(tables: Iterable[Table], parameters: Sequence[Parameter]) -> dict[int, State]:
    """Merge the tables of all servers.

    Raises:
        StateError: two servers report different state of a parameter of which both hold a part.
    """
    merged: dict[int, State] = {}
    for table in tables:
        for index, state in table.items():
            # A parameter that is cut over two servers is reported by both.
            if merged.setdefault(index, state) != state:
                name = parameters[index].name
                raise StateError(f"the servers hold different state of {name}: {merged[index]} and {state}")
    return merged


def model_file(parameters: Sequence[Parameter]) -> FlatFile:
    """Return the layout of the file of values. Raises ValueError as `lay_out`."""
    tied = {p.name: list(p.aliases) for p in parameters if p.aliases}
    told = (TensorDescription(p.name, p.dtype, p.shape, p.stride) for p in parameters)
    return lay_out(told, {"format": "pt", "tied": json.dumps(tied)})


def state_file(parameters: Sequence[Parameter], table: Table) -> FlatFile:
    """Return the layout of the file of the state. Raises ValueError as `lay_out`."""
    told = []
    # Sorted, because all servers compute this layout, and their optimizers may hold entries in another order.
    for index in sorted(table):
        parameter = parameters[index]
        for name, held in sorted(table[index].items()):
            if held.kind == ELEMENTS:
                told.append(
                    TensorDescription(entry_name(parameter, name), held.dtype, parameter.shape, parameter.stride)
                )
            # Such a tensor is always row-major, whatever the strides of its parameter are.
            elif held.kind == WHOLE:
                stride = tuple(accumulate(reversed(held.shape[1:]), lambda a, b: a * b, initial=1))[::-1]
                told.append(
                    TensorDescription(entry_name(parameter, name), held.dtype, held.shape, stride[: len(held.shape)])
                )
    return lay_out(told, {"format": "pt"})


def entry_name(parameter: Parameter, name: str) -> str:
    """Return the name of a tensor of the optimizer's state in the file."""
    return f"{parameter.name}/{name}"


def _runs(indices: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1][1] = index + 1
        else:
            runs.append([index, index + 1])
    return runs


def _indices(runs: Any, count: int) -> Iterable[int]:
    if not isinstance(runs, list):
        raise StateError("a row of an optimizer's state names no parameters")
    for run in runs:
        # `type`, not `isinstance`: JSON's true is an int in Python.
        if not (isinstance(run, list) and len(run) == 2 and all(type(n) is int for n in run)):
            raise StateError(f"not a range of parameters: {str(run)[:80]}")
        # The bound comes first: a file that names 2**60 parameters must not fill the memory.
        if not 0 <= run[0] < run[1] <= count:
            raise StateError(f"parameters {run[0]} to {run[1]} of {count}")
        yield from range(run[0], run[1])


def _held(name: str, data: Any) -> StateValue:
    wrong = StateError(f"not an entry of an optimizer's state: {name[:80]!r} = {str(data)[:80]}")
    # A "/" would make `entry_name` ambiguous: "a/b" of "w" and "b" of "w/a" are the same tensor.
    if not (isinstance(data, list) and len(data) == 4) or "/" in name:
        raise wrong
    kind, dtype, shape, value = data
    if kind not in (ELEMENTS, WHOLE, NUMBER) or type(dtype) is not str or type(value) not in (int, float, bool):
        raise wrong
    if dtype not in NAMES and not (kind == NUMBER and dtype in PLAIN):
        raise wrong
    # The file may be anything. The number of dimensions is checked before the loop over them.
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        raise wrong
    if not all(type(n) is int and 0 <= n < 1 << 40 for n in shape):
        raise wrong
    return StateValue(kind, dtype, tuple(shape), value)
