"""The restart of a worker: the announcement, and messages for the earlier process."""

from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.client.client_context import ServerChannel, StepEnd
from topotrain.core.client.client_extension import ClientExtension


class Rejoin(ClientExtension):
    """One worker's return to its servers.

    Args:
        channel: the worker's channel to its servers.
        incarnation: of the worker's group. At 0 no server has to be told of a return.
    """

    messages = (m.WorkerRejoined,)

    def __init__(self, channel: ServerChannel, incarnation: int) -> None:
        self._channel, self._incarnation = channel, incarnation
        self._pending = {*channel.servers, channel.first_server} if incarnation else set()
        self._ahead: set[Address] = set()

    def announce(self) -> None:
        """Announce the restart to all servers and wait for replies. Raises JobError."""
        # Sorted, so that a simulation of the same seed sends in the same order.
        for server in sorted(self._pending):
            self._channel.send(server, m.WorkerRejoined(self._incarnation))
        self._channel.wait_until(lambda: not self._pending)

    def admits(self, sender: Address, message: m.Message) -> bool:
        """Whether a message is for this process."""
        # Until a server has replied, all but these may be for the earlier process.
        return sender not in self._pending or isinstance(message, m.WorkerRejoined | m.Fail)

    def handle(self, sender: Address, message: m.Message) -> None:
        """A server knows of the return of this process, or of an earlier one."""
        assert isinstance(message, m.WorkerRejoined)
        # A reply may be for an earlier process of this worker.
        if sender in self._pending and message.incarnation == self._incarnation:
            self._pending.discard(sender)
            if message.begun:
                self._ahead.add(sender)

    def is_ahead(self, server: Address) -> bool:
        """Whether a server's values and state are newer than those of a restarted script."""
        return server in self._ahead

    def before_commit(self, step: int, end: StepEnd) -> None:
        """With its first step the script is as far as the servers."""
        self._ahead.clear()
