"""The client of the model's buffers (running averages, counters), which server (0,0) collects at a job's end."""

from collections.abc import Sequence

import torch

from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.client.client_extension import ClientAccess, ClientExtension
from topotrain.core.client.client_types import present_body
from topotrain.core.model.schema import ModelBuffer


class ModelBufferClient(ClientExtension):
    """Leaves a worker's buffers at server (0,0); worker (0,0) reads those of all groups."""

    messages = (m.ModelBufferValue,)

    def __init__(self) -> None:
        self._described: Sequence[ModelBuffer] = ()
        self._values: dict[tuple[int, int], torch.Tensor] = {}
        self._groups = 0  # how many have left theirs, once all have been told

    def bind(self, client: ClientAccess) -> None:
        """As `ClientExtension.bind`."""
        self._client = client

    def open(self, described: Sequence[ModelBuffer]) -> None:
        """The model is known, and has these buffers."""
        self._described = described

    def place(self, sender: Address, message: m.Message) -> torch.Tensor | None:
        """Memory for one buffer, or None for one that the model does not have."""
        if isinstance(message, m.ModelBufferValue) and 0 <= message.index < len(self._described):
            return torch.empty(self._described[message.index].nbytes, dtype=torch.uint8)
        return None

    def handle(self, sender: Address, message: m.Message) -> None:
        """A buffer of a group, or, after the last one, of how many groups there are."""
        assert isinstance(message, m.ModelBufferValue)
        if message.index < 0:
            self._groups = message.group
            return
        if message.index >= len(self._described):
            raise m.ProtocolError(f"{sender} speaks of model buffer {message.index}")
        self._values[(message.group, message.index)] = present_body(message)

    def put(self, buffers: Sequence[torch.Tensor]) -> None:
        """Leave those of the model's buffers (any shapes) at server (0,0) that this worker has to: in most jobs 0."""
        client = self._client
        for index, buffer in enumerate(buffers):
            if self._described[index].speaker == client.me.index:
                body = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).clone()
                client.tell(client.desk, m.ModelBufferValue(client.me.group, index, body=body))
        if client.me.index == 0:
            client.tell(client.desk, m.ModelBufferValue(client.me.group, -1))

    def final(self) -> dict[int, dict[int, torch.Tensor]]:
        """Worker (0,0): the buffers of every group that is there, as bytes: group -> index -> 1-D uint8."""
        self._client.tell(self._client.desk, m.BufferRequest())
        each = len(self._described)
        self._client.wait_until(lambda: self._groups > 0 and len(self._values) == self._groups * each)
        found: dict[int, dict[int, torch.Tensor]] = {}
        for (group, index), body in self._values.items():
            found.setdefault(group, {})[index] = body
        return found
