"""State-machine replication of a server: a primary and its standby.

A server is a deterministic function of its events. The `Primary` forwards every event to the `Standby` in another
process, in the same order. So the standby has the same values, bit for bit, and the same outgoing messages (Schneider,
1990). A reply of the primary is sent only after the standby has confirmed the event (output commit: Elnozahy et al.,
2002). So nothing that was ever sent is lost with one process.

Messages between two endpoints are counted on a `ReliableChannel`, at both ends and in both copies, and kept until the
other side has them durably. After a reconnect, possibly to another process of the server, both sides send the number of
messages received, and missing messages are sent again. So each message is handled once, and no process has to restart.
"""

from collections import deque

import torch

from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.server.server import ServerFactory
from topotrain.core.server.server_context import Out
from topotrain.core.transport_contract import MessageSender
from topotrain.extensions.replication.landing_buffers import LandingBuffers
from topotrain.extensions.replication.replicated_server import (
    CONFIRMED,
    LOST,
    MESSAGE,
    NEW_PRIMARY,
    OutgoingObserver,
    ReplicatedServer,
    standby_of,
)
from topotrain.extensions.replication.replication_messages import (
    Ack,
    ReplicaAck,
    ReplicaChecksum,
    ReplicaReleased,
    ReplicatedEvent,
    ResumeConnection,
    StateTransfer,
)
from topotrain.extensions.replication.state_transfer import restore, save

UNCOUNTED = (
    ResumeConnection,
    Ack,
    ReplicatedEvent,
    ReplicaAck,
    StateTransfer,
    ReplicaReleased,
    ReplicaChecksum,
)
PART = 16 << 20
"""Bytes of each part of a state transfer. The last may have fewer."""
OFTEN = 16
"""Number of messages of a peer after which an ack is sent."""
_STAYS = (m.Push, m.GradientOverride)
"""Messages with bodies in memory that is not written before their sender gets a reply."""
_PUSH = m.Push.KIND
_STREAMED = (m.Values, m.ReducedGradient)
"""Messages to workers that are followed by another one, after which the worker goes on."""


class Primary:
    """The copy that sends replies.

    Args:
        copy: the state from which it continues.
    """

    def __init__(self, copy: ReplicatedServer) -> None:
        self.copy = copy
        self.me = copy.server.me
        self.standby = standby_of(self.me)
        self.up: set[Address] = set()  # peers with a connection
        self.covered = False
        """Whether the standby has every event with a reply."""
        self.joined = False
        self.fault: m.ProtocolError | None = None
        """The error of the last message, if it was refused."""
        self.differs = 0
        """The number of standbys that differed from this copy. Each was replaced."""
        self._marks: dict[int, int] = {}
        self._transfer_due = False
        self._covered_at = 0
        self._confirmed = 0
        self.landing = LandingBuffers()
        self._sender: MessageSender | None = None
        self._held: deque[tuple[int, Address, m.Message]] = deque()
        self._acknowledged: dict[Address, int] = {}

    # --- events --------------------------------------------------------------------------------------------------

    def attach(self, sender: MessageSender) -> "EarlyReplies":
        """Send messages through `sender` as soon as they may leave.

        An event then reaches the standby before it is handled here, so that both copies work at the same time. Without
        a sender all messages are returned.
        """
        self._sender = sender
        early = EarlyReplies(self, sender)
        self.copy.attach(early)
        return early

    def handle(self, sender: Address, message: m.Message) -> Out:
        """Handle a message. `fault` has the error if it was refused."""
        self.fault = None
        if sender == self.standby:
            return self._handle_standby(message)
        if isinstance(message, ResumeConnection):
            return self._resume(sender, message)
        out = self._open_connection(sender)
        if isinstance(message, Ack):
            out += self._event(CONFIRMED, sender, message.received)
            # The ack must not leave before the standby has what it acknowledges, so `put` holds it like a reply.
            return out + (self._acknowledge(sender) if message.ask else [])
        out += self._event(MESSAGE, sender, 0, message)
        if isinstance(message, m.Commit) or self.copy.received(sender) >= self._acknowledged.get(sender, 0) + OFTEN:
            out += self._acknowledge(sender)
        return out

    def lost(self, worker: Address) -> Out:
        """Handle the end of a worker's process."""
        # Messages that wait for it are not for the process that replaces it.
        self.up.discard(worker)
        self._acknowledged.pop(worker, None)
        self._held = deque(held for held in self._held if held[1] != worker)
        return self._event(LOST, worker)

    def disconnected(self, server: Address) -> None:
        """Note the end of a connection to another server. Messages to it are kept."""
        self.up.discard(server)

    def connected(self, server: Address) -> Out:
        """Note the first connection to another server."""
        self.up.add(server)
        return []

    def reconnected(self, server: Address) -> Out:
        """Resume on a new connection to another server."""
        self.up.discard(server)
        return [(server, ResumeConnection(self.copy.received(server)))]

    def probe(self) -> Out:
        """Make an event without effect, so that the standby confirms it."""
        return self._event(CONFIRMED, self.me)

    def confirmed(self, index: int) -> bool:
        """Return whether the standby has confirmed this event. Without a standby: True."""
        # A standby that confirms has not become the primary itself.
        return not self.joined or self._confirmed >= index

    def take_over(self) -> Out:
        """Note that this copy is the primary now. The process of the former one is gone."""
        return self._event(NEW_PRIMARY, self.me)

    # --- the standby ---------------------------------------------------------------------------------------------

    def add_standby(self) -> Out:
        """Send the state to a new standby, as soon as that is possible."""
        # Until the state is sent, events are not forwarded and replies are not held.
        self.covered = self.joined = False
        self._transfer_due = True
        return self._transfer_if_possible()

    def drop_standby(self) -> Out:
        """Stop waiting for the standby. The launcher has reported the end of its process."""
        self.covered = self.joined = self._transfer_due = False
        # The held replies waited for a process that is gone.
        return self.release(self.copy.events)

    def _transfer_if_possible(self) -> Out:
        data = save(self.copy) if self._transfer_due else None
        if data is None:
            return []
        self._transfer_due, self.joined = False, True
        # The new standby computes no checksums of earlier events.
        self._marks.clear()
        index = self._covered_at = self.copy.events
        self.landing.handled(index)  # the state is a copy
        count = -(-data.numel() // PART)
        out: Out = []
        for part in range(count):
            body = data[part * PART : (part + 1) * PART]
            out += self._tell(StateTransfer(index, part, count, data.numel(), body=body))
        return out

    def _tell(self, message: m.Message) -> Out:
        """Send a message to the standby: now, or with the messages that are returned."""
        if self._sender is None:
            return [(self.standby, message)]
        self._sender.send(self.standby, message)
        return []

    def _handle_standby(self, message: m.Message) -> Out:
        if isinstance(message, ReplicaChecksum):
            found = self._marks.pop(message.index, None)
            if found in (None, message.mark) or not self.covered:
                return []
            # Which copy is right cannot be known. The job continues with this one, and the standby is made anew.
            self.differs += 1
            return self.drop_standby() + self.add_standby()
        if not isinstance(message, ReplicaAck):
            raise m.ProtocolError(f"{self.standby} sent {type(message).__name__}, which a second copy never sends")
        self.landing.handled(message.handled)
        # Confirmations from before the last state transfer are ignored.
        if message.whole and message.index == self._covered_at:
            self.covered = self.joined
        return self.release(message.index) if self.covered else []

    def release(self, index: int) -> Out:
        """Return the held messages of the events up to this one, which the standby has."""
        self._confirmed = max(self._confirmed, index)
        out: Out = []
        while self._held and self._held[0][0] <= self._confirmed:
            _, to, message = self._held.popleft()
            # Messages to a peer without a connection stay in its channel, and are sent when it resumes.
            if to in self.up or to not in self.copy.channels:
                out.append((to, message))
        return out

    # --- inside --------------------------------------------------------------------------------------------------

    def _event(self, event: int, who: Address, count: int = 0, message: m.Message | None = None) -> Out:
        out: Out = []
        # Before the event is handled, so that both copies work at the same time. A push is short, and is looked at.
        late = isinstance(message, m.Push)
        if self.joined and not late:
            out += self._tell(self._forward(event, who, count, message, self.copy.events + 1))
        try:
            replies = self.copy.handle(event, who, count, message)
        except m.ProtocolError as error:
            # Part of the message may have been handled. The standby refuses it alike, so the event counts in both.
            self.fault, replies = error, self.copy.outgoing()
        if self.joined and late:
            out += self._tell(self._forward(event, who, count, message, self.copy.events))
        found = self.copy.mark() if self.joined else None
        if found is not None:
            self._marks[self.copy.events] = found
        return out + self.put(replies) + (self._transfer_if_possible() if self._transfer_due else [])

    def _forward(self, event: int, who: Address, count: int, message: m.Message | None, index: int) -> ReplicatedEvent:
        kind, meta = m.encode(message) if message is not None else (0, b"")
        body = None if message is None else message.body
        if body is not None and not isinstance(message, _STAYS):
            body = body.clone()  # its memory may be overwritten before it is sent
        finite = isinstance(message, m.Push) and self.fault is None and self.copy.found_finite(who, message)
        return ReplicatedEvent(event, index, int(who.role), who.group, who.index, count, kind, meta, finite, body=body)

    def put(self, replies: Out) -> Out:
        """Send messages, or hold them until the standby has confirmed their event."""
        if not self.joined:
            return [(to, message) for to, message in replies if to in self.up or to not in self.copy.channels]
        # Output commit: a reply leaves only after the standby has its event.
        for to, message in replies:
            self._held.append((self.copy.events, to, message))
            if to.role is Role.WORKER:
                self.landing.answered(to.group, self.copy.events)
        return []

    def _acknowledge(self, peer: Address) -> Out:
        """Ack the messages of a peer, once the standby has them."""
        self._acknowledged[peer] = received = self.copy.received(peer)
        return self.put([(peer, Ack(received))])

    def _open_connection(self, sender: Address) -> Out:
        """Handle the first message on a connection.

        It comes from a process that had no connection here before, or after the other side has restarted.
        """
        if sender in self.up or sender == self.me:
            return []
        out: Out = []
        if sender.role is Role.WORKER and sender in self.copy.channels:  # the worker's former process is gone
            out = self.lost(sender)
        self.up.add(sender)
        return out + self._missing_messages(sender)

    def _resume(self, sender: Address, message: ResumeConnection) -> Out:
        """Handle a reconnect. Raises ProtocolError if there was no connection before."""
        channel, out = self.copy.channels.get(sender), Out()
        # Messages of the worker's earlier process were lost with the former primary.
        if channel is not None and channel.restarts < message.restarts:
            channel, out = None, self.lost(sender)
        if (channel is None and message.received) or (channel is not None and channel.restarts > message.restarts):
            raise m.ProtocolError(f"{sender} resumes a connection that it never had")
        out += self._event(CONFIRMED, sender, message.received)
        if self.fault is not None:
            return out  # the connection ends: messages that were sent again on it would be counted, and sent once more
        self.up.add(sender)
        if not message.answer:
            out.append((sender, ResumeConnection(self.copy.received(sender), True)))
        return out + self._missing_messages(sender)

    def _missing_messages(self, peer: Address) -> Out:
        """Return all messages that a peer has not received, without those still held."""
        channel = self.copy.channels.get(peer)
        if channel is None:
            return []
        # Held messages are the last ones of the channel. `release` sends them.
        waiting = sum(to == peer and not isinstance(held, UNCOUNTED) for _, to, held in self._held)
        unconfirmed = list(channel.unconfirmed)
        return [(peer, message) for message in unconfirmed[: len(unconfirmed) - waiting]]

    @property
    def clear(self) -> bool:
        """Whether all messages were sent, and received by all connected workers."""
        channels = self.copy.channels.items()
        return not self._held and not any(
            peer in self.up or channel.unconfirmed for peer, channel in channels if peer.role is Role.WORKER
        )


class EarlyReplies(OutgoingObserver):
    """Sends replies of an event while it is handled, if the standby has it.

    Args:
        primary: handles the event.
        sender: sends its messages.
    """

    def __init__(self, primary: Primary, sender: MessageSender) -> None:
        self._primary, self._sender = primary, sender
        self._arrived = 0

    def arrived(self, message: m.Message) -> None:
        """Note an ack, while another thread may be handling an event.

        `Primary.handle` gets it, too.
        """
        if isinstance(message, ReplicaAck):
            self._arrived = message.index

    def on_outgoing(self) -> None:
        """Send what may leave."""
        primary = self._primary
        # An ack from before the last state transfer is of an event before it.
        if primary.covered and self._arrived >= primary.copy.events:
            primary.put(primary.copy.outgoing())
            for to, message in primary.release(self._arrived):
                self._sender.send(to, message)


class Standby:
    """The copy that follows the primary.

    Args:
        factory: makes the server of each new copy.
        server: the address of the server.
    """

    def __init__(self, factory: ServerFactory, server: Address) -> None:
        self._factory, self.server, self.me = factory, server, standby_of(server)
        self._parts: list[torch.Tensor] = []
        self.copy: ReplicatedServer | None = None
        self.over = False
        """Whether the primary has released this standby."""
        self._views = False

    def place(self, message: m.Message, viewable: bool = False) -> torch.Tensor | None:
        """Return memory for the body of a message.

        None, if `viewable`: it is read in the memory of the primary.

        Raises:
            ProtocolError: the part of a state transfer is out of order or too large.
        """
        if isinstance(message, StateTransfer):
            left = message.nbytes - message.part * PART
            # Parts come in order and each is bounded, so a wrong number allocates at most PART bytes.
            if left <= 0 or message.part != len(self._parts):
                raise m.ProtocolError(f"part {message.part} of a state transfer of {message.nbytes} bytes")
            if not message.part:
                self.copy = None  # replaced by a new copy, because it differed from the primary
            return torch.empty(min(PART, left), dtype=torch.uint8)
        if isinstance(message, ReplicatedEvent) and self.copy is not None:
            if viewable:
                self._views = True  # from now on an event that has arrived is not one that has been read
                return None
            # The buffers of the copy, as in the primary: handling an event copies no body.
            return self.copy.server.place(_address_of(message), m.decode(message.kind, message.meta), False)
        return None

    def early_ack(self, message: m.Message) -> ReplicaAck | None:
        """Return the ack that may be sent before the message is handled."""
        if not isinstance(message, ReplicatedEvent) or self.copy is None or message.kind == _PUSH:
            return None
        # All earlier events have been handled. The body of this one is safe, also in the memory of a dead primary.
        return ReplicaAck(message.index, handled=message.index - self._views)

    def handle(self, message: m.Message) -> list[m.Message]:
        """Handle a message of the primary and return the replies.

        Raises:
            ProtocolError: an event is missing, or a part is out of order.
        """
        if isinstance(message, StateTransfer) and message.body is not None:
            return self._part(message, message.body)
        if isinstance(message, ReplicaReleased):
            self.over = True
        elif isinstance(message, ReplicatedEvent):
            return self._apply(message)
        return []

    def promote(self) -> ReplicatedServer | None:
        """End this standby, and return its copy, which becomes the primary.

        None: the standby does not have the state.
        """
        copy, self.copy, self.over = self.copy, None, True
        return copy

    def _part(self, message: StateTransfer, body: torch.Tensor) -> list[m.Message]:
        self._parts.append(body)
        if len(self._parts) < message.parts:
            return []
        parts, self._parts = self._parts, []
        copy = ReplicatedServer(self._factory, self.server)
        restore(copy, parts[0] if len(parts) == 1 else torch.cat(parts))
        if copy.events != message.index:
            raise m.ProtocolError(f"the state after event {copy.events}, in a transfer of event {message.index}")
        self.copy = copy
        return [ReplicaAck(message.index, whole=True)]

    def _apply(self, message: ReplicatedEvent) -> list[m.Message]:
        copy = self.copy
        if copy is None or message.index != copy.events + 1:
            raise m.ProtocolError(f"event {message.index} is not the next event")
        inner = m.decode(message.kind, message.meta, message.body) if message.kind else None
        if message.finite and isinstance(inner, m.Push):
            copy.expect_finite(_address_of(message), inner)
        try:
            sent = copy.handle(message.event, _address_of(message), message.count, inner)
        except m.ProtocolError:  # the primary has refused the message in the same manner
            sent = copy.outgoing()
        replies: list[m.Message] = []
        # The primary waits for no ack of a push that it answers with nothing.
        answered = message.kind == _PUSH and bool(sent)
        # Now, and not with the next event: the workers are about to send gradients to the same memory.
        goes_on = any(to.role is Role.WORKER and not isinstance(each, _STREAMED) for to, each in sent)
        if answered or (self._views and goes_on):
            replies.append(ReplicaAck(message.index, handled=message.index))
        found = copy.mark()
        return replies if found is None else [*replies, ReplicaChecksum(message.index, found)]


def _address_of(message: ReplicatedEvent) -> Address:
    return Address(Role(message.role), message.group, message.number)
