"""Memory for gradients that a standby on the same host reads, too.

A gradient is received into a buffer of its worker, and both copies of the server read it there. The standby may be
behind, so the next gradient must not overwrite what the standby still reads. Each buffer therefore has a spare one, and
a gradient goes to the one that is free.

A worker sends a gradient only after a message to its group. The standby has read all earlier gradients of the group
when it has handled the event of that message. A message leaves the server when its event has reached the standby, which
has handled all events before it by then. So the standby is behind by one message to the group, and two buffers are
enough. A third one, of its own memory, is there for cases that no one has thought of.
"""

import torch

from topotrain.config.sharding import Bucket
from topotrain.config.topology import Address
from topotrain.core.model.schema import FlatBuffers
from topotrain.core.protocol import GradientOverride, Message, Push
from topotrain.core.server.server import Server


class LandingBuffers:
    """Which memory of the primary may be overwritten."""

    def __init__(self) -> None:
        self._handled = 0  # the standby has handled the events up to this one
        self._answered: dict[int, int] = {}  # worker group -> the last event that has sent its workers a message
        # Worker and bucket -> whether its last gradient is in the spare buffer, and the event that must be handled
        # before the other buffer is overwritten.
        self._last: dict[tuple[Address, int], tuple[bool, int]] = {}

    def answered(self, group: int, event: int) -> None:
        """Note that an event sends a message to workers of this group."""
        self._answered[group] = event

    def handled(self, event: int) -> None:
        """Note that the standby has handled the events up to this one."""
        self._handled = max(self._handled, event)

    def place(self, server: Server, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        """Return memory for the body of a message to a server; see `wire.Endpoint.place`."""
        found, model = server.place(sender, message, viewable), server.model
        if found is None or model is None or not isinstance(message, Push | GradientOverride):
            return found
        return self.choose(sender, model.bucket(message.bucket), found, model.flats)

    def choose(self, worker: Address, bucket: Bucket, buffer: torch.Tensor, flats: FlatBuffers) -> torch.Tensor:
        """Return memory for the next gradient of a worker.

        Args:
            worker, bucket: of the gradient.
            buffer: the worker's part of its usual buffer, or memory for an encoded gradient.
            flats: has the spare buffer.
        """
        needed = self._answered.get(worker.group, 0)
        spare, other = self._last.get((worker, bucket.id), (False, 0))
        if self._handled < needed:
            if self._handled < other:
                return torch.empty_like(buffer)
            spare = not spare
            self._last[worker, bucket.id] = spare, needed
        return _spare(worker, bucket, buffer, flats) if spare else buffer


def _spare(worker: Address, bucket: Bucket, buffer: torch.Tensor, flats: FlatBuffers) -> torch.Tensor:
    name = f"spare {worker.group}/{worker.index}"
    if buffer.dtype is torch.uint8:  # an encoding: no gradient is of this type
        return flats.raw(f"{name} of {bucket.id}", buffer.numel())
    return flats.view(name, bucket)
