"""The way from worker to worker inside a group: a tensor goes out under a key, and somebody asks for that key.

What a road would be (a socket, shared memory, a dictionary) is not said here.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

import torch

HELLO = -1  # `TensorKey.edge` of the tensor with which a forward begins
STEPPED = -2  # and of the word that a worker has gone on to the next step


@dataclass(frozen=True, slots=True)
class TensorKey:
    """What a tensor is: it belongs to micro-batch `micro` of forward `forward` and goes over edge `edge`.

    backward: it is the gradient, on its way back.
    """

    forward: int
    micro: int
    edge: int
    backward: bool


class ActivationChannel(Protocol):
    """One worker's door to the others of its group."""

    me: int
    """This worker's index in the group."""
    size: int
    """Workers in the group."""

    def send(self, to: int, key: TensorKey, tensor: torch.Tensor, grad: bool = False) -> None:
        """Never waits. `tensor` has been read when this returns.

        grad: forward, the sender wants a gradient back; backward, there is one (else `tensor` is empty: zero).
        """
        ...

    def here(self, source: int, key: TensorKey) -> bool:
        """Whether `take` would not wait. Raises as `take` does."""
        ...

    def take(self, source: int, key: TensorKey) -> tuple[torch.Tensor, bool]:
        """What was sent, first come first served where a key was used twice; the tensor belongs to the caller.

        Raises:
            JobError, PeerLost: it will not come.
        """
        ...

    def wait_any(self, wanted: Collection[tuple[int, TensorKey]]) -> None:
        """Return when one of (source, key) is here. Raises as `take` does."""
        ...


@dataclass(slots=True)
class ArrivedTensors:
    """What has come and nobody has taken yet. It knows no lock: whoever shares it among threads has one."""

    _came: dict[tuple[int, TensorKey], deque[tuple[torch.Tensor, bool]]] = field(default_factory=dict)

    def put(self, source: int, key: TensorKey, tensor: torch.Tensor, grad: bool) -> None:
        """A tensor has come. A graph that is gone through backwards twice uses its keys twice: hence a queue."""
        self._came.setdefault((source, key), deque()).append((tensor, grad))

    def here(self, source: int, key: TensorKey) -> bool:
        """Whether there is something to take."""
        return (source, key) in self._came

    def take(self, source: int, key: TensorKey) -> tuple[torch.Tensor, bool]:
        """The first that came. Raises KeyError where nothing has."""
        queue = self._came[source, key]
        first = queue.popleft()
        if not queue:
            del self._came[source, key]
        return first

    def __len__(self) -> int:
        return sum(map(len, self._came.values()))
