"""The client of the model's buffers, such as running averages, at a job's end."""

from collections.abc import Sequence

import torch

from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.client.client_context import ClientModel, ServerChannel
from topotrain.core.client.client_extension import ClientExtension
from topotrain.core.client.value_pull import ValuePull
from topotrain.core.model.body_codec import present_body
from topotrain.core.model.schema import ModelBuffer


class ModelBufferClient(ClientExtension):
    """Sends a worker's buffers to server (0,0). Worker (0,0) reads those of all."""

    messages = (m.ModelBufferValue, m.LastWrites)

    def __init__(self) -> None:
        self.last_writes: dict[tuple[int, int], torch.Tensor] = {}
        """Worker (0,0), after `final`: group and index of a worker -> the body of its LastWrites."""
        self._parameters = 0
        self._echoed = False
        self._described: Sequence[ModelBuffer] = ()
        self._values: dict[tuple[int, int], torch.Tensor] = {}
        self._groups = 0  # how many groups have sent buffers; known once all have arrived

    def bind(self, channel: ServerChannel, model: ClientModel, values: ValuePull) -> None:
        self._channel = channel

    def open(self, described: Sequence[ModelBuffer], parameters: int) -> None:
        """The model is known, and has these buffers and so many parameters."""
        self._described, self._parameters = described, parameters

    def place(self, sender: Address, message: m.Message) -> torch.Tensor | None:
        """Memory for one buffer, or None for one that the model does not have."""
        if isinstance(message, m.ModelBufferValue) and 0 <= message.index < len(self._described):
            return torch.empty(self._described[message.index].nbytes, dtype=torch.uint8)
        return torch.empty(8 * self._parameters, dtype=torch.uint8) if isinstance(message, m.LastWrites) else None

    def handle(self, sender: Address, message: m.Message) -> None:
        """Take a buffer of a group, the number of groups after the last, or a LastWrites."""
        if isinstance(message, m.LastWrites):
            self._echoed = self._echoed or message.body is None
            if message.body is not None:
                self.last_writes[(message.group, message.index)] = present_body(message)
            return
        assert isinstance(message, m.ModelBufferValue)
        if message.index < 0:
            self._groups = message.group
            return
        if message.index >= len(self._described):
            raise m.ProtocolError(f"{sender} sends model buffer {message.index} of {len(self._described)}")
        self._values[(message.group, message.index)] = present_body(message)

    def put(self, buffers: Sequence[torch.Tensor]) -> None:
        """Send this worker's share of the buffers. In most jobs worker 0 sends all."""
        channel = self._channel
        for index, buffer in enumerate(buffers):
            if self._described[index].sending_worker == channel.me.index:
                # A copy, because the script may change the buffer before the message is sent.
                body = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).clone()
                channel.send(channel.first_server, m.ModelBufferValue(channel.me.group, index, body=body))
        if channel.me.index == 0:
            channel.send(channel.first_server, m.ModelBufferValue(channel.me.group, -1))

    def tell_writes(self, digests: torch.Tensor) -> None:
        """Send worker (0,0) the changes after the script's last step: a LastWrites body."""
        me = self._channel.me
        self._channel.send(self._channel.first_server, m.LastWrites(me.group, me.index, body=digests))
        # Otherwise the end of the script, which goes to other servers, could overtake it.
        self._channel.wait_until(lambda: self._echoed)

    def final(self) -> dict[int, dict[int, torch.Tensor]]:
        """Worker (0,0): wait for the buffers of all groups: group -> index -> bytes."""
        self._channel.send(self._channel.first_server, m.BufferRequest())
        each = len(self._described)
        # The number of groups may overtake the last buffer on a transport that reorders.
        self._channel.wait_until(lambda: self._groups > 0 and len(self._values) == self._groups * each)
        found: dict[int, dict[int, torch.Tensor]] = {}
        for (group, index), body in self._values.items():
            found.setdefault(group, {})[index] = body
        return found
