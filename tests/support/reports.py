"""Takes the place of what shows events and texts to the user, of the host of a server, and of a transport."""

import threading
from collections.abc import Callable

from topotrain.config.topology import Address
from topotrain.core.events import Event, Notifier
from topotrain.core.protocol import Message
from topotrain.core.transport_contract import MessageSender


class EventList(list[Event]):
    """An `EventSink` that keeps the events."""

    def emit(self, event: Event) -> None:
        self.append(event)


class TextList(list[str], Notifier):
    """A notifier that keeps the texts."""

    def notify(self, text: str) -> None:
        self.append(text)


class Woken(threading.Event):
    """The host of a server. It is set when the snapshot writer has messages."""

    def poke(self) -> None:
        self.set()


class FunctionSender:
    """Hands each message that an endpoint sends to a function of the test."""

    def __init__(self, function: Callable[[Address, Message], None]) -> None:
        self.send = function


class SentMessages(MessageSender):
    """Keeps the address and the message of each that a server sends, in order."""

    def __init__(self) -> None:
        self.sent: list[tuple[Address, Message]] = []

    def send(self, to: Address, message: Message) -> None:
        self.sent.append((to, message))
