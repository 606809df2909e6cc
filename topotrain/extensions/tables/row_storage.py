"""Storage of one shard's rows: an index of rows, and columns of memory that grow.

Rows get slots in the order of their first use. Values and each kind of optimizer state are columns. A column is a list
of blocks of (slots, width) elements, so rows are never moved. No loop runs over single rows.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch

from topotrain.core.protocol import ProtocolError
from topotrain.extensions.tables.table_spec import Ids, TableSpec, initial_rows

FIRST_BYTES, BLOCK_BYTES = 1 << 16, 1 << 25
VALUES = "values"
_FREE = -1


class RowIndex:
    """Row -> slot, by open addressing with linear probing, for many rows at a time."""

    def __init__(self) -> None:
        self.count = 0
        self._by_slot: Ids = np.empty(0, dtype=np.int64)
        self._make(64)

    def _make(self, places: int) -> None:
        self._keys = np.full(places, _FREE, dtype=np.int64)
        self._slots = np.zeros(places, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._slots.nbytes + self._by_slot.nbytes

    def ids(self) -> Ids:
        """Return all rows by slot. The array must not be written."""
        # Cached, since rows keep their slots. The array is replaced and never written: snapshots hold it.
        if len(self._by_slot) < self.count:
            used = self._keys != _FREE
            self._by_slot = np.empty(self.count, dtype=np.int64)
            self._by_slot[self._slots[used]] = self._keys[used]
        return self._by_slot

    def _first(self, ids: Ids) -> npt.NDArray[np.int64]:
        # All rows of a shard are equal modulo the number of shards, so the low bits alone would collide.
        # Multiplicative hashing with 2**64 over the golden ratio (Knuth). The upper bits are the well mixed ones.
        mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return ((mixed >> np.uint64(20)) & np.uint64(len(self._keys) - 1)).astype(np.int64)

    def find(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Return the slot of each row, -1 for rows without one."""
        at, slots, open_ = self._first(ids), np.full(len(ids), -1, dtype=np.int64), np.arange(len(ids))
        while open_.size:
            # `open_` are the ids without a decided position. Each round looks at the next position of all of them.
            keys = self._keys[at[open_]]
            hit = keys == ids[open_]
            slots[open_[hit]] = self._slots[at[open_[hit]]]
            open_ = open_[~hit & (keys != _FREE)]
            at[open_] = (at[open_] + 1) & (len(self._keys) - 1)
        return slots

    def add(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Give slots to rows without one. Each row must occur once."""
        slots = np.arange(self.count, self.count + len(ids), dtype=np.int64)
        if 3 * (self.count + len(ids)) > 2 * len(self._keys):
            # Before the table is replaced, since the ids are read out of it.
            known = self.ids()
            # A power of two, so that a mask of the hash is a position. Above two thirds probing becomes slow.
            self._make(1 << int(3 * (self.count + len(ids))).bit_length())
            self._insert(known, np.arange(len(known), dtype=np.int64))
        self._insert(ids, slots)
        self.count += len(ids)
        return slots

    def _insert(self, ids: Ids, slots: npt.NDArray[np.int64]) -> None:
        at, open_ = self._first(ids), np.arange(len(ids))
        while open_.size:
            places = at[open_]
            free = self._keys[places] == _FREE
            # Of several rows for one position, the last write wins. The others go on to the next position.
            self._keys[places[free]] = ids[open_[free]]
            won = self._keys[places] == ids[open_]
            self._slots[places[won]] = slots[open_[won]]
            open_ = open_[~won]
            at[open_] = (at[open_] + 1) & (len(self._keys) - 1)


class RowStorage:
    """The rows of one shard: number `shard` of `shards`."""

    def __init__(self, spec: TableSpec, shard: int, shards: int) -> None:
        self.spec = spec
        self._residue, self._shards = spec.residue(shard, shards), shards
        # Rows below spec.rows with this remainder. Not used with -1 for no bound.
        here = spec.rows // shards + (self._residue < spec.rows % shards)
        self._limit = here if spec.rows >= 0 else None
        self._ends: list[int] = []  # of the blocks, in slots
        self._columns: dict[str, list[torch.Tensor]] = {VALUES: []}
        self._fills: dict[str, float] = {VALUES: 0.0}
        self._index = None if spec.dense else RowIndex()
        self._given = torch.zeros(here if spec.dense else 0, dtype=torch.bool) if spec.init == "given" else None
        if spec.dense and here:
            self._grow(here)
            # A dense table has the slots in the order of the rows, without an index.
            ids = np.arange(here, dtype=np.int64) * shards + self._residue
            self._columns[VALUES][0].copy_(initial_rows(spec, ids))

    # --- rows ----------------------------------------------------------------------------------------------------

    def check(self, ids: Ids, unique: bool) -> None:
        """Raise ProtocolError for rows that the table or this shard does not have.

        unique: also for rows that do not ascend.
        """
        name, rows = self.spec.name, self.spec.rows
        if not len(ids):
            return
        if ids.min() < 0 or (0 <= rows <= ids.max()):
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            raise ProtocolError(f"row {wrong} of table {name!r}, which has {rows if rows >= 0 else 'rows from 0 on'}")
        if (ids % self._shards != self._residue).any():
            wrong = int(ids[ids % self._shards != self._residue][0])
            raise ProtocolError(f"row {wrong} of table {name!r} is on another shard")
        if unique and (np.diff(ids) <= 0).any():
            raise ProtocolError(f"rows of table {name!r} that do not ascend")

    @property
    def count(self) -> int:
        return (self._limit or 0) if self._index is None else self._index.count

    def ids(self) -> Ids:
        """Return the rows on this shard, in no order."""
        if self._index is None:
            return np.arange(self.count, dtype=np.int64) * self._shards + self._residue
        return self._index.ids()

    def slots(self, ids: Ids) -> torch.Tensor:
        """Return the slots of rows. New rows are made.

        Raises LookupError if a row has no value yet, and must be given one first.
        """
        if self._index is None:
            slots = torch.from_numpy(ids // self._shards)
            if self._given is not None and not bool(self._given[slots].all()):
                missing = int(ids[~self._given[slots].numpy()][0])
                raise LookupError(f"row {missing} of table {self.spec.name!r} has not been given a value yet")
            return slots
        found = self._index.find(ids)
        # A pull may name a new row twice, and the row gets one slot.
        missing_ids = np.unique(ids[found < 0])
        if len(missing_ids):
            if self.spec.init == "given":
                raise LookupError(f"row {missing_ids[0]} of table {self.spec.name!r} has not been given a value yet")
            made = self._make(missing_ids)
            self.scatter(made, initial_rows(self.spec, missing_ids))
            found = self._index.find(ids)
        return torch.from_numpy(found)

    def _make(self, ids: Ids) -> torch.Tensor:
        assert self._index is not None
        slots = self._index.add(ids)
        while self._index.count > (self._ends[-1] if self._ends else 0):
            self._grow(self._next_block())
        return torch.from_numpy(slots)

    def assign(self, ids: Ids, rows: torch.Tensor) -> None:
        if self._index is None:
            slots = torch.from_numpy(ids // self._shards)
            if self._given is not None:
                self._given[slots] = True
        else:
            missing = ids[self._index.find(ids) < 0]
            if len(missing):
                # Without initial values, which are overwritten below.
                self._make(missing)
            slots = torch.from_numpy(self._index.find(ids))
        self.scatter(slots, rows)

    # --- columns -------------------------------------------------------------------------------------------------

    def _next_block(self) -> int:
        have = self._ends[-1] if self._ends else 0
        least, most = (max(1, size // self.spec.row_bytes) for size in (FIRST_BYTES, BLOCK_BYTES))
        # Doubling keeps the number of blocks small, and the limit keeps the unused memory small.
        wanted = min(max(have, least), most)
        return wanted if self._limit is None else min(wanted, self._limit - have)

    def _grow(self, slots: int) -> None:
        self._ends.append((self._ends[-1] if self._ends else 0) + slots)
        for name, blocks in self._columns.items():
            blocks.append(self._block(name, slots))

    def _block(self, name: str, slots: int) -> torch.Tensor:
        # Filled when it is made, so that a new row needs no initialization of its state.
        return torch.full((slots, self.spec.width), self._fills[name], dtype=self.spec.torch_dtype)

    def column(self, name: str, fill: float) -> None:
        """Add a column of state, if it is missing. Existing rows start with `fill`."""
        if name not in self._columns:
            self._fills[name] = fill
            # Blocks of the same sizes as those of the other columns: a slot has one place in all of them.
            sizes = np.diff([0, *self._ends]).tolist()
            self._columns[name] = [self._block(name, size) for size in sizes]

    def drop_columns(self) -> None:
        self._columns = {VALUES: self._columns[VALUES]}

    def columns(self) -> Mapping[str, float]:
        """Return the columns by name, with their initial values."""
        return {name: self._fills[name] for name in self._columns}

    def blocks(self, name: str) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield a column's blocks, (slots, width) each, and the number of slots in use."""
        for first, block in zip([0, *self._ends], self._columns[name], strict=False):
            yield block, max(0, min(len(block), self.count - first))

    def block(self) -> torch.Tensor | None:
        """Return all values of a dense table, 1-D, as a view of the memory."""
        blocks = self._columns[VALUES]
        return blocks[0].view(-1) if blocks else None

    def gather(self, slots: torch.Tensor, name: str = VALUES) -> torch.Tensor:
        """Return a copy of rows, (slots, width)."""
        blocks = self._columns[name]
        if len(blocks) == 1:
            return blocks[0].index_select(0, slots)
        rows = torch.empty(len(slots), self.spec.width, dtype=self.spec.torch_dtype)
        for number, which, inside in self._split(slots):
            rows[which] = blocks[number].index_select(0, inside)
        return rows

    def scatter(self, slots: torch.Tensor, rows: torch.Tensor, name: str = VALUES) -> None:
        """Write rows. Each slot must occur once."""
        blocks = self._columns[name]
        if len(blocks) == 1:
            blocks[0].index_copy_(0, slots, rows)
            return
        for number, which, inside in self._split(slots):
            blocks[number].index_copy_(0, inside, rows[which])

    def _split(self, slots: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield (block, positions of its slots in `slots`, slots within the block)."""
        # Rows of different blocks need one kernel per block.
        number_of = torch.bucketize(slots, torch.tensor(self._ends), right=True)
        for number in np.unique(number_of.numpy()).tolist():
            which = (number_of == number).nonzero().view(-1)
            yield number, which, slots[which] - (self._ends[number - 1] if number else 0)

    # --- sizes ---------------------------------------------------------------------------------------------------

    @property
    def value_bytes(self) -> int:
        """Bytes of the values, with the unused part of the last block."""
        return sum(block.nbytes for block in self._columns[VALUES])

    @property
    def state_bytes(self) -> int:
        return sum(b.nbytes for name, blocks in self._columns.items() if name != VALUES for b in blocks)

    @property
    def index_bytes(self) -> int:
        given = 0 if self._given is None else self._given.nbytes
        return given + (0 if self._index is None else self._index.nbytes)
