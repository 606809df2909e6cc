"""Tensors that workers of a group send each other: their keys, and arrivals."""

from collections import deque
from dataclasses import dataclass, field

import torch

HELLO = -1  # `TensorKey.edge` of the tensor that a worker sends when a forward begins
STEPPED = -2  # `TensorKey.edge` of the notice that a worker has called optimizer.step()


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
