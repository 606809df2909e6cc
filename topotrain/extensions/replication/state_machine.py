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

WORD, LOST, TAKEN, ORPHANED = 0, 1, 2, 3
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
        said, heard: numbers of messages sent and received so far.
        kept: the last messages sent, which the other side may not have durably.
        life: the number of restarts of the group, if the other end is a worker.
    """

    said: int = 0
    heard: int = 0
    kept: "deque[m.Message]" = field(default_factory=deque)
    life: int = 0

    def say(self, message: m.Message) -> None:
        """Count and keep a message that is sent."""
        self.kept.append(message)
        self.said += 1

    def receive(self) -> None:
        """Count a message that was received."""
        self.heard += 1

    def restart(self, life: int) -> None:
        """Note that the other end is of this restart of its group."""
        self.life = life

    def taken(self, count: int) -> None:
        """Drop messages that the other side has confirmed; it has `count` messages.

        Raises:
            ProtocolError: `count` is larger than the number of messages sent.
        """
        if count > self.said:
            raise m.ProtocolError(f"{count} messages were confirmed, but {self.said} sent")
        while self.said - len(self.kept) < count:
            self.kept.popleft()


class ReplicatedServer:
    """One copy of a server with its whole state: server, channels and event count.

    Args:
        make: see Make.
    """

    def __init__(self, make: Make) -> None:
        self._out: Out = []
        self.server = make(lambda to, message: self._out.append((to, message)))
        self.lines: dict[Address, ReliableChannel] = {}
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
            "lines": {peer: field_values(line) for peer, line in self.lines.items()},
        }

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self.events = state["events"]
        self.server.load_state_dict(state["server"])
        self.lines = {
            peer: ReliableChannel(said, heard, deque(kept), life)
            for peer, (said, heard, kept, life) in state["lines"].items()
        }

    def take(self, event: int, who: Address, count: int = 0, message: m.Message | None = None) -> Out:
        """Handle the next event and return the messages to send, which are counted.

        Raises:
            ProtocolError: as `Server.handle`. Messages are then returned with the next event.
        """
        self.events += 1
        self._before = self.server.version
        if event == TAKEN:
            if who in self.lines:
                self.lines[who].taken(count)
        elif event == LOST:
            self.lines.pop(who, None)
            self.server.lost(who)
        elif event == ORPHANED:
            for part in snapshots_of(self.server).orphaned():
                self.server.handle(self.server.me, part)
        elif message is not None:
            self._hear(who, message)
        return self.said()

    def _hear(self, who: Address, message: m.Message) -> None:
        if who != self.server.me:
            line = self.lines.setdefault(who, ReliableChannel())
            line.receive()
            if isinstance(message, m.WorkerRejoined) and line.heard == 1:  # first message of a restarted worker
                line.restart(message.incarnation)
        self.server.handle(who, message)
        if isinstance(message, GroupLeft) or (isinstance(message, m.StepDecision) and message.change == AWAY):
            for worker in [worker for worker in self.lines if self.server.worker_groups.is_away(worker)]:
                del self.lines[worker]  # the worker will not reconnect

    def mark(self) -> int | None:
        """Return the checksum to compare after the last event, or None."""
        return mark(self.server, self._before)

    def said(self) -> Out:
        """Return the messages to send since the last event."""
        out, self._out = self._out, []
        return [(to, message) for to, message in out if self._counted(to, message)]

    def _counted(self, to: Address, message: m.Message) -> bool:
        """Count a message.

        Returns False for a message to a worker that is gone, if its replacement has sent nothing yet.
        """
        if to.role is Role.SERVER:
            self.lines.setdefault(to, ReliableChannel())
        line = self.lines.get(to)
        if line is not None:
            line.say(message)
        return line is not None or isinstance(message, m.Fail)


class Primary:
    """The copy that sends replies.

    Args:
        copy: the state from which it continues.
        save: returns the whole state of a copy as bytes (1-D uint8), or None if that is not possible now.
    """

    def __init__(self, copy: ReplicatedServer, save: Callable[[ReplicatedServer], torch.Tensor | None]) -> None:
        self.copy, self._save = copy, save
        self.me = copy.server.me
        self.shadow = Address(Role.SHADOW, self.me.group, self.me.index)
        self.up: set[Address] = set()  # peers with a connection
        self.covered = False
        """Whether the standby has every event with a reply."""
        self.joined = False
        self.fault: m.ProtocolError | None = None
        """The error of the last message, if it was refused."""
        self.differs = 0
        """The number of standbys that differed from this copy. Each was replaced."""
        self._marks: dict[int, int] = {}
        self._wanted = False
        self._covered_at = 0
        self._confirmed = 0
        self._held: deque[tuple[int, Address, m.Message]] = deque()
        self._told: dict[Address, int] = {}

    # --- events --------------------------------------------------------------------------------------------------

    def hear(self, sender: Address, message: m.Message) -> Out:
        """Handle a message. `fault` has the error if it was refused."""
        self.fault = None
        if sender == self.shadow:
            return self._echoed(message)
        if isinstance(message, ResumeConnection):
            return self._resumed(sender, message)
        out = self._greet(sender)
        if isinstance(message, Ack):
            out += self._event(TAKEN, sender, message.heard)
            return out + (self._tell(sender) if message.ask else [])
        out += self._event(WORD, sender, 0, message)
        if isinstance(message, m.Commit) or self._heard(sender) >= self._told.get(sender, 0) + OFTEN:
            out += self._tell(sender)
        return out

    def begin(self) -> None:
        """Forget the fault of an earlier message."""
        self.fault = None

    def lost(self, worker: Address) -> Out:
        """Handle the end of a worker's process.

        Messages that wait for it are dropped. They are not for the process that replaces it.
        """
        self.up.discard(worker)
        self._told.pop(worker, None)
        self._held = deque(held for held in self._held if held[1] != worker)
        return self._event(LOST, worker)

    def parted(self, server: Address) -> None:
        """Note the end of a connection to another server. Messages to it are kept."""
        self.up.discard(server)

    def connected(self, server: Address) -> Out:
        """Note the first connection to another server."""
        self.up.add(server)
        return []

    def reconnected(self, server: Address) -> Out:
        """Resume on a new connection to another server."""
        self.up.discard(server)
        return [(server, ResumeConnection(self._heard(server)))]

    def probe(self) -> Out:
        """Make an event without effect, so that the standby confirms it."""
        return self._event(TAKEN, self.me)

    def confirmed(self, index: int) -> bool:
        """Return whether the standby has confirmed this event.

        If it has, it has not become the primary itself. Without a standby the result is True.
        """
        return not self.joined or self._confirmed >= index

    def orphaned(self) -> Out:
        """Note that this copy is the primary now. The process of the former one is gone."""
        return self._event(ORPHANED, self.me)

    # --- the standby ---------------------------------------------------------------------------------------------

    def join(self) -> Out:
        """Send the state to a new standby, as soon as the state can be told."""
        self.covered = self.joined = False
        self._wanted = True
        return self._join_if_quiet()

    def alone(self) -> Out:
        """Stop waiting for the standby. The launcher has reported the end of its process."""
        self.covered = self.joined = self._wanted = False
        return self._release(self.copy.events)

    def _join_if_quiet(self) -> Out:
        data = self._save(self.copy) if self._wanted else None
        if data is None:
            return []
        self._wanted, self.joined = False, True
        self._marks.clear()
        index = self._covered_at = self.copy.events
        count = -(-data.numel() // PART)
        return [
            (self.shadow, StateTransfer(index, part, count, data.numel(), body=data[part * PART : (part + 1) * PART]))
            for part in range(count)
        ]

    def _echoed(self, message: m.Message) -> Out:
        """Handle a message of the standby.

        Confirmations from before its last state transfer are ignored.
        """
        if isinstance(message, ReplicaChecksum):
            found = self._marks.pop(message.index, None)
            if found in (None, message.mark) or not self.covered:
                return []
            self.differs += 1
            return self.alone() + self.join()
        if not isinstance(message, ReplicaAck):
            raise m.ProtocolError(f"{self.shadow} sent {type(message).__name__}, which a second copy never sends")
        if message.whole and message.index == self._covered_at:
            self.covered = self.joined
        return self._release(message.index) if self.covered else []

    def _release(self, index: int) -> Out:
        self._confirmed = max(self._confirmed, index)
        out: Out = []
        while self._held and self._held[0][0] <= self._confirmed:
            _, to, message = self._held.popleft()
            if to in self.up or to not in self.copy.lines:
                out.append((to, message))
        return out

    # --- inside --------------------------------------------------------------------------------------------------

    def _event(self, event: int, who: Address, count: int = 0, message: m.Message | None = None) -> Out:
        out: Out = []
        if self.joined:
            out.append((self.shadow, self._forward(event, who, count, message)))
        try:
            said = self.copy.take(event, who, count, message)
        except m.ProtocolError as error:
            self.fault, said = error, self.copy.said()
        found = self.copy.mark() if self.joined else None
        if found is not None:
            self._marks[self.copy.events] = found
        return out + self._put(said) + (self._join_if_quiet() if self._wanted else [])

    def _forward(self, event: int, who: Address, count: int, message: m.Message | None) -> ReplicatedEvent:
        kind, meta = m.encode(message) if message is not None else (0, b"")
        body = None if message is None else message.body
        if body is not None and not isinstance(message, _STAYS):
            body = body.clone()  # its memory may be overwritten before it is sent
        return ReplicatedEvent(
            event, self.copy.events + 1, int(who.role), who.group, who.index, count, kind, meta, body=body
        )

    def _put(self, said: Out) -> Out:
        """Send messages, or hold them until the standby has confirmed their event."""
        if self.joined:
            # Output commit: a reply leaves only after the standby has its event.
            self._held.extend((self.copy.events, to, message) for to, message in said)
            return []
        return [(to, message) for to, message in said if to in self.up or to not in self.copy.lines]

    def _tell(self, peer: Address) -> Out:
        """Ack the messages of a peer, once the standby has them."""
        self._told[peer] = heard = self._heard(peer)
        return self._put([(peer, Ack(heard))])

    def _heard(self, peer: Address) -> int:
        line = self.copy.lines.get(peer)
        return 0 if line is None else line.heard

    def _greet(self, sender: Address) -> Out:
        """Handle the first message on a connection.

        It comes from a process that had no connection here before, or after the other side has restarted.
        """
        if sender in self.up or sender == self.me:
            return []
        out: Out = []
        if sender.role is Role.WORKER and sender in self.copy.lines:  # the worker's former process is gone
            out = self.lost(sender)
        self.up.add(sender)
        return out + self._again(sender)

    def _resumed(self, sender: Address, message: ResumeConnection) -> Out:
        """Handle the reconnect of a peer.

        Raises:
            ProtocolError: the peer had no connection before.
        """
        line, out = self.copy.lines.get(sender), Out()
        if line is not None and line.life < message.life:  # messages of its earlier attempt were lost with the primary
            line, out = None, self.lost(sender)
        if (line is None and message.heard) or (line is not None and line.life > message.life):
            raise m.ProtocolError(f"{sender} resumes a connection that it never had")
        out += self._event(TAKEN, sender, message.heard)
        self.up.add(sender)
        if not message.answer:
            out.append((sender, ResumeConnection(self._heard(sender), True)))
        return out + self._again(sender)

    def _again(self, peer: Address) -> Out:
        """Return all messages that a peer has not received, without those still held."""
        line = self.copy.lines.get(peer)
        if line is None:
            return []
        waiting = sum(to == peer and not isinstance(held, UNCOUNTED) for _, to, held in self._held)
        kept = list(line.kept)
        return [(peer, message) for message in kept[: len(kept) - waiting]]

    @property
    def clear(self) -> bool:
        """Whether all messages were sent, and received by all connected workers."""
        lines = self.copy.lines.items()
        return not self._held and not any(
            peer in self.up or line.kept for peer, line in lines if peer.role is Role.WORKER
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
            return self.copy.server.place(_who(message), m.decode(message.kind, message.meta), False)
        return None

    def receipt(self, message: m.Message) -> ReplicaAck | None:
        """Return the ack that may be sent before the message is handled."""
        return ReplicaAck(message.index) if isinstance(message, ReplicatedEvent) and self.copy is not None else None

    def hear(self, message: m.Message) -> ReplicaAck | ReplicaChecksum | None:
        """Handle a message of the primary and return the reply, if any.

        Raises:
            ProtocolError: an event is missing, or a part is out of order.
        """
        if isinstance(message, StateTransfer) and message.body is not None:
            return self._part(message, message.body)
        if isinstance(message, ReplicaReleased):
            self.over = True
        elif isinstance(message, ReplicatedEvent):
            return self._follow(message)
        return None

    def succeed(self) -> ReplicatedServer | None:
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

    def _follow(self, message: ReplicatedEvent) -> ReplicaChecksum | None:
        copy = self.copy
        if copy is None or message.index != copy.events + 1:
            raise m.ProtocolError(f"event {message.index} is not the next event")
        inner = m.decode(message.kind, message.meta, message.body) if message.kind else None
        try:
            copy.take(message.event, _who(message), message.count, inner)
        except m.ProtocolError:  # the primary has refused the message in the same manner
            copy.said()
        found = copy.mark()
        return None if found is None else ReplicaChecksum(message.index, found)


def _who(message: ReplicatedEvent) -> Address:
    return Address(Role(message.role), message.group, message.number)
