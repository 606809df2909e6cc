"""State-machine replication of a server: a primary and its standby.

A server is a deterministic function of its events. The `Primary` forwards every event to the `Standby` in another
process, in the same order. So the standby has the same values, bit for bit, and the same outgoing messages (Schneider,
1990). A reply of the primary is sent only after the standby has confirmed the event (output commit: Elnozahy et al.,
2002). So nothing that was ever sent is lost with one process.

From time to time the copies compare checksums (`replica_checksum`). If they differ, it cannot be known which copy is
right. The job continues with the primary, and the standby is made anew.

Messages between two endpoints are counted on a `ReliableChannel`, at both ends and in both copies, and kept until the
other side has them durably. After a reconnect, possibly to another process of the server, both sides send the number of
messages received, and missing messages are sent again. So each message is handled once, and no process has to restart.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.server.component_state import State, field_values
from topotrain.core.server.consistency import AWAY
from topotrain.core.server.server import Server
from topotrain.extensions.checkpointing.checkpoint_extension import snapshots_of
from topotrain.extensions.elastic.membership_messages import GroupLeft
from topotrain.extensions.replication.replica_checksum import mark
from topotrain.extensions.replication.replication_messages import (
    Ack,
    ReplicaAck,
    ReplicaChecksum,
    ReplicaReleased,
    ReplicatedEvent,
    ResumeConnection,
    StateTransfer,
)

Out = list[tuple[Address, m.Message]]
Make = Callable[[Callable[[Address, m.Message], None]], Server]
"""Makes a server that passes every outgoing message to the function it is given."""

MESSAGE, LOST, CONFIRMED, NEW_PRIMARY = 0, 1, 2, 3
"""ReplicatedEvent.event: a message, the end of a worker's process, an ack of a peer, a new primary."""

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
_STAYS = (m.Push, m.GradientOverride, m.Init)
"""Messages with bodies in memory that is not written before their sender gets a reply."""


@dataclass(slots=True)
class ReliableChannel:
    """One end of a connection between two endpoints, across reconnects.

    Attributes:
        sent, received: numbers of messages sent and received so far.
        unconfirmed: the last messages sent, which the other side may not have durably.
        restarts: the number of restarts of the group, if the other end is a worker.
    """

    sent: int = 0
    received: int = 0
    unconfirmed: "deque[m.Message]" = field(default_factory=deque)
    restarts: int = 0

    def send(self, message: m.Message) -> None:
        """Count and keep a message that is sent."""
        self.unconfirmed.append(message)
        self.sent += 1

    def receive(self) -> None:
        """Count a message that was received."""
        self.received += 1

    def restart(self, restarts: int) -> None:
        """Note that the other end is of this restart of its group."""
        self.restarts = restarts

    def confirm(self, count: int) -> None:
        """Drop messages that the other side has confirmed; it has `count` messages.

        Raises:
            ProtocolError: `count` is larger than the number of messages sent.
        """
        if count > self.sent:
            raise m.ProtocolError(f"{count} messages were confirmed, but {self.sent} sent")
        while self.sent - len(self.unconfirmed) < count:
            self.unconfirmed.popleft()


class ReplicatedServer:
    """One copy of a server with its whole state: server, channels and event count.

    Args:
        make: see Make.
    """

    def __init__(self, make: Make) -> None:
        self._out: Out = []
        self.server = make(lambda to, message: self._out.append((to, message)))
        self.channels: dict[Address, ReliableChannel] = {}
        self.events = 0
        self._before = 0  # the version of the values, one event ago

    def state_dict(self) -> State | None:
        """Return the state of server and channels, or None if not possible now."""
        server = self.server.state_dict()
        if server is None:
            return None
        return {
            "events": self.events,
            "server": server,
            "channels": {peer: field_values(channel) for peer, channel in self.channels.items()},
        }

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self.events = state["events"]
        self.server.load_state_dict(state["server"])
        self.channels = {
            peer: ReliableChannel(sent, received, deque(unconfirmed), restarts)
            for peer, (sent, received, unconfirmed, restarts) in state["channels"].items()
        }

    def handle(self, event: int, who: Address, count: int = 0, message: m.Message | None = None) -> Out:
        """Handle the next event and return the messages to send, which are counted.

        Raises:
            ProtocolError: as `Server.handle`. Messages are then returned with the next event.
        """
        self.events += 1
        self._before = self.server.state.version
        if event == CONFIRMED:
            if who in self.channels:
                self.channels[who].confirm(count)
        elif event == LOST:
            self.channels.pop(who, None)
            self.server.lost(who)
        elif event == NEW_PRIMARY:
            for part in snapshots_of(self.server).failed_replies():
                self.server.handle(self.server.me, part)
        elif message is not None:
            self._handle_message(who, message)
        return self.outgoing()

    def _handle_message(self, who: Address, message: m.Message) -> None:
        if who != self.server.me:
            channel = self.channels.setdefault(who, ReliableChannel())
            channel.receive()
            if isinstance(message, m.WorkerRejoined) and channel.received == 1:  # first message of a restarted worker
                channel.restart(message.incarnation)
        self.server.handle(who, message)
        if isinstance(message, GroupLeft) or (isinstance(message, m.StepDecision) and message.change == AWAY):
            for worker in [worker for worker in self.channels if self.server.worker_groups.is_away(worker)]:
                del self.channels[worker]  # the worker will not reconnect

    def mark(self) -> int | None:
        """Return the checksum to compare after the last event, or None."""
        return mark(self.server, self._before)

    def outgoing(self) -> Out:
        """Return the messages to send since the last event."""
        out, self._out = self._out, []
        return [(to, message) for to, message in out if self._counted(to, message)]

    def _counted(self, to: Address, message: m.Message) -> bool:
        """Count a message.

        Returns False for a message to a worker that is gone, if its replacement has sent nothing yet.
        """
        if to.role is Role.SERVER:
            self.channels.setdefault(to, ReliableChannel())
        channel = self.channels.get(to)
        if channel is not None:
            channel.send(message)
        return channel is not None or isinstance(message, m.Fail)


class Primary:
    """The copy that sends replies.

    Args:
        copy: the state from which it continues.
        save: returns the whole state of a copy as bytes (1-D uint8), or None if that is not possible now.
    """

    def __init__(self, copy: ReplicatedServer, save: Callable[[ReplicatedServer], torch.Tensor | None]) -> None:
        self.copy, self._save = copy, save
        self.me = copy.server.me
        self.standby = Address(Role.SHADOW, self.me.group, self.me.index)
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
        self._held: deque[tuple[int, Address, m.Message]] = deque()
        self._acknowledged: dict[Address, int] = {}

    # --- events --------------------------------------------------------------------------------------------------

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
            return out + (self._acknowledge(sender) if message.ask else [])
        out += self._event(MESSAGE, sender, 0, message)
        if isinstance(message, m.Commit) or self._received(sender) >= self._acknowledged.get(sender, 0) + OFTEN:
            out += self._acknowledge(sender)
        return out

    def begin(self) -> None:
        """Forget the fault of an earlier message."""
        self.fault = None

    def lost(self, worker: Address) -> Out:
        """Handle the end of a worker's process.

        Messages that wait for it are dropped. They are not for the process that replaces it.
        """
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
        return [(server, ResumeConnection(self._received(server)))]

    def probe(self) -> Out:
        """Make an event without effect, so that the standby confirms it."""
        return self._event(CONFIRMED, self.me)

    def confirmed(self, index: int) -> bool:
        """Return whether the standby has confirmed this event.

        If it has, it has not become the primary itself. Without a standby the result is True.
        """
        return not self.joined or self._confirmed >= index

    def take_over(self) -> Out:
        """Note that this copy is the primary now. The process of the former one is gone."""
        return self._event(NEW_PRIMARY, self.me)

    # --- the standby ---------------------------------------------------------------------------------------------

    def add_standby(self) -> Out:
        """Send the state to a new standby, as soon as the state can be told."""
        self.covered = self.joined = False
        self._transfer_due = True
        return self._transfer_if_possible()

    def drop_standby(self) -> Out:
        """Stop waiting for the standby. The launcher has reported the end of its process."""
        self.covered = self.joined = self._transfer_due = False
        return self._release(self.copy.events)

    def _transfer_if_possible(self) -> Out:
        data = self._save(self.copy) if self._transfer_due else None
        if data is None:
            return []
        self._transfer_due, self.joined = False, True
        self._marks.clear()
        index = self._covered_at = self.copy.events
        count = -(-data.numel() // PART)
        return [
            (self.standby, StateTransfer(index, part, count, data.numel(), body=data[part * PART : (part + 1) * PART]))
            for part in range(count)
        ]

    def _handle_standby(self, message: m.Message) -> Out:
        """Handle a message of the standby.

        Confirmations from before its last state transfer are ignored.
        """
        if isinstance(message, ReplicaChecksum):
            found = self._marks.pop(message.index, None)
            if found in (None, message.mark) or not self.covered:
                return []
            self.differs += 1
            return self.drop_standby() + self.add_standby()
        if not isinstance(message, ReplicaAck):
            raise m.ProtocolError(f"{self.standby} sent {type(message).__name__}, which a second copy never sends")
        if message.whole and message.index == self._covered_at:
            self.covered = self.joined
        return self._release(message.index) if self.covered else []

    def _release(self, index: int) -> Out:
        self._confirmed = max(self._confirmed, index)
        out: Out = []
        while self._held and self._held[0][0] <= self._confirmed:
            _, to, message = self._held.popleft()
            if to in self.up or to not in self.copy.channels:
                out.append((to, message))
        return out

    # --- inside --------------------------------------------------------------------------------------------------

    def _event(self, event: int, who: Address, count: int = 0, message: m.Message | None = None) -> Out:
        out: Out = []
        if self.joined:
            out.append((self.standby, self._forward(event, who, count, message)))
        try:
            replies = self.copy.handle(event, who, count, message)
        except m.ProtocolError as error:
            self.fault, replies = error, self.copy.outgoing()
        found = self.copy.mark() if self.joined else None
        if found is not None:
            self._marks[self.copy.events] = found
        return out + self._put(replies) + (self._transfer_if_possible() if self._transfer_due else [])

    def _forward(self, event: int, who: Address, count: int, message: m.Message | None) -> ReplicatedEvent:
        kind, meta = m.encode(message) if message is not None else (0, b"")
        body = None if message is None else message.body
        if body is not None and not isinstance(message, _STAYS):
            body = body.clone()  # its memory may be overwritten before it is sent
        return ReplicatedEvent(
            event, self.copy.events + 1, int(who.role), who.group, who.index, count, kind, meta, body=body
        )

    def _put(self, replies: Out) -> Out:
        """Send messages, or hold them until the standby has confirmed their event."""
        if self.joined:
            # Output commit: a reply leaves only after the standby has its event.
            self._held.extend((self.copy.events, to, message) for to, message in replies)
            return []
        return [(to, message) for to, message in replies if to in self.up or to not in self.copy.channels]

    def _acknowledge(self, peer: Address) -> Out:
        """Ack the messages of a peer, once the standby has them."""
        self._acknowledged[peer] = received = self._received(peer)
        return self._put([(peer, Ack(received))])

    def _received(self, peer: Address) -> int:
        channel = self.copy.channels.get(peer)
        return 0 if channel is None else channel.received

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
        """Handle the reconnect of a peer.

        Raises:
            ProtocolError: the peer had no connection before.
        """
        channel, out = self.copy.channels.get(sender), Out()
        # Messages of the worker's earlier process were lost with the former primary.
        if channel is not None and channel.restarts < message.restarts:
            channel, out = None, self.lost(sender)
        if (channel is None and message.received) or (channel is not None and channel.restarts > message.restarts):
            raise m.ProtocolError(f"{sender} resumes a connection that it never had")
        out += self._event(CONFIRMED, sender, message.received)
        self.up.add(sender)
        if not message.answer:
            out.append((sender, ResumeConnection(self._received(sender), True)))
        return out + self._missing_messages(sender)

    def _missing_messages(self, peer: Address) -> Out:
        """Return all messages that a peer has not received, without those still held."""
        channel = self.copy.channels.get(peer)
        if channel is None:
            return []
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


class Standby:
    """The copy that follows the primary.

    Args:
        make: see Make.
        restore: gives a new copy the state in these bytes (1-D uint8).
    """

    def __init__(self, make: Make, restore: Callable[[ReplicatedServer, torch.Tensor], None]) -> None:
        self._make, self._restore = make, restore
        self._parts: list[torch.Tensor] = []
        self.copy: ReplicatedServer | None = None
        self.over = False
        """Whether the primary has released this standby."""

    def place(self, message: m.Message) -> torch.Tensor | None:
        """Return memory for the body of a message.

        Raises:
            ProtocolError: the part of a state transfer is out of order or too large.
        """
        if isinstance(message, StateTransfer):
            left = message.nbytes - message.part * PART
            if left <= 0 or message.part != len(self._parts):
                raise m.ProtocolError(f"part {message.part} of a state transfer of {message.nbytes} bytes")
            if not message.part:
                self.copy = None  # replaced by a new copy, because it differed from the primary
            return torch.empty(min(PART, left), dtype=torch.uint8)
        if isinstance(message, ReplicatedEvent) and self.copy is not None:
            return self.copy.server.place(_address_of(message), m.decode(message.kind, message.meta), False)
        return None

    def early_ack(self, message: m.Message) -> ReplicaAck | None:
        """Return the ack that may be sent before the message is handled."""
        return ReplicaAck(message.index) if isinstance(message, ReplicatedEvent) and self.copy is not None else None

    def handle(self, message: m.Message) -> ReplicaAck | ReplicaChecksum | None:
        """Handle a message of the primary and return the reply, if any.

        Raises:
            ProtocolError: an event is missing, or a part is out of order.
        """
        if isinstance(message, StateTransfer) and message.body is not None:
            return self._part(message, message.body)
        if isinstance(message, ReplicaReleased):
            self.over = True
        elif isinstance(message, ReplicatedEvent):
            return self._apply(message)
        return None

    def promote(self) -> ReplicatedServer | None:
        """End this standby, and return its copy, which becomes the primary.

        None: the standby does not have the state.
        """
        copy, self.copy, self.over = self.copy, None, True
        return copy

    def _part(self, message: StateTransfer, body: torch.Tensor) -> ReplicaAck | None:
        self._parts.append(body)
        if len(self._parts) < message.parts:
            return None
        parts, self._parts = self._parts, []
        copy = ReplicatedServer(self._make)
        self._restore(copy, parts[0] if len(parts) == 1 else torch.cat(parts))
        if copy.events != message.index:
            raise m.ProtocolError(f"the state after event {copy.events}, in a transfer of event {message.index}")
        self.copy = copy
        return ReplicaAck(message.index, whole=True)

    def _apply(self, message: ReplicatedEvent) -> ReplicaChecksum | None:
        copy = self.copy
        if copy is None or message.index != copy.events + 1:
            raise m.ProtocolError(f"event {message.index} is not the next event")
        inner = m.decode(message.kind, message.meta, message.body) if message.kind else None
        try:
            copy.handle(message.event, _address_of(message), message.count, inner)
        except m.ProtocolError:  # the primary has refused the message in the same manner
            copy.outgoing()
        found = copy.mark()
        return None if found is None else ReplicaChecksum(message.index, found)


def _address_of(message: ReplicatedEvent) -> Address:
    return Address(Role(message.role), message.group, message.number)
