"""Tensors that workers of a group send each other: their keys, and arrivals."""

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum

import torch


class ControlEdge(IntEnum):
    """Values of `TensorKey.edge` of tensors that move along no edge of a program."""

    HELLO = -1  # state of a worker at the beginning of a forward
    STEPPED = -2  # notice that a worker has called optimizer.step()
    RANDOM_STATE = -3  # state of torch's random generator
    PIECE = -4  # piece of a tensor that worker 0 gathers
    PIECE_WRITTEN = -5  # ack of a piece
    DRAW = -6  # notice that a worker goes on to other batches


@dataclass(frozen=True, slots=True)
class TensorKey:
    """Identifies a tensor by forward, micro-batch, edge, and direction."""

    forward: int
    micro: int
    edge: int
    backward: bool  # the gradient of the value, which is sent back


@dataclass(slots=True)
class ArrivedTensors:
    """Tensors that have arrived and were not taken yet. The caller locks it."""

    _came: dict[tuple[int, TensorKey], deque[tuple[torch.Tensor, bool]]] = field(default_factory=dict)

    def put(self, source: int, key: TensorKey, tensor: torch.Tensor, grad: bool) -> None:
        """Add a tensor that has arrived."""
        # A queue, because two backwards over the same graph use a key twice.
        self._came.setdefault((source, key), deque()).append((tensor, grad))

    def has(self, source: int, key: TensorKey) -> bool:
        """Return whether there is a tensor to take."""
        return (source, key) in self._came

    def pop(self, source: int, key: TensorKey) -> tuple[torch.Tensor, bool]:
        """Return the first tensor that arrived. Raises KeyError if there is none."""
        queue = self._came[source, key]
        first = queue.popleft()
        # Removed, since `has` looks for the key only.
        if not queue:
            del self._came[source, key]
        return first

    def __len__(self) -> int:
        return sum(map(len, self._came.values()))
