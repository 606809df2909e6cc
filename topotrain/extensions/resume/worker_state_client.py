"""Client of the worker-state store, for the states of one worker group."""

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
    """Saves a worker's state in the store, and loads those of its group."""

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

    def load(self, index: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return a worker's state when its last epoch began, and its changes since.

        None each: there is none.

        index: the worker, in the group of this one.
        """
        # Replies of an earlier call must not count as those of this one.
        with self._channel.waiter.update():
            self._arrivals.clear()
            self._loaded.clear()
        self._channel.send(self._channel.first_server, WorkerStateRequest(index))
        self._channel.wait_until(lambda: self._loaded.keys() >= {EPOCH, SINCE})
        return self._loaded[EPOCH], self._loaded[SINCE]

    def load_group(self) -> list[torch.Tensor | None]:
        """Return the state of each worker of the group when its last epoch began."""
        return [self.load(index)[0] for index in range(self._channel.group_size)]

    def place(self, sender: Address, message: m.Message) -> torch.Tensor | None:
        """Return memory for a part. Raises ProtocolError for the state of another group."""
        if not isinstance(message, WorkerStatePart):
            return None
        return room(self._channel.me._replace(index=message.index), message)

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
