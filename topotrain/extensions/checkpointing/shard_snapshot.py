"""The frozen state of one shard, and the start of a shard from a snapshot.

All shards of a server group freeze behind the same decision, so together they freeze a state that the job has been in.
This is a consistent cut (Chandy and Lamport, 1985), which the log of decisions gives without markers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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

# Only these names become types: a snapshot must not name code.
_PLAIN_TYPES: Mapping[str, type] = {"float": float, "int": int, "bool": bool}


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Elements from `lo` on of a file's tensor, 1-D. The next snapshot overwrites it."""

    name: str
    lo: int
    body: torch.Tensor


@dataclass(frozen=True, slots=True)
class FrozenShard:
    """One shard's part of a snapshot.

    Attributes:
        values: elements of the parameters.
        state: elements of the optimizer's state.
        table: the optimizer's state of each parameter, by name.
        flats: the frozen values by bucket.
        tables, rows: the shard's part of the tables that scripts have opened (see `table_snapshot`).
    """

    parameters: tuple[Parameter, ...]
    values: tuple[TensorSlice, ...]
    state: tuple[TensorSlice, ...]
    table: Table
    flats: Mapping[int, torch.Tensor]
    tables: tuple[StoredTable, ...] = ()
    rows: tuple[TensorSlice, ...] = ()


class SnapshotParticipant:
    """An extension of a server that has a part of its own in every snapshot."""

    @property
    def snapshot_obstacle(self) -> str:
        """Why no snapshot can be taken now. Empty: one can."""
        return ""

    def freeze(self, frozen: FrozenShard) -> FrozenShard:
        """Return the frozen shard with this extension's part, or raise StateError."""
        return frozen

    def facts(self) -> Mapping[str, Any]:
        """This extension's entries of the manifest, which the coordinator writes."""
        return {}


class ValueChanger(ABC):
    """An extension of a server that changes values between two steps."""

    @abstractmethod
    def follows_step(self, group: int) -> bool:
        """Whether the group's change that is committed belongs to its last step.

        Its script had read no batch since then. A process that goes on behind that step would not repeat the change.
        """


class WorkerStateKeeper(ABC):
    """An extension of a server with which workers leave their states (1-D uint8)."""

    @abstractmethod
    def epoch_states(self) -> Mapping[Address, torch.Tensor]:
        """The state of each worker at the begin of its last epoch."""

    @abstractmethod
    def snapshot_states(self, number: int) -> Mapping[Address, torch.Tensor]:
        """The states at this snapshot that have arrived so far."""

    @abstractmethod
    def forget_snapshots(self, number: int) -> None:
        """Forget the states at this snapshot and at all before it."""


class ShardFreezer:
    """Copies a shard's values and optimizer state into memory that all snapshots use.

    Args:
        model, shard: the shard.
        group: the server group, where there are several. Each group writes the values of the buckets that it masters,
            and only group 0 writes optimizer state.
    """

    def __init__(self, model: ParameterShard, shard: int, group: int | None = None) -> None:
        self._model, self._group = model, group
        self._segments = model.map.segments_of(shard)
        self._memory: dict[tuple[object, ...], torch.Tensor] = {}

    def freeze(self) -> FrozenShard:
        """Copy the shard. Raises StateError for state without a place in parameters."""
        table: dict[int, dict[str, StateValue]] = {}
        # One model can have one optimizer state. That of server group 0 stands for all groups.
        units = () if self._group else self._model.units
        state = tuple(slab for unit in units for slab in self._state(unit, table))
        # Before `_by_bucket` below, which gives views of the copies that this makes.
        values = tuple(self._values() if self._group is None else self._mastered())
        return FrozenShard(self._model.map.parameters, values, state, table, self._by_bucket())

    def _by_bucket(self) -> dict[int, torch.Tensor]:
        spaces = {b.space: self._model.flats.range(b.space)[0] for b in self._model.buckets}
        return {
            # Views and no copies: `CrossGroupCut` adds late changes of other groups to the slices that are written.
            b.id: self._memory["values", b.space][b.lo - spaces[b.space] : b.hi - spaces[b.space]]
            for b in self._model.buckets
        }

    def _mastered(self) -> Iterator[TensorSlice]:
        self._copy()
        by_bucket = self._by_bucket()
        for bucket in self._model.buckets:
            # A bucket may have parts of several segments, and another group's master writes the other buckets.
            for piece in bucket.pieces if bucket.master == self._group else ():
                segment = self._model.map.segments[piece.segment]
                name = self._model.map.parameters[segment.parameter].name
                body = by_bucket[bucket.id][bucket.place(piece)]
                yield TensorSlice(name, segment.start + piece.lo - segment.lo, body)

    def _copy(self) -> None:
        # The server handles no message meanwhile, so the copy is of one moment. Another thread writes it.
        for space in {segment.space: None for segment in self._segments}:
            flat = self._model.flats.flat("values", space)
            self._buffer(("values", space), flat.numel(), flat.dtype).copy_(flat)

    def _values(self) -> Iterator[TensorSlice]:
        model = self._model
        self._copy()
        for segment in self._segments:
            lo, _ = model.flats.range(segment.space)
            held = self._memory["values", segment.space][segment.lo - lo : segment.hi - lo]
            # Numbered by parameter in memory order and not by shard, so that any number of servers reads the files.
            yield TensorSlice(model.map.parameters[segment.parameter].name, segment.start, held)

    def _state(self, unit: UpdateUnit, table: dict[int, dict[str, StateValue]]) -> Iterator[TensorSlice]:
        for key, name, value in unit.update.state():
            segment = self._model.map.segments[key]
            parameter = self._model.map.parameters[segment.parameter]
            first, last = unit.places[key][0], unit.places[key][-1]
            held, body = self._entry(unit, key, name, value, parameter, last.hi)
            known = table.setdefault(segment.parameter, {}).setdefault(name, held)
            # The manifest has one entry per parameter, so all parts of it must agree, also on a step count.
            if known != held:
                raise StateError(f"parts of {parameter.name} hold different state {name!r}: {known} and {held}")
            if body is not None:
                # With whole tensors the unit has the tensor from its first element on.
                start = 0 if unit.whole else segment.start + first.piece.lo - segment.lo
                yield TensorSlice(entry_name(parameter, name), start, body)

    def _entry(
        self, unit: UpdateUnit, key: int, name: str, value: torch.Tensor | float, parameter: Parameter, count: int
    ) -> tuple[StateValue, torch.Tensor | None]:
        # The name of the type keeps apart what torch treats differently: a float, an int and a bool.
        if not isinstance(value, torch.Tensor):
            return StateValue(NUMBER, type(value).__name__, (), value), None
        dtype = str(value.dtype).removeprefix("torch.")
        if value.dim() == 0:
            return StateValue(NUMBER, dtype, (), value.item()), None
        memory = self._buffer((unit.buckets[0].id, key, name), value.numel(), value.dtype)
        if unit.whole and tuple(value.shape) == parameter.shape:
            # The optimizer's tensor may have other strides. The file counts in the parameter's memory order.
            memory.as_strided(parameter.shape, parameter.stride).copy_(value)
            return StateValue(ELEMENTS, dtype), memory
        if value.numel() == count and not unit.whole:
            memory.copy_(value.reshape(-1))
            return StateValue(ELEMENTS, dtype), memory
        if unit.whole:
            memory.view(value.shape).copy_(value)
            return StateValue(WHOLE, dtype, tuple(value.shape)), memory
        raise StateError(f"the optimizer's state {name!r} of {parameter.name} is not element-wise")

    def _buffer(self, key: tuple[object, ...], count: int, dtype: torch.dtype) -> torch.Tensor:
        memory = self._memory.get(key)
        # Fresh memory costs several times the copy. State may appear, grow or change its type between snapshots.
        if memory is None or memory.numel() != count or memory.dtype != dtype:
            memory = self._memory[key] = torch.empty(count, dtype=dtype)
        return memory


# --- starting from a snapshot ------------------------------------------------------------------------------------


class SnapshotSource(Protocol):
    """A snapshot that a job resumes from. `checkpoint_reader.Manifest` explains it."""

    @property
    def number(self) -> int: ...
    @property
    def version(self) -> int: ...

    @property
    def clocks(self) -> Mapping[int, int]: ...

    @property
    def parameters(self) -> tuple[Parameter, ...]: ...
    @property
    def optimizer(self) -> str: ...

    @property
    def table(self) -> Table: ...

    def steps(self, group: int) -> int: ...

    def runs(self, epoch: int) -> Sequence[tuple[int, int]]: ...

    @property
    def epochs(self) -> Sequence[int]: ...

    @property
    def first_epoch(self) -> int | None: ...

    @property
    def closed(self) -> int: ...

    @property
    def samples(self) -> Mapping[Address, int]: ...

    @property
    def rounds(self) -> Sequence[int]: ...

    def values(self, name: str, lo: int, out: torch.Tensor) -> None: ...

    def state(self, parameter: str, entry: str, lo: int, out: torch.Tensor) -> None: ...

    @property
    def tables(self) -> Sequence[Sequence[StoredTable]]: ...

    def rows(self, shard: int, table: str, column: str, lo: int, out: torch.Tensor) -> None: ...


def unread(source: SnapshotSource) -> int:
    """The first epoch that was not read to its end when the snapshot was taken."""
    # Without a `first_epoch` no worker had read further than the listed epochs.
    return min(source.epochs, default=source.closed) if source.first_epoch is None else source.first_epoch


def restore(model: ParameterShard, source: SnapshotSource, shard: int) -> None:
    """Fill a new shard. Raises ConfigError for a snapshot of another model."""
    check_same(model.map.parameters, model.schema.optimizer, source)
    for segment in model.map.segments_of(shard):
        lo, _ = model.flats.range(segment.space)
        flat = model.flats.flat("values", segment.space)[segment.lo - lo : segment.hi - lo]
        source.values(model.map.parameters[segment.parameter].name, segment.start, flat)
    if OptimizerSpec.from_text(model.schema.optimizer).outer != OptimizerSpec.from_text(source.optimizer).outer:
        # One of both steps with gradients, and the other with what workers have learned: its state means another thing.
        return
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
            # A tensor without dimensions comes back as one: optimizers change it in place.
            plain = _PLAIN_TYPES.get(held.dtype) if held.dtype in PLAIN else None
            yield name, plain(held.value) if plain else torch.tensor(held.value, dtype=torch_dtype(held.dtype))
            continue
        # Such state cannot be cut. A job with sliced tensors has no server that could hold it.
        if held.kind == WHOLE and not whole:
            accepted = "needs whole tensors: cluster { slicing: kTensor }"
            raise ConfigError("resume", f"{parameter.name}/{name}", accepted)
        shape = held.shape if held.kind == WHOLE else parameter.shape if whole else (count,)
        stride = None if held.kind == WHOLE or not whole else parameter.stride
        flat = torch.empty(torch.Size(shape).numel(), dtype=torch_dtype(held.dtype))
        source.state(parameter.name, name, start, flat)
        # The strides of the parameter, as the optimizer would have made it.
        yield name, flat.view(shape) if stride is None else flat.as_strided(shape, stride)


def check_same(parameters: Sequence[Parameter], optimizer: str, source: SnapshotSource) -> None:
    """Raise ConfigError for another model or kind of optimizer. Settings may differ."""
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
    # The optimizer's state is stored by the parameter's number.
    if [p.name for p in parameters] != [p.name for p in source.parameters]:
        raise ConfigError("resume", parameters[0].name, f"stands elsewhere in snapshot {source.number}: another order")
    new, old = OptimizerSpec.from_text(optimizer), OptimizerSpec.from_text(source.optimizer)
    if new.outer != old.outer:
        return
    if new.name != old.name:
        raise ConfigError("resume", new.name, f"must be {old.name}, the optimizer of snapshot {source.number}")
    # The groups of an outer optimizer have only settings of the job, which may change.
    if (new.assignment, new.also) != (old.assignment, old.also) and not new.outer:
        differ = (
            p.name for p, now, then in zip(parameters, new.assignment, old.assignment, strict=True) if now != then
        )
        named = f"other parameter groups than in snapshot {source.number}: {next(differ, 'a shared parameter')} differs"
        raise ConfigError("resume", new.name, f"has {named}; a layer that is frozen since stays in its group")


def _names(names: Mapping[str, object]) -> str:
    shown = list(names)[:4]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
