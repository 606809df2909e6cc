"""A worker's connections to servers with a standby.

If a server's process dies, the worker only waits a moment, and its `Client` does not notice. Messages to a server are
counted and kept until both copies have them. When a connection ends, the worker looks for the server in its other
process. Both sides send the number of messages that they have received, and missing messages are sent again
(`state_machine.ReliableChannel`).
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

import torch

from topotrain.comm.transport import Endpoint, TransportError
from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.extensions.replication.replication_messages import Ack, ResumeConnection
from topotrain.extensions.replication.state_machine import OFTEN, ReliableChannel


class SendMessage(Protocol):
    """Sends as `Transport.send` does, from one endpoint."""

    def __call__(self, to: Address, message: m.Message, wait: bool = False) -> None: ...


class _Way:
    """One reliable channel, and whether it has a connection now.

    `order` is held while messages are sent.
    """

    def __init__(self) -> None:
        self.line = ReliableChannel()
        self.order = threading.Lock()
        self.numbers = threading.Lock()
        self.up = False
        self.told = 0
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
        self.told = self.line.heard
        return self.told

    def say(self, message: m.Message) -> None:
        with self.numbers:
            self.line.say(message)

    def taken(self, count: int) -> None:
        with self.numbers:
            self.line.taken(count)


class ReplicaConnections:
    """Sits between a worker's endpoint and its transports.

    Args:
        servers: the servers of the worker.
        resident: the worker's endpoint.
        send: sends over the transport.
        redial: redial(server, moves) looks for the server in the process to which it has moved. `moves` counts its
            moves. It works on a thread of its own, and then calls `connected` or `failed`.
        changed: called when messages were confirmed, or a connection has ended.
        life: the number of restarts of the worker's group.
    """

    def __init__(
        self,
        servers: Iterable[Address],
        resident: Endpoint,
        send: SendMessage,
        redial: Callable[[Address, int], None],
        changed: Callable[[], None] = lambda: None,
        life: int = 0,
    ) -> None:
        self._ways = {server: _Way() for server in servers}
        self._resident, self._send, self._redial, self._changed = resident, send, redial, changed
        self._leaving, self._life = False, life

    def send(self, to: Address, message: m.Message, wait: bool = False) -> None:
        """Send a message. Without a connection it is kept and sent later."""
        way = self._ways.get(to)
        if way is None:
            self._send(to, message, wait)
            return
        with way.order:
            if isinstance(message, m.Commit) or way.line.heard >= way.told + OFTEN:
                self._tell(to, way)
            way.say(message)
            if way.up:
                with suppress(TransportError):  # `lost` reports the end of the connection
                    self._send(to, message, wait)

    def _tell(self, to: Address, way: _Way, ask: bool = False) -> None:
        heard = way.acknowledge()
        if way.up:
            with suppress(TransportError):
                self._send(to, Ack(heard, ask))

    # --- calls by the transport ----------------------------------------------------------------------------------

    def place(self, sender: Address, message: m.Message, viewable: bool) -> torch.Tensor | None:
        """See `wire.Endpoint.place`."""
        return self._resident.place(sender, message, viewable)

    def handle(self, sender: Address, message: m.Message) -> None:
        """Handle a message. Acks and resumptions are handled here, others by the worker.

        Raises:
            ProtocolError: the message is not possible now.
        """
        way = self._ways.get(sender)
        if way is None:
            self._resident.handle(sender, message)
        elif isinstance(message, Ack):
            way.taken(message.heard)
            self._changed()
        elif isinstance(message, ResumeConnection):
            self._resumed(sender, way, message)
        else:
            way.line.receive()
            self._resident.handle(sender, message)

    def _resumed(self, server: Address, way: _Way, message: ResumeConnection) -> None:
        with way.order:
            way.taken(message.heard)
            way.open()
            for kept in list(way.line.kept):
                with suppress(TransportError):
                    self._send(server, kept)
            if self._leaving:
                self._tell(server, way, ask=True)

    def lost(self, peer: Address, reason: str) -> None:
        """Handle the end of a connection."""
        way = self._ways.get(peer)
        if way is None:
            self._resident.lost(peer, reason)
            return
        if self._leaving and not way.line.kept:
            return
        way.close()  # not under `order`: its holder may be blocked in a send on this connection
        self._redial(peer, way.moves)

    # --- connections ---------------------------------------------------------------------------------------------

    def begin(self, server: Address) -> None:
        """Note that the first connection to a server is about to be made."""
        self._ways[server].open()

    def connected(self, server: Address, moves: int) -> None:
        """Resume on a new connection to a server that has moved `moves` times.

        The worker sends the number of messages that it has received.
        """
        self._ways[server].moved(moves)
        with suppress(TransportError):
            self._send(server, ResumeConnection(self._ways[server].line.heard, life=self._life))

    def failed(self, server: Address, reason: str) -> None:
        """Report that the server has no other process."""
        self._ways.pop(server, None)
        self._resident.lost(server, reason)
        self._changed()

    def leave(self) -> None:
        """Stop sending. From now on, `left` tells when both copies have everything."""
        self._leaving = True
        for server, way in list(self._ways.items()):
            with way.order:
                self._tell(server, way, ask=True)

    @property
    def left(self) -> bool:
        """Whether both copies of all servers have all messages."""
        return not any(way.line.kept for way in list(self._ways.values()))
