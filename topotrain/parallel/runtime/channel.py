"""Contract of a channel between the workers of a group: tensors under keys.

A sender sends a tensor under a key, and the receiver takes it by that key. The transport (a socket, shared memory, a
dictionary) is not specified here.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

import torch

HELLO = -1  # `TensorKey.edge` of the tensor that a worker sends when a forward begins
STEPPED = -2  # `TensorKey.edge` of the notice that a worker has called optimizer.step()


@dataclass(frozen=True, slots=True)
class TensorKey:
    """Identifies a tensor by forward, micro-batch and edge.

    `backward` marks the gradient of the value, which is sent back.
    """

    forward: int
    micro: int
    edge: int
    backward: bool


class ActivationChannel(Protocol):
    """One worker's channel to the other workers of its group."""

    me: int
    """This worker's index in the group."""
    size: int
    """Workers in the group."""

    def send(self, to: int, key: TensorKey, tensor: torch.Tensor, grad: bool = False) -> None:
        """Send a tensor without waiting; `tensor` has been read on return.

        Args:
            grad: in the forward, the sender wants a gradient back. In the backward, there is a gradient. Without one
                `tensor` is empty, which means zero.
        """
        ...

    def here(self, source: int, key: TensorKey) -> bool:
        """Return whether `take` would not wait.

        Raises:
            JobError, PeerLost: as `take`.
        """
        ...

    def take(self, source: int, key: TensorKey) -> tuple[torch.Tensor, bool]:
        """Wait for a tensor and return it and its `grad`.

        Tensors under the same key come in the order they were sent. The tensor belongs to the caller.

        Raises:
            JobError, PeerLost: the tensor will not arrive.
        """
        ...

    def wait_any(self, wanted: Collection[tuple[int, TensorKey]]) -> None:
        """Wait until one of (source, key) has arrived.

        Raises:
            JobError, PeerLost: as `take`.
        """
        ...


@dataclass(slots=True)
class ArrivedTensors:
    """Tensors that have arrived and were not taken yet.

    It has no lock. Threads that share it must have one.
    """

    _came: dict[tuple[int, TensorKey], deque[tuple[torch.Tensor, bool]]] = field(default_factory=dict)

    def put(self, source: int, key: TensorKey, tensor: torch.Tensor, grad: bool) -> None:
        """Add a tensor that has arrived.

        Each key has a queue, because two backwards over the same graph use its keys twice.
        """
        self._came.setdefault((source, key), deque()).append((tensor, grad))

    def here(self, source: int, key: TensorKey) -> bool:
        """Return whether there is a tensor to take."""
        return (source, key) in self._came

    def take(self, source: int, key: TensorKey) -> tuple[torch.Tensor, bool]:
        """Return the first tensor that arrived.

        Raises:
            KeyError: no tensor has arrived under this key.
        """
        queue = self._came[source, key]
        first = queue.popleft()
        if not queue:
            del self._came[source, key]
        return first

    def __len__(self) -> int:
        return sum(map(len, self._came.values()))
