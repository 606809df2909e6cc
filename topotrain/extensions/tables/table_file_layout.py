"""Where the rows of tables stand in a snapshot: each server has a file of its own, since only it knows its rows.

    WORKSPACE/manifests/000012/tables-0.safetensors   of server 0: "TABLE/ids", "TABLE/values", and a tensor for each
                               ...                    kind of the optimizer's state of rows: "TABLE/exp_avg"

Rule: pure, and without torch. A file's layout follows from the descriptions of its tables alone, which stand in the
manifest; so whoever reads knows what header he has to find, as with the other files (`safetensors_layout`).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from topotrain.core.model.safetensors_layout import FlatFile, TensorDescription, lay_out

IDS = "ids"
_MOST_ROWS = 1 << 48


@dataclass(frozen=True, slots=True)
class StoredTable:
    """One server's part of a table.

    Attributes:
        spec: the table, as `tables.TableSpec.to_text` has it.
        optimizer: what moved the rows last, as there.
        pushes: so many it has counted.
        rows: that are here.
        columns: what is kept of each row besides its id, by name: "values", and the optimizer's state. With it what a
            row has there that a server without this column holds.
    """

    spec: str
    optimizer: str
    pushes: int
    rows: int
    columns: Mapping[str, float]

    def field(self, name: str) -> Any:
        """A field of the description."""
        return json.loads(self.spec)[name]

    @property
    def name(self) -> str:
        """The table's name."""
        return str(self.field("name"))

    def to_data(self) -> list[Any]:
        """Plain data, for the manifest."""
        return [self.spec, self.optimizer, self.pushes, self.rows, sorted(self.columns.items())]

    @staticmethod
    def from_data(data: Any) -> "StoredTable":
        """Raises ValueError for what `to_data` cannot have made."""
        try:
            spec, optimizer, pushes, rows, columns = data
            made = StoredTable(
                str(spec), str(optimizer), int(pushes), int(rows), {str(n): float(f) for n, f in columns}
            )
            fine = made.field("width") >= 1 and type(made.field("dtype")) is str and made.name != ""
        except (KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"no table: {error!r}"[:120]) from error
        if not fine or not 0 <= made.rows < _MOST_ROWS or made.pushes < 0 or IDS in made.columns:
            raise ValueError(f"no table {made.name[:80]!r}")
        return made


def file_of(shard: int) -> str:
    """The name of a server's file."""
    return f"tables-{shard}.safetensors"


def entry_of(table: str, column: str) -> str:
    """What a tensor is called in the file; columns have no "/" in their names."""
    return f"{table}/{column}"


def tables_file(kept: Iterable[StoredTable]) -> FlatFile:
    """Where one server's tables stand. Raises ValueError as `lay_out`."""
    told = []
    for table in kept:
        width, dtype = int(table.field("width")), str(table.field("dtype"))
        told.append(TensorDescription(entry_of(table.name, IDS), "int64", (table.rows,), (1,)))
        for column in sorted(table.columns):
            told.append(TensorDescription(entry_of(table.name, column), dtype, (table.rows, width), (width, 1)))
    return lay_out(told, {"format": "pt"})
