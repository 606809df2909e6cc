"""A worker's ways to servers of which there are two copies: one process may go, and the worker only waits a moment.

Rule: whoever lives behind these (`client.Client`) notices nothing. What it says is counted and kept until both
copies of the server have it; when a way ends, the server is looked for in its other process, both sides tell how many
messages they have heard, and what is missing is said again (`state_machine.ReliableChannel`).
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

import torch

from topotrain.comm.transport import Endpoint, TransportError
from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.extensions.replication.state_machine import OFTEN, ReliableChannel


class SendMessage(Protocol):
    """As `Transport.send`, from one resident."""

    def __call__(self, to: Address, message: m.Message, wait: bool = False) -> None: ...


class _Way:
    """One line, and whether there is a way to the server now. `order`: held while messages are put on it."""

    def __init__(self) -> None:
        self.line = ReliableChannel()
        self.order = threading.Lock()
        self.numbers = threading.Lock()
        self.up = False
        self.told = 0
        self.moves = 0

    def say(self, message: m.Message) -> None:
        with self.numbers:
            self.line.say(message)

    def taken(self, count: int) -> None:
        with self.numbers:
            self.line.taken(count)


class ReplicaConnections:
    """Stands between a worker's door and its roads.

    Args:
        servers: whom the worker talks to.
        resident: the worker.
        send: the road's.
        redial: redial(server, moves) looks for the server in the process that it has moved to for the so-manieth time,
            on a thread of its own, and then calls `connected`, or `failed`.
        changed: called when something has been taken for good, or a way has ended.
        life: how often the worker's group has been started again.
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
        """Say something; what has no way now is said when there is one."""
        way = self._ways.get(to)
        if way is None:
            self._send(to, message, wait)
            return
        with way.order:
            if isinstance(message, m.Commit) or way.line.heard >= way.told + OFTEN:
                self._tell(to, way)
            way.say(message)
            if way.up:
                with suppress(TransportError):  # its end is heard of by `lost`
                    self._send(to, message, wait)

    def _tell(self, to: Address, way: _Way, ask: bool = False) -> None:
        way.told = way.line.heard
        if way.up:
            with suppress(TransportError):
                self._send(to, m.Ack(way.told, ask))

    # --- the resident's side -------------------------------------------------------------------------------------

    def place(self, sender: Address, message: m.Message, viewable: bool) -> torch.Tensor | None:
        """As `wire.Endpoint.place`."""
        return self._resident.place(sender, message, viewable)

    def handle(self, sender: Address, message: m.Message) -> None:
        """Take a message: what is about the line is for us. Raises ProtocolError."""
        way = self._ways.get(sender)
        if way is None:
            self._resident.handle(sender, message)
        elif isinstance(message, m.Ack):
            way.taken(message.heard)
            self._changed()
        elif isinstance(message, m.ResumeConnection):
            self._resumed(sender, way, message)
        else:
            way.line.heard += 1
            self._resident.handle(sender, message)

    def _resumed(self, server: Address, way: _Way, message: m.ResumeConnection) -> None:
        with way.order:
            way.taken(message.heard)
            way.up = True
            for kept in list(way.line.kept):
                with suppress(TransportError):
                    self._send(server, kept)
            if self._leaving:
                self._tell(server, way, ask=True)

    def lost(self, peer: Address, reason: str) -> None:
        """A way has ended."""
        way = self._ways.get(peer)
        if way is None:
            self._resident.lost(peer, reason)
            return
        if self._leaving and not way.line.kept:
            return
        way.up = False  # not under `order`: whoever holds it may be waiting for room on the way that has ended
        way.moves += 1
        self._redial(peer, way.moves)

    # --- the ways ------------------------------------------------------------------------------------------------

    def begin(self, server: Address) -> None:
        """The first way to a server is about to be made."""
        self._ways[server].up = True

    def connected(self, server: Address, moves: int) -> None:
        """There is a way to the server's other process, to which it has moved for the so-manieth time: say how far we
        are."""
        self._ways[server].moves = max(moves, self._ways[server].moves)
        with suppress(TransportError):
            self._send(server, m.ResumeConnection(self._ways[server].line.heard, life=self._life))

    def failed(self, server: Address, reason: str) -> None:
        """There is no other process."""
        self._ways.pop(server, None)
        self._resident.lost(server, reason)
        self._changed()

    def leave(self) -> None:
        """Nothing more will be said; from here on `left` tells when the servers have everything for good."""
        self._leaving = True
        for server, way in list(self._ways.items()):
            with way.order:
                self._tell(server, way, ask=True)

    @property
    def left(self) -> bool:
        """Whether the servers have for good what was said."""
        return not any(way.line.kept for way in list(self._ways.values()))
