"""Tables in snapshots: copies of their rows, and rows that are read back.

Rows are copied after the same step as the parameters of the shard. The copy has memory of its own, which all snapshots
use. So a server with tables needs twice their size.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace

import torch

from topotrain.config.job import ConfigError
from topotrain.core.optim.state_table import StateError
from topotrain.core.protocol import ProtocolError
from topotrain.extensions.checkpointing.shard_snapshot import FrozenShard, SnapshotSource, TensorSlice
from topotrain.extensions.checkpointing.table_file_layout import IDS, StoredTable, entry_of
from topotrain.extensions.tables.push_modes import TableShard
from topotrain.extensions.tables.row_storage import VALUES, RowStorage
from topotrain.extensions.tables.table_spec import TableSpec

_CHUNK_BYTES = 16 << 20


class TableCopier:
    """Copies the tables of one server into memory that is allocated once."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, str, int], torch.Tensor] = {}

    def freeze(self, frozen: FrozenShard, tables: Iterable[TableShard]) -> FrozenShard:
        """Return the frozen shard with the rows of these tables. Raises StateError."""
        kept, slabs = list[StoredTable](), list[TensorSlice]()
        for table in tables:
            name, rows = table.spec.name, table.rows
            kept.append(StoredTable(table.spec.to_text(), table.optimizer, table.pushes, rows.count, rows.columns()))
            # The ids need no copy: rows keep their slots, and a longer array replaces this one.
            slabs.append(TensorSlice(entry_of(name, IDS), 0, torch.from_numpy(rows.ids())))
            for column in rows.columns():
                slabs += self._column(name, column, rows)
        return replace(frozen, tables=tuple(kept), rows=tuple(slabs))

    def _column(self, table: str, column: str, rows: RowStorage) -> Iterator[TensorSlice]:
        at = 0
        for number, (block, used) in enumerate(rows.blocks(column)):
            # Blocks never change their size, so the copy of a block fits in every later snapshot.
            key = table, column, number
            if key not in self._copies:
                self._copies[key] = _memory_like(table, block)
            # Only the slots in use. The rest of the last block has no rows.
            copy = self._copies[key][:used].copy_(block[:used])
            yield TensorSlice(entry_of(table, column), at, copy.view(-1))
            at += copy.numel()


def _memory_like(table: str, block: torch.Tensor) -> torch.Tensor:
    try:
        return torch.empty_like(block)
    except (MemoryError, RuntimeError) as error:
        # This costs the job one snapshot, and does not end it.
        raise StateError(f"there is no memory for a copy of table {table!r}: {error}") from error


class StoredRows:
    """The tables of the snapshot from which a job continues, for one server.

    source: None if the job does not continue from one. shard, shards: the index of the server, and their number.
    """

    def __init__(self, source: SnapshotSource | None, shard: int, shards: int) -> None:
        self._source, self._shard, self._shards = source, shard, shards
        self._parts: dict[str, list[tuple[int, StoredTable]]] = {}
        for number, tables in enumerate(() if source is None else source.tables):
            for kept in tables:
                self._parts.setdefault(kept.name, []).append((number, kept))
        self._wanted = set(self._parts)

    def refill(self, table: TableShard) -> None:
        """Restore the rows of a new table, if the snapshot has it. Raises ConfigError."""
        parts = self._parts.get(table.spec.name)
        if self._source is None or parts is None:
            return
        # All parts are compared before any row changes.
        for _, kept in parts:
            _check_same(table.spec, kept, self._source.number)
        for number, kept in parts:
            # All servers have counted the same pushes, since each push goes to all of them.
            table.restore(kept.optimizer, max(part.pushes for _, part in parts))
            # With the same number of servers each part has exactly the rows of one server.
            if len(self._source.tables) != self._shards or number == self._shard:
                self._read(self._source, number, kept, table.rows)
        self._wanted.discard(table.spec.name)

    def _read(self, source: SnapshotSource, number: int, kept: StoredTable, rows: RowStorage) -> None:
        for column, fill in kept.columns.items():
            # Before the rows: a new row then has a place in each column.
            rows.column(column, fill)
        width, step = rows.spec.width, max(1, _CHUNK_BYTES // rows.spec.row_bytes)
        for first in range(0, kept.rows, step):
            ids = torch.empty(min(step, kept.rows - first), dtype=torch.int64)
            source.rows(number, kept.name, IDS, first, ids)
            # With another number of servers each row moves to its new server.
            mine = ids % self._shards == rows.spec.residue(self._shard, self._shards)
            found = ids[mine].numpy()
            # Values first: `assign` makes the slots, and without it `slots` would compute initial values.
            for column in [VALUES, *(name for name in kept.columns if name != VALUES)]:
                part = torch.empty(len(ids) * width, dtype=rows.spec.torch_dtype)
                source.rows(number, kept.name, column, first * width, part)
                part = part.view(-1, width)[mine]
                if column == VALUES:
                    rows.assign(found, part)
                else:
                    rows.scatter(rows.slots(found), part, column)

    @property
    def missed(self) -> str:
        """An error about a table of the snapshot that no script has opened, or ""."""
        if self._source is None or not self._wanted:
            return ""
        return f"{min(self._wanted)!r} is in snapshot {self._source.number}, and the model has no table of this name"


def _check_same(now: TableSpec, kept: StoredTable, number: int) -> None:
    """Raise ConfigError if the snapshot has another table of this name."""
    try:
        then = TableSpec.from_text(kept.spec)
    except ProtocolError as error:
        raise ConfigError("resume", f"table {now.name}", f"snapshot {number} has {error}") from error
    for field in fields(now):
        mine, theirs = getattr(now, field.name), getattr(then, field.name)
        # `TableShard.restore` compares the optimizer's kind. Its settings may differ.
        if mine != theirs and field.name != "optimizer":
            accepted = f"has {field.name} {mine!r} now, and {theirs!r} in snapshot {number}; it must be the same"
            raise ConfigError("resume", f"table {now.name}", accepted)
