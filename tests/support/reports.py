"""Takes the place of what shows events and texts to the user, and of the host of a server."""

import threading

from topotrain.core.events import Event, Notifier


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
