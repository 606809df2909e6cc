"""A worker's connections to servers with a standby.

If a server's process dies, the worker only waits a moment, and its `Client` does not notice. Messages to a server are
counted and kept until both copies have them. When a connection ends, the worker looks for the server in its other
process. Both sides send the number of messages that they have received, and missing messages are sent again
(`replicated_server.ReliableChannel`).
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress

import torch

from topotrain.comm.transport import Endpoint, TransportError
from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.extensions.replication.replicated_server import ReliableChannel
from topotrain.extensions.replication.replication_messages import Ack, ResumeConnection
from topotrain.extensions.replication.state_machine import OFTEN


class ReplicaClientHost(ABC):
    """The process of a worker, as its connections to replicated servers need it."""

    @abstractmethod
    def send(self, to: Address, message: m.Message, wait: bool = False) -> None:
        """Send over the transport, from the worker; see `Transport.send`."""

    @abstractmethod
    def reconnect(self, connections: "ReplicaConnections", server: Address, moves: int) -> None:
        """Look for a server in the process to which it has moved, without waiting for it.

        Then `connected` or `failed` is called.
        """

    @abstractmethod
    def on_change(self) -> None:
        """Messages were confirmed, or a connection has ended."""


class _ServerConnection:
    """One reliable channel, and whether it has a connection now."""

    def __init__(self) -> None:
        self.channel = ReliableChannel()
        # Held while messages are sent, so that they leave in the order in which they are counted.
        self.order = threading.Lock()
        # Acks are handled on a receiving thread, which must not wait for a sender that is blocked under `order`.
        self.numbers = threading.Lock()
        self.up = False
        self.acknowledged = 0
        self.moves = 0

    def open(self) -> None:
        """Note that there is a connection."""
        self.up = True

    def close(self) -> None:
        """Note that the connection has ended, and count the search for the server."""
        self.up = False
        self.moves += 1

    def moved(self, moves: int) -> None:
        """Note that the server has moved this often."""
        self.moves = max(moves, self.moves)

    def acknowledge(self) -> int:
        """Return the number of messages received, which is about to be sent."""
        self.acknowledged = self.channel.received
        return self.acknowledged

    def record(self, message: m.Message) -> None:
        with self.numbers:
            self.channel.send(message)

    def confirm(self, count: int) -> None:
        with self.numbers:
            self.channel.confirm(count)


class ReplicaConnections:
    """Sits between a worker's endpoint and its transports.

    Args:
        servers, endpoint, host: the worker's servers, endpoint and process.
        restarts: the number of restarts of the worker's group.
    """

    def __init__(
        self, servers: Iterable[Address], endpoint: Endpoint, host: ReplicaClientHost, restarts: int = 0
    ) -> None:
        self._connections = {server: _ServerConnection() for server in servers}
        self._endpoint, self._host = endpoint, host
        self._leaving, self._restarts = False, restarts

    def send(self, to: Address, message: m.Message, wait: bool = False) -> None:
        """Send a message. Without a connection it is kept and sent later."""
        connection = self._connections.get(to)
        if connection is None:
            self._host.send(to, message, wait)
            return
        with connection.order:
            # The server keeps its messages until they are acknowledged.
            if isinstance(message, m.Commit) or connection.channel.received >= connection.acknowledged + OFTEN:
                self._acknowledge(to, connection)
            # Recorded before it is sent: a message that is lost in a connection is sent again after `_resume`.
            connection.record(message)
            if connection.up:
                with suppress(TransportError):  # `lost` reports the end of the connection
                    self._host.send(to, message, wait)

    def _acknowledge(self, to: Address, connection: _ServerConnection, ask: bool = False) -> None:
        received = connection.acknowledge()
        if connection.up:
            with suppress(TransportError):
                self._host.send(to, Ack(received, ask))

    # --- calls by the transport ----------------------------------------------------------------------------------

    def place(self, sender: Address, message: m.Message, viewable: bool) -> torch.Tensor | None:
        """See `wire.Endpoint.place`."""
        return self._endpoint.place(sender, message, viewable)

    def handle(self, sender: Address, message: m.Message) -> None:
        """Handle a message. Acks and resumptions are handled here, others by the worker.

        Raises:
            ProtocolError: the message is not possible now.
        """
        connection = self._connections.get(sender)
        if connection is None:
            self._endpoint.handle(sender, message)
        elif isinstance(message, Ack):
            connection.confirm(message.received)
            self._host.on_change()
        elif isinstance(message, ResumeConnection):
            self._resume(sender, connection, message)
        else:
            connection.channel.receive()
            self._endpoint.handle(sender, message)

    def _resume(self, server: Address, connection: _ServerConnection, message: ResumeConnection) -> None:
        # Under `order`, so that newer messages follow the ones that are sent again.
        with connection.order:
            connection.confirm(message.received)
            connection.open()
            for kept in list(connection.channel.unconfirmed):
                with suppress(TransportError):
                    self._host.send(server, kept)
            # The request of `leave` is not among the messages that are kept.
            if self._leaving:
                self._acknowledge(server, connection, ask=True)

    def lost(self, peer: Address, reason: str) -> None:
        """Handle the end of a connection."""
        connection = self._connections.get(peer)
        if connection is None:
            self._endpoint.lost(peer, reason)
            return
        # Nothing to send again, so nothing to reconnect for.
        if self._leaving and not connection.channel.unconfirmed:
            return
        connection.close()  # not under `order`: its holder may be blocked in a send on this connection
        self._host.reconnect(self, peer, connection.moves)

    # --- connections ---------------------------------------------------------------------------------------------

    def begin(self, server: Address) -> None:
        """Note that the first connection to a server is about to be made."""
        self._connections[server].open()

    def connected(self, server: Address, moves: int) -> None:
        """Resume on a new connection to a server that has moved `moves` times.

        The worker sends the number of messages that it has received.
        """
        self._connections[server].moved(moves)
        with suppress(TransportError):
            self._host.send(
                server, ResumeConnection(self._connections[server].channel.received, restarts=self._restarts)
            )

    def failed(self, server: Address, reason: str) -> None:
        """Report that the server has no other process."""
        self._connections.pop(server, None)
        self._endpoint.lost(server, reason)
        self._host.on_change()

    def leave(self) -> None:
        """Stop sending. From now on `left` is True once both copies have everything."""
        self._leaving = True
        # A copy of the table: `failed` removes servers on another thread.
        for server, connection in list(self._connections.items()):
            with connection.order:
                self._acknowledge(server, connection, ask=True)

    @property
    def left(self) -> bool:
        """Whether both copies of all servers have all messages."""
        return not any(connection.channel.unconfirmed for connection in list(self._connections.values()))
