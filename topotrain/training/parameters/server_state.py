"""The optimizer's state, as the servers hold it and as `optimizer.state` has it."""

import weakref
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from topotrain.config.sharding import SliceMap, first_of
from topotrain.core.client.optimizer_state import OptimizerStateClient
from topotrain.core.model.schema import torch_dtype
from topotrain.core.model.tensor_bits import version_of
from topotrain.core.optim.adapter import of_optimizer
from topotrain.core.protocol import StatePart
from topotrain.training.parameters.flat_parameters import ModelParts

NEW_GROUP = (
    "add_param_group after tt.prepare: give the optimizer all its groups before, also those of layers that train "
    "later; until then they are frozen with requires_grad_(False)"
)
"""The servers make the state of the optimizer's parameters before the first step."""


class ServerState:
    """Copies the state between one worker's optimizers and the servers.

    Args:
        optimizers: the job's, by number.
        client: reads and loads the pieces.
        index: index of this worker in its group, if the group loads the state into its servers. None: another does.
    """

    def __init__(
        self,
        parts: ModelParts,
        slice_map: SliceMap,
        optimizers: Sequence[Optimizer],
        client: OptimizerStateClient,
        index: int | None,
    ) -> None:
        self._parts, self._map, self._optimizers = parts, slice_map, optimizers
        self._client, self._index = client, index

    def gather(self, number: int = 0) -> dict[torch.Tensor, dict[str, Any]]:
        """The servers' state of this optimizer, by parameter."""
        held: dict[torch.Tensor, dict[str, Any]] = {}
        whole: set[tuple[torch.Tensor, str]] = set()
        for part in self._client.get():
            segment = self._map.segments[self._map.buckets[part.bucket].pieces[part.piece].segment]
            # Entries of a second optimizer of the parameter have its number in front.
            owner, key = of_optimizer(part.key)
            if number != (first_of(self._map.parameters[segment.parameter].optimizer) if owner is None else owner):
                continue
            tensor = self._parts.tensors[segment.parameter]
            entry = held.setdefault(tensor, {})
            if part.body is None:
                # A number, such as a count of steps. Each piece has it; the last one counts.
                entry[key] = torch.tensor(part.number)
            else:
                self._place(entry, key, part, part.body)
                whole.add((tensor, key))
        # As in torch: tensors are on the device of their parameter, and numbers stay on the CPU.
        for parameter, key in whole:
            if not parameter.is_meta:
                held[parameter][key] = held[parameter][key].to(parameter.device)
        return held

    def _place(self, entry: dict[str, torch.Tensor], key: str, part: StatePart, body: torch.Tensor) -> None:
        piece = self._map.buckets[part.bucket].pieces[part.piece]
        segment = self._map.segments[piece.segment]
        if key not in entry:
            described = self._map.parameters[segment.parameter]
            # The pieces are in the order of the memory, which strides (channels_last) may permute.
            laid_out = torch.empty(described.count, dtype=torch_dtype(described.dtype))
            entry[key] = laid_out.as_strided(described.shape, described.stride)
        flat = entry[key].as_strided((entry[key].numel(),), (1,))
        at = segment.start + piece.lo - segment.lo
        flat[at : at + piece.hi - piece.lo] = body.view(flat.dtype)

    def scatter(self, number: int, state: Mapping[Any, Mapping[str, object]], initial: bool = False) -> None:
        """Load this state of parameters into the servers; initial: they have none."""
        index_of = {id(tensor): index for index, tensor in enumerate(self._parts.tensors)}
        for tensor, entry in state.items():
            if id(tensor) not in index_of and not entry:
                continue  # rows that an extension keeps
            if id(tensor) not in index_of:
                raise RuntimeError(f"optimizer.state has {_short(tensor)}, which is no parameter that servers train")
            index = index_of[id(tensor)]
            space, _ = self._map.offsets[index]
            # One worker of the group loads each parameter. In a split model that is not always worker 0.
            if self._map.spaces[space].sending_worker != self._index:
                continue
            first = number == first_of(self._map.parameters[index].optimizer)
            cleared = {} if initial else {"": 0.0}
            for key, value in {**cleared, **entry}.items():
                self._put(index, key if first else f"{number} {key}", value, initial)

    def _put(self, index: int, key: str, value: object, initial: bool) -> None:
        described = self._map.parameters[index]
        number = _as_number(value)
        if number is None:
            assert isinstance(value, torch.Tensor)
            if value.numel() != described.count:
                raise RuntimeError(f"optimizer state {key!r} of {described.name} is not element-wise")
            laid_out = torch.empty(described.count, dtype=value.dtype).as_strided(described.shape, described.stride)
            # Through the strides of the parameter, so that elements and pieces agree.
            flat = laid_out.copy_(value).as_strided((described.count,), (1,)).to(torch_dtype(described.dtype))
        for segment in self._map.segments_of_parameter(index):
            for piece in self._map.pieces_of(segment.id):
                bucket = self._map.buckets[piece.bucket]
                # `piece` counts elements of the space, and `flat` those of the parameter.
                at = segment.start + piece.lo - segment.lo
                part = number if number is not None else flat[at : at + piece.hi - piece.lo].clone()
                self._client.put(bucket, bucket.pieces.index(piece), key, part, initial)


def _as_number(value: object) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.dim() == 0 else None
    if isinstance(value, int | float):
        return float(value)
    raise RuntimeError(f"optimizer state of type {type(value).__name__} cannot be loaded into the servers")


def _short(key: object) -> str:
    return f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)[:80]


class StateView(MutableMapping[Any, Any]):
    """`optimizer.state` while the servers hold it.

    It is read when the script looks at it. Changes of the script in it are written back before the next step.

    Args:
        read: gathers the servers' state.
    """

    def __init__(self, read: Callable[[], Mapping[Any, Mapping[str, Any]]]) -> None:
        self._read = read
        self._held: dict[Any, OrderedDict[str, Any]] | None = None
        self._seen: dict[Any, dict[str, object]] = {}
        self._lent: list[tuple[weakref.ref[Any], object]] = []  # read before the last step

    def _now(self) -> dict[Any, OrderedDict[str, Any]]:
        if self._held is None:
            self._held = {tensor: OrderedDict(entry) for tensor, entry in self._read().items()}
            # No copies: the state is larger than the model.
            self._seen = {tensor: _digests(entry) for tensor, entry in self._held.items()}
        return self._held

    def changes(self) -> dict[Any, Mapping[str, Any]]:
        """Return changes since the last step, by parameter. The state is then read anew.

        Raises:
            RuntimeError: the script has changed something that it had read before the last step.
        """
        self._lent = [(known, mark) for known, mark in self._lent if known() is not None]
        if any(thing is not None and _mark(thing) != mark for thing, mark in ((k(), m) for k, m in self._lent)):
            raise RuntimeError(
                "a part of optimizer.state that was read before the last step has been changed after it: the servers "
                "have another state by now. Read optimizer.state again behind each step"
            )
        held, self._held = self._held, None
        if held is None:
            return {}
        seen = self._seen
        lent = [thing for entry in held.values() for thing in (entry, *entry.values())]
        self._lent += [
            (weakref.ref(each), _mark(each)) for each in lent if isinstance(each, OrderedDict | torch.Tensor)
        ]
        empty: Mapping[str, Any] = {}
        keys = dict.fromkeys((*seen, *held))
        return {key: held.get(key, empty) for key in keys if _digests(held.get(key, empty)) != seen.get(key, {})}

    # As in a defaultdict(dict), which torch has here.
    def __getitem__(self, key: Any) -> Any:
        return self._now().setdefault(key, OrderedDict())

    def __setitem__(self, key: Any, value: Mapping[str, Any]) -> None:
        self._now()[key] = OrderedDict(value)

    def __delitem__(self, key: Any) -> None:
        del self._now()[key]

    def __contains__(self, key: object) -> bool:
        return key in self._now()

    def get(self, key: Any, default: Any = None) -> Any:
        """As that of a dict."""
        return self._now().get(key, default)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def __repr__(self) -> str:
        return repr(self._now())

    def __reduce__(self) -> Any:
        # A copy of the optimizer, or a file of it, has the state itself.
        return defaultdict, (dict,), None, None, iter([(key, dict(entry)) for key, entry in self.items()])


def _mark(thing: Any) -> object:
    return version_of(thing) if isinstance(thing, torch.Tensor) else [(key, id(value)) for key, value in thing.items()]


def _digests(entry: Mapping[str, Any]) -> dict[str, object]:
    return {key: _digest(value) for key, value in entry.items()}


def _digest(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    flat = value.detach().cpu().contiguous().view(-1)
    return flat.dtype, value.shape, zlib.crc32(flat.view(torch.uint8).numpy().data)
