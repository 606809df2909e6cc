"""The connections of a worker to the other workers of its group."""

from abc import abstractmethod
from collections.abc import Collection

from topotrain.config.topology import Address, Role
from topotrain.core.client.client_context import PeerLost, ServerChannel
from topotrain.core.client.client_extension import ClientExtension
from topotrain.core.protocol import Message
from topotrain.core.transport_contract import MessageSender, TransportError


class GroupChannel(ClientExtension):
    """Messages between the workers of a group, without a server.

    The client delivers messages on transport threads.

    Args:
        channel: the worker's channel to its servers.
        sender: sends the worker's messages. It never waits.
    """

    purpose = ""
    """The field or feature that needs these connections, for errors."""

    def __init__(self, channel: ServerChannel, sender: MessageSender) -> None:
        self.me, self.size = channel.me.index, channel.group_size
        self._channel, self._sender, self._group = channel, sender, channel.me.group
        self._connected: set[int] = set()
        self._left: dict[int, str] = {}

    @property
    @abstractmethod
    def hello(self) -> Message:
        """The first message on a new connection, from the worker that has opened it."""

    def send_hello(self, to: int) -> None:
        """Send the first message to a worker to which this worker has connected."""
        self._post(to, self.hello)

    def wait_for_hellos(self, workers: Collection[int]) -> None:
        """Wait until these workers have connected to this one.

        Raises:
            JobError, PeerLost: the job has failed, or a worker is lost.
        """
        channel = self._channel
        # A connection is made by one side only. The hello shows the other side that it exists.
        channel.wait_until(lambda: self._connected.issuperset(workers) or self._any_left(workers))
        with channel.waiter.update():
            if not self._connected.issuperset(workers):
                self._check(workers)

    def _any_left(self, workers: Collection[int]) -> bool:
        return not self._left.keys().isdisjoint(workers)

    def _check(self, sources: Collection[int]) -> None:
        """Raise PeerLost if one of these workers will send nothing more."""
        for source in sources:
            if source in self._left:
                raise PeerLost(f"{self._channel.me} lost {self._worker(source)}: {self._left[source]}")

    def _post(self, to: int, message: Message) -> None:
        """Send a message. Raises PeerLost without a connection."""
        try:
            self._sender.send(self._worker(to), message)
        except TransportError as error:
            raise PeerLost(f"{self._channel.me} lost {self._worker(to)}: {error}") from error

    def _worker(self, index: int) -> Address:
        return Address(Role.WORKER, self._group, index)

    def on_lost(self, peer: Address, reason: str) -> bool:
        """Note that a worker will send nothing more."""
        # No failure yet: at the end of a job workers leave one after another, and nothing more is needed of them.
        if peer.role is Role.WORKER:
            self._left[peer.index] = reason
        return peer.role is Role.WORKER
