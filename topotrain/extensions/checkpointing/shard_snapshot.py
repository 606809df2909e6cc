"""What one shard freezes at a decision, and how it starts from what was frozen once.

Rule: all shards of a server group freeze behind the same decision, so what they freeze together is a state that the job
has been in (a consistent cut: Chandy and Lamport, 1985; here the log of decisions gives it for nothing). To freeze is
to copy into memory that is kept from one snapshot to the next: a server does nothing else meanwhile, and writing is
another thread's business. Elements are counted as they lie in memory, parameter by parameter, and not by shard: other
counts of servers cut the same numbers elsewhere.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from topotrain.config.job import ConfigError
from topotrain.config.sharding import Parameter
from topotrain.config.topology import Address
from topotrain.core.model.schema import torch_dtype
from topotrain.core.optim.adapter import OptimizerSpec
from topotrain.core.optim.state_table import (
    ELEMENTS,
    NUMBER,
    PLAIN,
    WHOLE,
    State,
    StateError,
    StateValue,
    Table,
    entry_name,
)
from topotrain.core.server.parameter_shard import ParameterShard, UpdateUnit
from topotrain.extensions.checkpointing.table_file_layout import StoredTable

_PLAIN_TYPES: Mapping[str, type] = {"float": float, "int": int, "bool": bool}


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Elements from `lo` on of the tensor `name` of a file; 1-D, in memory that the next snapshot writes again."""

    name: str
    lo: int
    body: torch.Tensor


@dataclass(frozen=True, slots=True)
class FrozenShard:
    """One shard's part of a snapshot. `table` says what the optimizer holds of the shard's parameters.

    tables, rows: what it has of the tables that scripts have opened (`table_snapshot`), with slabs of
    `table_file_layout`'s file.
    """

    parameters: tuple[Parameter, ...]
    values: tuple[TensorSlice, ...]
    state: tuple[TensorSlice, ...]
    table: Table
    flats: Mapping[int, torch.Tensor]
    """The frozen values by bucket."""
    tables: tuple[StoredTable, ...] = ()
    rows: tuple[TensorSlice, ...] = ()


class SnapshotParticipant:
    """An extension of a server that has something of its own in every snapshot."""

    @property
    def unkept(self) -> str:
        """Why no snapshot can be taken now; empty: one can."""
        return ""

    def freeze(self, frozen: FrozenShard) -> FrozenShard:
        """The frozen shard with this extension's part as it is now. Raises StateError where that cannot be."""
        return frozen

    def begun(self) -> Mapping[Address, torch.Tensor]:
        """The state in which the last epoch began of each worker that leaves its state here (1-D uint8)."""
        return {}

    def taken(self, number: int) -> Mapping[Address, torch.Tensor]:
        """The states at this snapshot that workers have left here so far (1-D uint8)."""
        return {}

    def forget(self, number: int) -> None:
        """This snapshot, and all before it, are written or given up."""


class ShardFreezer:
    """Copies one shard's values and state of the optimizer into memory that is made once.

    Args:
        model, shard: whose.
        group: of several server groups: only what it masters is written by it, and state only by group 0.
    """

    def __init__(self, model: ParameterShard, shard: int, group: int | None = None) -> None:
        self._model, self._group = model, group
        self._segments = model.map.segments_of(shard)
        self._kept: dict[tuple[object, ...], torch.Tensor] = {}

    def freeze(self) -> FrozenShard:
        """What the shard holds now. Raises StateError for state that cannot be told by parameter and element."""
        table: dict[int, dict[str, StateValue]] = {}
        units = () if self._group else self._model.units
        state = tuple(slab for unit in units for slab in self._state(unit, table))
        values = tuple(self._values() if self._group is None else self._mastered())
        return FrozenShard(self._model.map.parameters, values, state, table, self._by_bucket())

    def _by_bucket(self) -> dict[int, torch.Tensor]:
        spaces = {b.space: self._model.flats.range(b.space)[0] for b in self._model.buckets}
        return {
            b.id: self._kept["values", b.space][b.lo - spaces[b.space] : b.hi - spaces[b.space]]
            for b in self._model.buckets
        }

    def _mastered(self) -> Iterator[TensorSlice]:
        """What this group masters, which has no more to do with segments."""
        self._copy()
        by_bucket = self._by_bucket()
        for bucket in self._model.buckets:
            for piece in bucket.pieces if bucket.master == self._group else ():
                segment = self._model.map.segments[piece.segment]
                name = self._model.map.parameters[segment.parameter].name
                body = by_bucket[bucket.id][piece.lo - bucket.lo : piece.hi - bucket.lo]
                yield TensorSlice(name, segment.start + piece.lo - segment.lo, body)

    def _copy(self) -> None:
        for space in {segment.space: None for segment in self._segments}:
            flat = self._model.flats.flat("values", space)
            self._room(("values", space), flat.numel(), flat.dtype).copy_(flat)

    def _values(self) -> Iterator[TensorSlice]:
        model = self._model
        self._copy()
        for segment in self._segments:
            lo, _ = model.flats.range(segment.space)
            held = self._kept["values", segment.space][segment.lo - lo : segment.hi - lo]
            yield TensorSlice(model.map.parameters[segment.parameter].name, segment.start, held)

    def _state(self, unit: UpdateUnit, table: dict[int, dict[str, StateValue]]) -> Iterator[TensorSlice]:
        for key, name, value in unit.update.state():
            segment = self._model.map.segments[key]
            parameter = self._model.map.parameters[segment.parameter]
            first, last = unit.places[key][0], unit.places[key][-1]
            held, body = self._entry(unit, key, name, value, parameter, last.hi)
            known = table.setdefault(segment.parameter, {}).setdefault(name, held)
            if known != held:
                raise StateError(f"parts of {parameter.name} hold different state {name!r}: {known} and {held}")
            if body is not None:
                start = 0 if unit.whole else segment.start + first.piece.lo - segment.lo
                yield TensorSlice(entry_name(parameter, name), start, body)

    def _entry(
        self, unit: UpdateUnit, key: int, name: str, value: torch.Tensor | float, parameter: Parameter, count: int
    ) -> tuple[StateValue, torch.Tensor | None]:
        if not isinstance(value, torch.Tensor):
            return StateValue(NUMBER, type(value).__name__, (), value), None
        dtype = str(value.dtype).removeprefix("torch.")
        if value.dim() == 0:
            return StateValue(NUMBER, dtype, (), value.item()), None
        room = self._room((unit.buckets[0].id, key, name), value.numel(), value.dtype)
        if unit.whole and tuple(value.shape) == parameter.shape:
            room.as_strided(parameter.shape, parameter.stride).copy_(value)
            return StateValue(ELEMENTS, dtype), room
        if value.numel() == count and not unit.whole:
            room.copy_(value.reshape(-1))
            return StateValue(ELEMENTS, dtype), room
        if unit.whole:
            room.view(value.shape).copy_(value)
            return StateValue(WHOLE, dtype, tuple(value.shape)), room
        raise StateError(f"the optimizer's state {name!r} of {parameter.name} is not element-wise")

    def _room(self, key: tuple[object, ...], count: int, dtype: torch.dtype) -> torch.Tensor:
        room = self._kept.get(key)
        if room is None or room.numel() != count or room.dtype != dtype:
            room = self._kept[key] = torch.empty(count, dtype=dtype)
        return room


# --- starting from a snapshot ------------------------------------------------------------------------------------


class SnapshotSource(Protocol):
    """A snapshot that a job starts from, as a server wants it."""

    @property
    def number(self) -> int: ...
    @property
    def version(self) -> int:
        """Of the values."""
        ...

    @property
    def clocks(self) -> Mapping[int, int]:
        """Of the worker groups that there were."""
        ...

    @property
    def parameters(self) -> tuple[Parameter, ...]: ...
    @property
    def optimizer(self) -> str:
        """`adapter.OptimizerSpec.to_text`."""
        ...

    @property
    def table(self) -> Table:
        """What the optimizer held."""
        ...

    def steps(self, group: int) -> int:
        """Steps that a worker group had done."""
        ...

    def runs(self, epoch: int) -> Sequence[tuple[int, int]]:
        """Runs [first, last) of the loader's batches of an epoch that are in the values."""
        ...

    @property
    def epochs(self) -> Sequence[int]:
        """Those of which there are such runs."""
        ...

    @property
    def first_epoch(self) -> int | None:
        """Of the first batch that is not in the values; None: nobody had read further."""
        ...

    @property
    def closed(self) -> int:
        """All epochs before this one were read to their end, and are not among `epochs`."""
        ...

    @property
    def samples(self) -> Mapping[Address, int]:
        """Of each worker that there was, how many of its samples are in the values."""
        ...

    def values(self, name: str, lo: int, out: torch.Tensor) -> None:
        """Elements of a parameter, from `lo` on, into a 1-D tensor. Raises ConfigError."""
        ...

    def state(self, parameter: str, entry: str, lo: int, out: torch.Tensor) -> None:
        """The same of a tensor of the optimizer's state."""
        ...

    @property
    def tables(self) -> Sequence[Sequence[StoredTable]]:
        """What each server had of the tables that scripts had opened."""
        ...

    def rows(self, shard: int, table: str, column: str, lo: int, out: torch.Tensor) -> None:
        """Elements of what a server had of a table (`table_file_layout`), from `lo` on. Raises ConfigError."""
        ...


def restore(model: ParameterShard, source: SnapshotSource, shard: int) -> None:
    """Fill a shard that was just made. Raises ConfigError where the snapshot is one of another model or optimizer."""
    check_same(model.map.parameters, model.schema.optimizer, source)
    for segment in model.map.segments_of(shard):
        lo, _ = model.flats.range(segment.space)
        flat = model.flats.flat("values", segment.space)[segment.lo - lo : segment.hi - lo]
        source.values(model.map.parameters[segment.parameter].name, segment.start, flat)
    for unit in model.units:
        for key, places in unit.places.items():
            segment = model.map.segments[key]
            start = 0 if unit.whole else segment.start + places[0].piece.lo - segment.lo
            parameter = model.map.parameters[segment.parameter]
            state = source.table.get(segment.parameter, {})
            for name, value in _loaded(source, parameter, state, start, places[-1].hi, unit.whole):
                unit.update.load_state(key, name, value)


def _loaded(
    source: SnapshotSource, parameter: Parameter, state: State, start: int, count: int, whole: bool
) -> Iterator[tuple[str, torch.Tensor | float]]:
    for name, held in state.items():
        if held.kind == NUMBER:
            plain = _PLAIN_TYPES.get(held.dtype) if held.dtype in PLAIN else None
            yield name, plain(held.value) if plain else torch.tensor(held.value, dtype=torch_dtype(held.dtype))
            continue
        if held.kind == WHOLE and not whole:
            accepted = "needs whole tensors: cluster { slicing: kTensor }"
            raise ConfigError("resume", f"{parameter.name}/{name}", accepted)
        shape = held.shape if held.kind == WHOLE else parameter.shape if whole else (count,)
        stride = None if held.kind == WHOLE or not whole else parameter.stride
        flat = torch.empty(torch.Size(shape).numel(), dtype=torch_dtype(held.dtype))
        source.state(parameter.name, name, start, flat)
        yield name, flat.view(shape) if stride is None else flat.as_strided(shape, stride)


def check_same(parameters: Sequence[Parameter], optimizer: str, source: SnapshotSource) -> None:
    """Raise ConfigError unless a snapshot is of this model and of this kind of optimizer, whatever its settings."""
    theirs = {p.name: p for p in source.parameters}
    for mine in parameters:
        there = theirs.get(mine.name)
        if there is None:
            raise ConfigError("resume", mine.name, f"is not in snapshot {source.number}, which has {_names(theirs)}")
        for what in ("shape", "dtype", "stride"):
            if getattr(mine, what) != getattr(there, what):
                now, then = getattr(mine, what), getattr(there, what)
                raise ConfigError("resume", mine.name, f"has {what} {now} now, and {then} in snapshot {source.number}")
    more = theirs.keys() - {p.name for p in parameters}
    if more:
        raise ConfigError("resume", min(more), f"is in snapshot {source.number}, and not in the model")
    if [p.name for p in parameters] != [p.name for p in source.parameters]:
        raise ConfigError("resume", parameters[0].name, f"stands elsewhere in snapshot {source.number}: another order")
    new, old = OptimizerSpec.from_text(optimizer), OptimizerSpec.from_text(source.optimizer)
    if new.name != old.name:
        raise ConfigError("resume", new.name, f"must be {old.name}, the optimizer of snapshot {source.number}")
    if new.assignment != old.assignment:
        raise ConfigError("resume", new.name, f"has other parameter groups than in snapshot {source.number}")


def _names(names: Mapping[str, object]) -> str:
    shown = list(names)[:4]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
