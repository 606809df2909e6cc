"""A worker's part of the messages with the state of an inner optimizer."""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from topotrain.config.topology import Address
from topotrain.core.client.client_context import ClientModel, ServerChannel
from topotrain.core.client.client_extension import ClientExtension
from topotrain.core.client.value_pull import ValuePull
from topotrain.core.model.body_codec import present_body
from topotrain.core.protocol import Message, ProtocolError
from topotrain.extensions.inner_state.inner_state_messages import InnerStatePart, InnerStateRequest

PART = 2 << 20
"""Bytes of a part, but for the last."""
LARGEST = 1 << 40
"""Bytes of a state, at most."""


class StateSource(Protocol):
    """Has a state for others."""

    def copy(self) -> torch.Tensor | None:
        """The present state as 1-D uint8. None: it cannot be given."""
        ...


class CopyMoment:
    """The moment at which a state may be copied for others: at once."""

    def when_due(self, question: "StateQuestion") -> None:
        """Answer the question when the state may be copied."""
        question.answer()


@dataclass(frozen=True, slots=True)
class StateQuestion:
    """The request of another group for the first part of a state.

    client: gives it.
    """

    client: "InnerStateClient"
    request: InnerStateRequest

    def answer(self) -> None:
        """Copy the state, and send its first part."""
        self.client.give_first(self.request)


def part_memory(sender: Address, message: InnerStatePart) -> torch.Tensor | None:
    """Return memory for a part. Raises ProtocolError."""
    # The sizes come from a peer, and memory is made for them part by part.
    if not message.parts:
        return None
    if not 0 < message.nbytes <= LARGEST or message.parts != -(-message.nbytes // PART):
        raise ProtocolError(f"{sender}: an optimizer's state of {message.nbytes} bytes in {message.parts} parts")
    if message.part >= message.parts:
        raise ProtocolError(f"{sender}: part {message.part} of {message.parts} of an optimizer's state")
    return torch.empty(min(PART, message.nbytes - message.part * PART), dtype=torch.uint8)


@dataclass(slots=True)
class _Arrival:
    """A state that is being received."""

    number: int = 0
    parts: list[torch.Tensor] = field(default_factory=list)

    def take(self, message: InnerStatePart, body: torch.Tensor) -> bool:
        """Add a part; whether it was the next one."""
        # Another donor begins again. Numbers rise, so a late part of the former one is not taken for a beginning.
        if message.number > self.number:
            self.number, self.parts = message.number, []
        if message.number != self.number or message.part != len(self.parts):
            return False
        self.parts.append(body)
        return True


class InnerStateClient(ClientExtension):
    """Gives the state of this worker's optimizer to others, and asks for theirs."""

    messages = (InnerStateRequest, InnerStatePart)

    def __init__(self) -> None:
        self._source: StateSource | None = None
        self._moment = CopyMoment()
        self._held: tuple[int, torch.Tensor] | None = None  # the copy of a transfer that is under way
        self._coming = _Arrival()
        self._asks = False
        self._state: torch.Tensor | None = None

    def bind(self, channel: ServerChannel, model: ClientModel, values: ValuePull) -> None:
        self._channel = channel

    def offer(self, source: StateSource, moment: CopyMoment | None = None) -> None:
        """Give this state to those that ask. moment: when it may be copied; None: at once."""
        self._source, self._moment = source, moment or CopyMoment()

    def ask(self) -> None:
        """Ask for the state of another worker group. All workers of this group ask."""
        self._asks = True
        self._request()

    def answer(self) -> torch.Tensor | None:
        """Wait for the state, 1-D uint8. None: no other group could give one."""
        self._channel.wait_until(lambda: not self._asks)
        state, self._state = self._state, None
        return state

    def _request(self) -> None:
        # Mostly from the thread of a connection, which must not send what the worker's own thread has to send first.
        self._channel.try_send(self._channel.servers[0], InnerStateRequest(self._channel.me.group))

    def place(self, sender: Address, message: Message) -> torch.Tensor | None:
        return part_memory(sender, message) if isinstance(message, InnerStatePart) else None

    def handle(self, sender: Address, message: Message) -> None:
        if isinstance(message, InnerStateRequest):
            self._give(message)
        elif isinstance(message, InnerStatePart) and self._asks:
            self._take(message)

    # --- receiving -----------------------------------------------------------------------------------------------

    def _take(self, message: InnerStatePart) -> None:
        if not message.parts:
            self._coming, self._asks = _Arrival(), False
        elif self._coming.take(message, present_body(message)):
            if message.part + 1 < message.parts:
                self._request()
                return
            self._state, self._coming, self._asks = torch.cat(self._coming.parts), _Arrival(), False

    # --- giving --------------------------------------------------------------------------------------------------

    def _give(self, message: InnerStateRequest) -> None:
        if message.part < 0:
            if self._held is not None and self._held[0] == message.number:
                self._held = None
            return
        # A worker that itself waits for a state has only an old one.
        if message.part == 0 and self._source is not None and not self._asks:
            self._moment.when_due(StateQuestion(self, message))
            return
        if message.part == 0:
            self._held = None
        self._send_part(message)

    def give_first(self, message: InnerStateRequest) -> None:
        """Copy the state, and send its first part."""
        with self._channel.waiter.update():
            state = None if self._source is None else self._source.copy()
            self._held = None if state is None else (message.number, state)
            self._send_part(message)

    def _send_part(self, message: InnerStateRequest) -> None:
        self._channel.try_send(self._channel.servers[0], self._part(message))

    def _part(self, message: InnerStateRequest) -> InnerStatePart:
        if self._held is None or self._held[0] != message.number:
            return InnerStatePart(message.group, message.number, message.part, 0, 0)
        state = self._held[1]
        parts = -(-state.numel() // PART)
        body = state[message.part * PART : (message.part + 1) * PART]
        if message.part + 1 >= parts:
            self._held = None
        return InnerStatePart(message.group, message.number, message.part, parts, state.numel(), body=body)
