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
        """As `ClientExtension.bind`."""
        self._channel = channel

    def save(self, number: int, data: torch.Tensor) -> None:
        """Save this worker's state under a number (see `WorkerStatePart`).

        Args:
            data: 1-D uint8. It is sent later, so it must not change any more.
        """
        for part in cut(self._channel.me, number, data):
            self._channel.send(self._channel.first_server, part)

    def load(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the state when the last epoch began, and its changes since.

        Either is None if there is none.
        """
        with self._channel.waiter.update():
            self._arrivals.clear()
            self._loaded.clear()
        self._channel.send(self._channel.first_server, WorkerStateRequest())
        self._channel.wait_until(lambda: self._loaded.keys() >= {EPOCH, SINCE})
        return self._loaded[EPOCH], self._loaded[SINCE]

    def place(self, sender: Address, message: m.Message) -> torch.Tensor | None:
        """Return memory for a part.

        Raises:
            ProtocolError: it is a part of another worker's state.
        """
        return room(self._channel.me, message) if isinstance(message, WorkerStatePart) else None

    def handle(self, sender: Address, message: m.Message) -> None:
        """Receive a part of the state, or the reply that there is none."""
        assert isinstance(message, WorkerStatePart)
        if not message.parts:
            if message.number in (EPOCH, SINCE):
                self._loaded[message.number] = None
            return
        body = present_body(message)
        whole = self._arrivals.setdefault(message.number, PartialState()).take(message, body)
        if whole is not None:
            self._loaded[message.number] = whole
