"""The time of a process for its servers."""

import threading
import time
from typing import Protocol

from topotrain.core.protocol import Message
from topotrain.core.server.server_context import TimerHost


class OwnMessages(Protocol):
    """The endpoint of a server that handles messages of its own process."""

    def handle_own(self, message: Message) -> None:
        """Handle a message, with the server itself as its sender."""
        ...


class ServerClock(TimerHost):
    """The clock of this process, which wakes no server.

    A second copy of a server has one: its messages come from the first copy.
    """

    def now(self) -> float:
        return time.monotonic()

    def wake(self, seconds: float, message: Message) -> None:
        """Do nothing."""


class ProcessTimer(ServerClock):
    """The clock of this process, which wakes one server on a thread of its own."""

    def __init__(self, endpoint: OwnMessages) -> None:
        self._endpoint = endpoint

    def wake(self, seconds: float, message: Message) -> None:
        # A thread for each message: a server asks for one in a round. It inherits the flushing of denormals.
        # The end of a job waits for none of them.
        threading.Thread(target=self._send, args=(seconds, message), name="timer", daemon=True).start()

    def _send(self, seconds: float, message: Message) -> None:
        time.sleep(seconds)
        self._endpoint.handle_own(message)
