"""Layout of table rows in a snapshot: one file per server with its own rows.

    WORKSPACE/manifests/000012/tables-0.safetensors   of server 0: "TABLE/ids", "TABLE/values", and a tensor for each
                               ...                    kind of the optimizer's state of rows: "TABLE/exp_avg"

This module is pure and does not import torch. The layout of a file follows from the descriptions of its tables, which
are in the manifest, so a reader knows the header that it must find.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from topotrain.core.model.safetensors_layout import FlatFile, TensorDescription, lay_out

IDS = "ids"
# Refuses the number of a damaged manifest before sizes are computed from it.
_MOST_ROWS = 1 << 48


@dataclass(frozen=True, slots=True)
class StoredTable:
    """One server's part of a table.

    Attributes:
        spec: the table, as `tables.TableSpec.to_text` writes it.
        optimizer: the optimizer of the last update, in the same form as in the spec.
        pushes: the number of pushes that it has applied.
        rows: the number of rows in this part.
        columns: the data of each row besides its id, by name: "values", and the optimizer's state. The number is the
            value of a row on a server without this column.
    """

    spec: str
    optimizer: str
    pushes: int
    rows: int
    columns: Mapping[str, float]

    def field(self, name: str) -> Any:
        return json.loads(self.spec)[name]

    @property
    def name(self) -> str:
        return str(self.field("name"))

    def to_data(self) -> list[Any]:
        """Return plain data for the manifest."""
        return [self.spec, self.optimizer, self.pushes, self.rows, sorted(self.columns.items())]

    @staticmethod
    def from_data(data: Any) -> "StoredTable":
        """Read the form of `to_data`. Raises ValueError for anything else."""
        try:
            spec, optimizer, pushes, rows, columns = data
            made = StoredTable(
                str(spec), str(optimizer), int(pushes), int(rows), {str(n): float(f) for n, f in columns}
            )
            fine = made.field("width") >= 1 and type(made.field("dtype")) is str and made.name != ""
        # Without ValueError, which passes as it is. The text is cut, since damaged data may be long.
        except (KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"not a table: {error!r}"[:120]) from error
        # "ids" names the row numbers in the file, so no column may have this name.
        if not fine or not 0 <= made.rows < _MOST_ROWS or made.pushes < 0 or IDS in made.columns:
            raise ValueError(f"not a valid table: {made.name[:80]!r}")
        return made


def file_of(shard: int) -> str:
    return f"tables-{shard}.safetensors"


def entry_of(table: str, column: str) -> str:
    """Return the name of a tensor in the file. Names of columns have no "/"."""
    return f"{table}/{column}"


def tables_file(kept: Iterable[StoredTable]) -> FlatFile:
    """Return the layout of one server's file. Raises ValueError as `lay_out`."""
    told = []
    for table in kept:
        width, dtype = int(table.field("width")), str(table.field("dtype"))
        told.append(TensorDescription(entry_of(table.name, IDS), "int64", (table.rows,), (1,)))
        # Sorted as in the manifest, so that writers and readers lay out alike.
        for column in sorted(table.columns):
            told.append(TensorDescription(entry_of(table.name, column), dtype, (table.rows, width), (width, 1)))
    return lay_out(told, {"format": "pt"})
