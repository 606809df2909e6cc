"""The whole state of a server as bytes, and a new copy made from them.

`state_machine` uses it. No code is transferred. The bytes hold data: numbers, texts, containers, tensors, messages, and
the fields of the classes that are listed here. A new server is made as usual, then gets the same model, and its fields
are filled. Parts that are not data (functions, the layout, the map of slices) are its own. A field of an unknown type
is an error when the state is written, so no field can be forgotten.

The state can be taken between any two messages, also within a step, because with several groups there may never be a
moment between steps. So the server's buffers are sent as far as they can still be needed: by a gradient that is being
received, or by a message that may be sent again and is a view of a buffer.
"""

import json
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple
from enum import Enum
from itertools import accumulate
from typing import Any

import torch

from topotrain.config.intervals import Rhythm
from topotrain.config.job import Job
from topotrain.config.sharding import Bucket, SliceMap
from topotrain.config.topology import Address, Role, Topology
from topotrain.core import protocol as m
from topotrain.core.model.schema import Schema, SchemaParts, parse_schema, torch_dtype
from topotrain.core.model.shared_windows import VALUES
from topotrain.core.optim.adapter import HyperCheck
from topotrain.core.protocol.message_validation import MessageValidator
from topotrain.core.server import consistency, gradient_staging, nonfinite, pull_replies, shutdown
from topotrain.core.server.gradient_staging import GradientStaging
from topotrain.core.server.group_sync import NoSync
from topotrain.core.server.groups.group_exchange import GroupExchange
from topotrain.core.server.groups.worker_groups import WorkerGroups
from topotrain.core.server.message_queue import MessageQueue
from topotrain.core.server.model_start import ModelStart
from topotrain.core.server.parameter_shard import ParameterShard, UpdateUnit
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import ServerExtension
from topotrain.core.server.shard_state import ShardState
from topotrain.core.server.startup import Startup
from topotrain.core.server.steps.decisions import Decisions
from topotrain.core.server.steps.pulls import Pulls
from topotrain.core.server.steps.sample_counts import SampleCounts
from topotrain.core.server.steps.step_pipeline import StepPipeline
from topotrain.extensions.checkpointing import server_snapshots, snapshot_coordinator
from topotrain.extensions.checkpointing.checkpoint_extension import snapshots_of
from topotrain.extensions.checkpointing.data_position import DataPosition
from topotrain.extensions.replication.buffer_views import BufferRange, BufferViews
from topotrain.extensions.replication.state_machine import ReliableChannel, ReplicatedServer

_ALIGN = 64
_LENGTH = struct.Struct("<Q")
_NEVER: tuple[type, ...] = (
    Job,
    Topology,
    MessageValidator,
    Schema,
    SliceMap,
    Bucket,
    Rhythm,
    Enum,
    NoSync,
    torch.dtype,
)
"""Types of fields that a new server already has."""

_DATA: tuple[type, ...] = (
    ReliableChannel,
    SchemaParts,
    pull_replies._Held,
    gradient_staging._Reduction,
    consistency._Vote,
    snapshot_coordinator._UnderWay,
)
"""Classes of objects with a short lifetime: a new object is made from the fields.

`ServerExtension.state_types` adds to them.
"""

_PARTS: tuple[type, ...] = (
    Server,
    ShardState,
    MessageQueue,
    WorkerGroups,
    GroupExchange,
    Pulls,
    StepPipeline,
    Decisions,
    ModelStart,
    Startup,
    GradientStaging,
    HyperCheck,
    pull_replies.PullReplies,
    consistency.Clocks,
    consistency.LoopExits,
    consistency.DecisionLog,
    consistency.ApplyOrder,
    consistency.AppliedBatches,
    SampleCounts,
    nonfinite.NonfiniteLimit,
    shutdown.Shutdown,
    server_snapshots.ServerSnapshots,
    snapshot_coordinator.SnapshotCoordinator,
    snapshot_coordinator.TextParts,
    DataPosition,
)
"""Classes of objects that every server has from the start: their fields are filled, as those of its extensions."""


class _Classes:
    """The classes whose objects travel between copies of one server, by name."""

    def __init__(self, server: Server) -> None:
        more = tuple(cls for extension in server.hooks.extensions for cls in extension.state_types)
        self.data = frozenset((*_DATA, *more))
        extensions = (type(extension) for extension in server.hooks.extensions if extension.state_types)
        self.known: Mapping[str, type] = {cls.__name__: cls for cls in (*self.data, *_PARTS, *extensions)}


_OWN: Mapping[str, frozenset[str]] = {
    "Server": frozenset({"hooks", "spans", "_core_handlers", "_handlers"}),
    "ShardState": frozenset({"model", "start"}),
    "MessageQueue": frozenset({"_hooks", "out", "_pending"}),
    "WorkerGroups": frozenset({"workers"}),
    "GroupExchange": frozenset({"_hooks"}),
    "StepPipeline": frozenset({"_hooks", "_spans"}),
    "Decisions": frozenset({"_hooks"}),
    "Startup": frozenset({"schema", "buffers", "_map", "_windows", "_whole"}),
    "GradientStaging": frozenset({"_scratch", "_tree"}),
    "ServerSnapshots": frozenset({"_freezer", "_frozen", "_participants", "_keepers"}),
}
"""Fields that a new object already has, or makes itself."""


def quiet(server: Server) -> bool:
    """Return whether the state can be taken now.

    It cannot during a snapshot, while optimizer state is loaded, or before an early message was handled.
    """
    if not server.queue.empty or server.startup.early or snapshots_of(server)._frozen:
        return False
    if any(extension.has_begun() for extension in server.hooks.extensions):
        return False
    return server.model is None or not server.model.state._loading


def portray(copy: ReplicatedServer) -> torch.Tensor | None:
    """Return the state of a copy as bytes (1-D uint8), or None if not possible now.

    Raises:
        TypeError: a field has a class that is not listed here.
    """
    if not quiet(copy.server):
        return None
    teller = _Teller(copy.server.model, _Classes(copy.server))
    return teller.bytes(
        {
            "server": teller.tell(copy.server),
            "extensions": teller.tell(copy.server.hooks.extensions),
            "lines": teller.tell(copy.lines),
            **teller.model(),
        }
    )


def restore(copy: ReplicatedServer, data: torch.Tensor) -> None:
    """Give a new copy the state in these bytes.

    Raises:
        ProtocolError: `portray` has not made the bytes.
    """
    try:
        text, tensors = _opened(data)
        tree = json.loads(text)
        server = copy.server
        if tree["schema"]:
            _mold(server, tree["schema"])
        reader = _Reader(server.model, tensors, tree["sizes"], _Classes(server))
        reader.fill(server, tree["server"])
        reader.read(tree["extensions"], server.hooks.extensions)
        reader.model(tree)
        copy.lines = reader.read(tree["lines"], {})
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error, RuntimeError) as error:
        raise m.ProtocolError(f"not the state of a server: {error!r}") from error


def _mold(server: Server, text: str) -> None:
    """Make the server's model, as `Server._open` does when a worker has described it."""
    server.state.open(server.startup.mold(parse_schema(text)))


# --- writing -----------------------------------------------------------------------------------------------------


class _Teller:
    """Turns objects into plain data, and collects the tensors in them."""

    def __init__(self, model: ParameterShard | None, classes: _Classes) -> None:
        self._model, self._classes = model, classes
        self._tensors: list[torch.Tensor] = []
        self._views = None if model is None else BufferViews(model.flats, frozenset({VALUES}))
        self._known: set[int] = set()  # objects that were told already: several parts of a server refer to one

    def tell(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind in (Address, tuple, list, set, frozenset, dict, deque, bytes):
            return self._container(kind, value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, m.Message):
            number, meta = m.encode(value)
            return {"m": [number, meta.hex(), self.tell(value.body)]}
        if isinstance(value, type) and issubclass(value, m.Message):
            return {"c": value.KIND}
        if callable(value) or isinstance(value, _NEVER):
            return {"k": 0}
        if self._classes.known.get(kind.__name__) is kind:
            if kind not in self._classes.data:
                if id(value) in self._known:
                    return {"k": 0}
                self._known.add(id(value))
            own = _OWN.get(kind.__name__, ())
            return {"o": [kind.__name__, {n: self.tell(v) for n, v in _fields(value) if n not in own}]}
        if isinstance(value, ServerExtension) and not value.has_begun():
            return {"k": 0}  # a fresh one holds as much
        if isinstance(value, Server):  # of a kind that has more fields
            raise TypeError(f"{kind.__name__} cannot have a second copy, only Server can")
        raise TypeError(f"a server holds a {kind.__name__}, which a state transfer does not support")

    def _container(self, kind: type, value: Any) -> Any:
        if kind is bytes:
            return {"b": value.hex()}
        if kind is Address:
            return {"a": list(map(int, value))}
        if kind is dict:
            return {"d": [[self.tell(key), self.tell(item)] for key, item in value.items()]}
        return {_LETTERS[kind]: [self.tell(item) for item in value]}

    def _tensor(self, value: torch.Tensor) -> Any:
        where = None if self._views is None else self._views.find(value)
        return self._own(value) if where is None else {"v": list(astuple(where))}

    def _own(self, value: torch.Tensor) -> Any:
        self._tensors.append(value.detach())
        return {"x": [len(self._tensors) - 1, str(value.dtype).removeprefix("torch."), list(value.shape)]}

    def model(self) -> dict[str, Any]:
        """Return the model, with the parts of it that no worker sees."""
        model = self._model
        if model is None or self._views is None:
            return {"schema": "", "values": [], "updates": []}
        told = {
            "schema": model.schema.text(),
            "values": [self._own(flat) for flat in _flats(model)],
            "updates": [self._update(unit) for unit in model.units],
            "staging": self.tell(model.staging),
            "hyper": self.tell(list(map(_settings, model.hyper._good))),
        }
        for group, staging in model.staging.items():
            self._want(self._views, group, staging)
        return {**told, "parts": [[list(astuple(where)), self._own(part)] for where, part in self._views.wanted()]}

    @staticmethod
    def _want(views: BufferViews, group: int, staging: GradientStaging) -> None:
        """Record buffers that the server uses by name.

        These are the sums of a step in progress, and the values that a group was sent last.
        """
        if staging._reductions or staging.commits or staging.staged:
            views.want(f"mean {group}")
            views.want(f"total {group}")
        if staging._workers > 1:
            views.want(f"out {group}")

    def _update(self, unit: UpdateUnit) -> Any:
        state = [[key, name, self._plain(value)] for key, name, value in unit.update.state()]
        return [unit.update._hyper.hex(), state]

    def _plain(self, value: torch.Tensor | float) -> Any:
        return self.tell(_dense(value) if isinstance(value, torch.Tensor) else value)

    def bytes(self, tree: Mapping[str, Any]) -> torch.Tensor:
        """Return length, text and tensors as one tensor."""
        sizes = [_padded(tensor.nbytes) for tensor in self._tensors]
        text = json.dumps({**tree, "sizes": sizes}, separators=(",", ":")).encode()
        start = _padded(_LENGTH.size + len(text))
        whole = torch.zeros(start + sum(sizes), dtype=torch.uint8)
        head = _LENGTH.pack(len(text)) + text
        whole[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        for tensor, size in zip(self._tensors, sizes, strict=True):
            whole[start : start + tensor.nbytes] = tensor.contiguous().reshape(-1).view(torch.uint8)
            start += size
        return whole


_LETTERS: dict[type, str] = {tuple: "t", list: "l", set: "s", frozenset: "f", deque: "q"}
_MADE: Mapping[str, Callable[[list[Any]], Any]] = {"t": tuple, "l": list, "s": set, "f": frozenset, "q": deque}


def _fields(value: object) -> Iterator[tuple[str, Any]]:
    if hasattr(value, "__dict__"):
        yield from vars(value).items()
    else:
        yield from ((name, getattr(value, name)) for name in type(value).__slots__)  # type: ignore[attr-defined]


def _flats(model: ParameterShard) -> list[torch.Tensor]:
    return [model.flats.flat("values", space.index) for space in model.map.spaces]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return dict(group)


def _dense(value: torch.Tensor) -> torch.Tensor:
    """Return the elements in the order of memory."""
    return value if value.dim() == 0 or value.is_contiguous() else value.as_strided((value.numel(),), (1,))


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


# --- reading -----------------------------------------------------------------------------------------------------


def _opened(data: torch.Tensor) -> tuple[str, torch.Tensor]:
    (length,) = _LENGTH.unpack(bytes(data[: _LENGTH.size].tolist()))
    text = data[_LENGTH.size : _LENGTH.size + length].numpy().tobytes().decode()
    return text, data[_padded(_LENGTH.size + length) :]


class _Reader:
    """The inverse of `_Teller`."""

    def __init__(self, model: ParameterShard | None, data: torch.Tensor, sizes: list[int], classes: _Classes) -> None:
        self._model, self._classes = model, classes
        self._data = data
        self._starts = list(accumulate(sizes, initial=0))

    def fill(self, value: object, tree: Any) -> None:
        """Fill the fields of an existing object."""
        name, fields = tree["o"]
        if type(value) is not self._classes.known[name]:
            raise TypeError(f"a {name} in place of a {type(value).__name__}")
        for field, told in fields.items():
            read = self.read(told, getattr(value, field))
            if read is not getattr(value, field):
                setattr(value, field, read)

    def read(self, tree: Any, now: Any = None) -> Any:
        """Return the value of `tree`.

        The present value `now` is filled in place if possible.
        """
        if not isinstance(tree, dict):
            return tree
        ((letter, told),) = tree.items()
        if letter == "d":
            return self._dict(told, now)
        if letter in _MADE:
            if isinstance(now, tuple | list) and len(now) == len(told):
                return _MADE[letter](list(map(self.read, told, now)))
            return _MADE[letter]([self.read(item) for item in told])
        if letter == "o":
            return self._object(tree, now)
        return self._leaf(letter, told, now)

    def _leaf(self, letter: str, told: Any, now: Any) -> Any:
        if letter == "k":
            return now
        if letter == "b":
            return bytes.fromhex(told)
        if letter == "a":
            return Address(Role(told[0]), told[1], told[2])
        if letter == "c":
            return m.kind_of(told)
        if letter == "m":
            return m.decode(told[0], bytes.fromhex(told[1]), self.read(told[2]))
        if letter == "v":
            assert self._model is not None
            return BufferRange(*told).of(self._model.flats)
        if letter == "x":
            return self._tensor(*told)
        raise ValueError(f"{letter!r} is not a kind of value")

    def _dict(self, told: Any, now: Any) -> dict[Any, Any]:
        known: dict[Any, Any] = now if isinstance(now, dict) else {}
        before = dict(known)
        known.clear()
        for key, item in told:
            at = self.read(key)
            known[at] = self.read(item, before.get(at))
        return known

    def _object(self, tree: Any, now: Any) -> Any:
        cls = self._classes.known[tree["o"][0]]
        data = cls in self._classes.data
        if type(now) is not cls or data:
            if not data:
                raise TypeError(f"a {cls.__name__} in place of another object")
            now = object.__new__(cls)
            for name, told in tree["o"][1].items():
                object.__setattr__(now, name, self.read(told))
            return now
        self.fill(now, tree)
        return now

    def _tensor(self, index: int, dtype: str, shape: list[int]) -> torch.Tensor:
        kind = torch_dtype(dtype)
        count = torch.Size(shape).numel()
        start, nbytes = self._starts[index], count * kind.itemsize
        return self._data[start : start + nbytes].clone().view(kind).reshape(shape)

    def model(self, tree: Any) -> None:
        """Restore values, optimizer state, and the data beside them."""
        model = self._model
        if model is None:
            return
        for flat, told in zip(_flats(model), tree["values"], strict=True):
            flat.copy_(self.read(told))
        for where, part in tree["parts"]:
            BufferRange(*where).of(model.flats).copy_(self.read(part))
        for unit, (hyper, state) in zip(model.units, tree["updates"], strict=True):
            for key, name, told in state:
                value = self.read(told)
                unit.update.load_state(key, name, self._shaped(unit, key, value) if unit.whole else value)
            if hyper:
                unit.update._set(bytes.fromhex(hyper))
        self.read(tree["staging"], model.staging)
        model.hyper._good = tuple(self.read(tree["hyper"]))

    def _shaped(self, unit: UpdateUnit, key: int, value: Any) -> Any:
        """Return state of a whole tensor with the memory order of that tensor."""
        assert self._model is not None
        described = self._model.map.parameters[self._model.map.segments[key].parameter]
        if isinstance(value, torch.Tensor) and value.dim() == 1 and tuple(value.shape) != described.shape:
            return value.as_strided(described.shape, described.stride)
        return value
