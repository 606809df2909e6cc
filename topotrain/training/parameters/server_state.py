"""The optimizer's state, as the servers hold it and as `optimizer.state` has it."""

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from topotrain.config.sharding import SliceMap
from topotrain.core.client.optimizer_state import OptimizerStateClient
from topotrain.core.model.schema import torch_dtype
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

    def gather(self, number: int = 0) -> None:
        """Fill `state` of this optimizer with the servers' state."""
        held: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        whole: set[tuple[torch.Tensor, str]] = set()
        for part in self._client.get():
            segment = self._map.segments[self._map.buckets[part.bucket].pieces[part.piece].segment]
            if self._map.parameters[segment.parameter].optimizer != number:
                continue
            tensor = self._parts.tensors[segment.parameter]
            entry = held.setdefault(tensor, {})
            if part.body is None:
                # A number, such as a count of steps. Each piece has it; the last one counts.
                entry[part.key] = torch.tensor(part.number)
            else:
                self._place(entry, part, part.body)
                whole.add((tensor, part.key))
        # As in torch: tensors are on the device of their parameter, and numbers stay on the CPU.
        for parameter, key in whole:
            if not parameter.is_meta:
                held[parameter][key] = held[parameter][key].to(parameter.device)
        self._optimizers[number].state.clear()
        self._optimizers[number].state.update(held)

    def _place(self, entry: dict[str, torch.Tensor], part: StatePart, body: torch.Tensor) -> None:
        piece = self._map.buckets[part.bucket].pieces[part.piece]
        segment = self._map.segments[piece.segment]
        if part.key not in entry:
            described = self._map.parameters[segment.parameter]
            # The pieces are in the order of the memory, which strides (channels_last) may permute.
            laid_out = torch.empty(described.count, dtype=torch_dtype(described.dtype))
            entry[part.key] = laid_out.as_strided(described.shape, described.stride)
        flat = entry[part.key].as_strided((entry[part.key].numel(),), (1,))
        at = segment.start + piece.lo - segment.lo
        flat[at : at + piece.hi - piece.lo] = body.view(flat.dtype)

    def scatter(self, number: int = 0) -> None:
        """Load `state` of this optimizer into the servers and clear it here."""
        state = self._optimizers[number].state
        if self._index is not None:
            index_of = {id(tensor): index for index, tensor in enumerate(self._parts.tensors)}
            for tensor, entry in state.items():
                space, _ = self._map.offsets[index_of[id(tensor)]]
                # One worker of the group loads each parameter. In a split model that is not always worker 0.
                if self._map.spaces[space].sending_worker == self._index:
                    for key, value in entry.items():
                        self._put(index_of[id(tensor)], key, value)
        state.clear()

    def _put(self, index: int, key: str, value: object) -> None:
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
                self._client.put(bucket, bucket.pieces.index(piece), key, part)


def _as_number(value: object) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.dim() == 0 else None
    if isinstance(value, int | float):
        return float(value)
    raise RuntimeError(f"optimizer state of type {type(value).__name__} cannot be loaded into the servers")
