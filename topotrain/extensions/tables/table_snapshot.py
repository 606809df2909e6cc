"""Tables in snapshots: rows copied behind the step after which the rest of a shard is frozen, and read back by id.

Rule: to freeze is to copy into memory that is kept from one snapshot to the next, as `shard_snapshot.ShardFreezer`
does; so a server with tables takes their size twice. Who goes on reads the rows that are its own, whoever held them
before.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace

import torch

from topotrain.config.job import ConfigError
from topotrain.core.optim.state_table import StateError
from topotrain.core.protocol import ProtocolError
from topotrain.extensions.checkpointing.shard_snapshot import FrozenShard, SnapshotSource, TensorSlice
from topotrain.extensions.tables.push_modes import TableShard
from topotrain.extensions.tables.row_storage import VALUES, RowStorage
from topotrain.extensions.tables.table_file_layout import IDS, StoredTable, entry_of
from topotrain.extensions.tables.table_spec import TableSpec

_CHUNK_BYTES = 16 << 20


class TableCopier:
    """Copies one server's tables into memory that is made once."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[str, str, int], torch.Tensor] = {}

    def freeze(self, frozen: FrozenShard, tables: Iterable[TableShard]) -> FrozenShard:
        """With the rows that these have now. Raises StateError where there is no memory for them."""
        kept, slabs = list[StoredTable](), list[TensorSlice]()
        for table in tables:
            name, rows = table.spec.name, table.rows
            kept.append(StoredTable(table.spec.to_text(), table.optimizer, table.pushes, rows.count, rows.columns()))
            slabs.append(TensorSlice(entry_of(name, IDS), 0, torch.from_numpy(rows.ids())))  # never written to again
            for column in rows.columns():
                slabs += self._column(name, column, rows)
        return replace(frozen, tables=tuple(kept), rows=tuple(slabs))

    def _column(self, table: str, column: str, rows: RowStorage) -> Iterator[TensorSlice]:
        at = 0
        for number, (block, used) in enumerate(rows.blocks(column)):
            key = table, column, number
            if key not in self._rooms:
                self._rooms[key] = _room(table, block)
            room = self._rooms[key][:used].copy_(block[:used])
            yield TensorSlice(entry_of(table, column), at, room.view(-1))
            at += room.numel()


def _room(table: str, block: torch.Tensor) -> torch.Tensor:
    try:
        return torch.empty_like(block)
    except (MemoryError, RuntimeError) as error:  # costs the snapshot, and not the job
        raise StateError(f"there is no memory for a copy of table {table!r}: {error}") from error


class StoredRows:
    """What the snapshot that a job goes on from has of tables, as one server of now wants it.

    Args:
        source: the snapshot; None: the job began at its beginning.
        shard, shards: which of how many servers this is.
    """

    def __init__(self, source: SnapshotSource | None, shard: int, shards: int) -> None:
        self._source, self._shard, self._shards = source, shard, shards
        self._parts: dict[str, list[tuple[int, StoredTable]]] = {}
        for number, tables in enumerate(() if source is None else source.tables):
            for kept in tables:
                self._parts.setdefault(kept.name, []).append((number, kept))
        self._wanted = set(self._parts)

    def refill(self, table: TableShard) -> None:
        """Let a table that was just made have its rows of the snapshot, if it was there.

        Raises ConfigError for a snapshot of another table of this name, or one that cannot be read.
        """
        parts = self._parts.get(table.spec.name)
        if self._source is None or parts is None:
            return
        for _, kept in parts:
            _check_same(table.spec, kept, self._source.number)
        for number, kept in parts:
            table.go_on(kept.optimizer, max(part.pushes for _, part in parts))
            if len(self._source.tables) != self._shards or number == self._shard:  # else another one has all of it
                self._read(self._source, number, kept, table.rows)
        self._wanted.discard(table.spec.name)

    def _read(self, source: SnapshotSource, number: int, kept: StoredTable, rows: RowStorage) -> None:
        for column, fill in kept.columns.items():
            rows.column(column, fill)
        width, step = rows.spec.width, max(1, _CHUNK_BYTES // rows.spec.row_bytes)
        for first in range(0, kept.rows, step):
            ids = torch.empty(min(step, kept.rows - first), dtype=torch.int64)
            source.rows(number, kept.name, IDS, first, ids)
            mine = ids % self._shards == rows.spec.residue(self._shard, self._shards)
            found = ids[mine].numpy()
            for column in [VALUES, *(name for name in kept.columns if name != VALUES)]:
                part = torch.empty(len(ids) * width, dtype=rows.spec.torch_dtype)
                source.rows(number, kept.name, column, first * width, part)
                part = part.view(-1, width)[mine]
                if column == VALUES:
                    rows.give(found, part)
                else:
                    rows.scatter(rows.slots(found), part, column)

    @property
    def missed(self) -> str:
        """In words, a table of the snapshot that no script has opened by now; empty: all are there."""
        if self._source is None or not self._wanted:
            return ""
        return f"{min(self._wanted)!r} is in snapshot {self._source.number}, and the model has no table of this name"


def _check_same(now: TableSpec, kept: StoredTable, number: int) -> None:
    """Raise ConfigError unless a snapshot is of this table, whatever its optimizer's settings."""
    try:
        then = TableSpec.from_text(kept.spec)
    except ProtocolError as error:
        raise ConfigError("resume", f"table {now.name}", f"snapshot {number} has {error}") from error
    for field in fields(now):
        mine, theirs = getattr(now, field.name), getattr(then, field.name)
        if mine != theirs and field.name != "optimizer":
            accepted = f"has {field.name} {mine!r} now, and {theirs!r} in snapshot {number}"
            raise ConfigError("resume", f"table {now.name}", accepted)
