"""Client of the worker-state store: saves and loads the state of one worker."""

import torch

from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.client.client_context import ClientModel, ServerChannel
from topotrain.core.client.client_extension import ClientExtension
from topotrain.core.client.value_pull import ValuePull
from topotrain.core.model.body_codec import present_body
from topotrain.extensions.resume.worker_state_messages import WorkerStatePart, WorkerStateRequest
from topotrain.extensions.resume.worker_state_store import EPOCH, SINCE, PartialState, cut, room


class WorkerStateClient(ClientExtension):
    """One worker's client of the store (`WorkerStateStore`)."""

    messages = (WorkerStatePart,)

    def __init__(self) -> None:
        self._arrivals: dict[int, PartialState] = {}
        self._loaded: dict[int, torch.Tensor | None] = {}

    def bind(self, channel: ServerChannel, model: ClientModel, values: ValuePull) -> None:
        self._channel = channel

    def save(self, number: int, data: torch.Tensor) -> None:
        """Save this worker's state under a number (see `WorkerStatePart`).

        data: 1-D uint8. It is sent later, so it must not change any more.
        """
        for part in cut(self._channel.me, number, data):
            self._channel.send(self._channel.first_server, part)

    def load(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the state when the last epoch began, and its changes since, or None each."""
        # Replies of an earlier call must not count as those of this one.
        with self._channel.waiter.update():
            self._arrivals.clear()
            self._loaded.clear()
        self._channel.send(self._channel.first_server, WorkerStateRequest())
        self._channel.wait_until(lambda: self._loaded.keys() >= {EPOCH, SINCE})
        return self._loaded[EPOCH], self._loaded[SINCE]

    def place(self, sender: Address, message: m.Message) -> torch.Tensor | None:
        """Return memory for a part. Raises ProtocolError for another worker's state."""
        return room(self._channel.me, message) if isinstance(message, WorkerStatePart) else None

    def handle(self, sender: Address, message: m.Message) -> None:
        assert isinstance(message, WorkerStatePart)
        # The reply that there is no such state.
        if not message.parts:
            if message.number in (EPOCH, SINCE):
                self._loaded[message.number] = None
            return
        body = present_body(message)
        whole = self._arrivals.setdefault(message.number, PartialState()).take(message, body)
        if whole is not None:
            self._loaded[message.number] = whole
