"""Two copies of a server: what one is told, the other is told, in the same order, before anybody hears the answer.

A server is a deterministic function of what it is told. So its second copy, a `Standby` in another process, is told
every event by the first, the `Primary`, and has in the end the same values, bit for bit, and has said the same
(state-machine replication: Schneider, 1990). What the first one answers leaves its process when the second has
confirmed the event that it answers (output commit: Elnozahy et al., 2002): nothing that anybody has ever been told is
lost with one process.

From time to time both say what they have become (`replica_checksum`). Where that differs, nobody can tell which one is
right: the job goes on with the one that has spoken, and the other one is made anew.

Between two residents every message is counted on a `ReliableChannel`, at both ends and in both copies, and kept until
the other side has it for good. When the way is made anew, to the same server in another process, both say how many they
have heard, and what is missing is said again: each message is acted upon once, and nobody starts again.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.server.consistency import AWAY
from topotrain.core.server.server import Server
from topotrain.extensions.replication.replica_checksum import mark

Out = list[tuple[Address, m.Message]]
Make = Callable[[Callable[[Address, m.Message], None]], Server]
"""Makes a server which tells every answer to what it is given."""

WORD, LOST, TAKEN, ORPHANED = 0, 1, 2, 3
"""Forward.event: a message came; a worker's process is gone; a peer has heard so many; the server's host is another."""

UNCOUNTED = (
    m.ResumeConnection,
    m.Ack,
    m.ReplicatedEvent,
    m.ReplicaAck,
    m.StateTransfer,
    m.ReplicaReleased,
    m.ReplicaChecksum,
)
PART = 16 << 20
"""Bytes of a part of a likeness, but for the last."""
OFTEN = 16
"""After so many messages of another server it is told that they are here for good."""
_STAYS = (m.Push, m.GradientOverride, m.Init)
"""Whose bodies lie in memory that nobody writes before their sender has been answered."""


@dataclass(slots=True)
class ReliableChannel:
    """One way between two residents, however often it is made anew, as one end sees it.

    said, heard: messages, ever. kept: the last ones that were said, which the other side may not have for good. life:
    how often the group of a worker at the other end had been started again.
    """

    said: int = 0
    heard: int = 0
    kept: "deque[m.Message]" = field(default_factory=deque)
    life: int = 0

    def say(self, message: m.Message) -> None:
        """One more is said."""
        self.kept.append(message)
        self.said += 1

    def taken(self, count: int) -> None:
        """The other side has so many. Raises ProtocolError for more than were said."""
        if count > self.said:
            raise m.ProtocolError(f"{count} messages were heard, and {self.said} said")
        while self.said - len(self.kept) < count:
            self.kept.popleft()


class ReplicatedServer:
    """One copy of a server, with all that counts as its state: the server, its lines, and how many events it has had.

    Args:
        make: see Make.
    """

    def __init__(self, make: Make) -> None:
        self._out: Out = []
        self.server = make(lambda to, message: self._out.append((to, message)))
        self.lines: dict[Address, ReliableChannel] = {}
        self.events = 0
        self._before = 0  # the version of the values, one event ago

    def take(self, event: int, who: Address, count: int = 0, message: m.Message | None = None) -> Out:
        """The next event; returns what is to be said, which is counted already.

        Raises:
            ProtocolError: as `Server.handle`; what there is to say is then the next event's.
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
            for part in self.server.snapshots.orphaned():
                self.server.handle(self.server.me, part)
        elif message is not None:
            self._hear(who, message)
        return self.said()

    def _hear(self, who: Address, message: m.Message) -> None:
        if who != self.server.me:
            line = self.lines.setdefault(who, ReliableChannel())
            line.heard += 1
            if isinstance(message, m.WorkerRejoined) and line.heard == 1:  # what a process that stands in says first
                line.life = message.incarnation
        self.server.handle(who, message)
        if isinstance(message, m.GroupLeft) or (isinstance(message, m.StepDecision) and message.change == AWAY):
            for worker in [worker for worker in self.lines if self.server.misses(worker)]:
                del self.lines[worker]  # nobody will come for what is left there

    def mark(self) -> int | None:
        """What the copies are to compare behind the last event; None: nothing."""
        return mark(self.server, self._before)

    def said(self) -> Out:
        """What has been said since the last event."""
        out, self._out = self._out, []
        return [(to, message) for to, message in out if self._counted(to, message)]

    def _counted(self, to: Address, message: m.Message) -> bool:
        """False: it was meant for a worker that is gone, and whose place nobody has taken who has said anything yet."""
        if to.role is Role.SERVER:
            self.lines.setdefault(to, ReliableChannel())
        line = self.lines.get(to)
        if line is not None:
            line.say(message)
        return line is not None or isinstance(message, m.Fail)


class Primary:
    """The copy that speaks.

    Args:
        copy: what it goes on from.
        portray: the bytes (1-D uint8) of all that a copy is; None where it cannot be told now.
    """

    def __init__(self, copy: ReplicatedServer, portray: Callable[[ReplicatedServer], torch.Tensor | None]) -> None:
        self.copy, self._portray = copy, portray
        self.me = copy.server.me
        self.shadow = Address(Role.SHADOW, self.me.group, self.me.index)
        self.up: set[Address] = set()  # who has a way here
        self.covered = False
        """Whether the second copy has everything that was ever answered."""
        self.joined = False
        self.fault: m.ProtocolError | None = None
        """What was wrong with the last message that was heard."""
        self.differs = 0
        """So often a second copy was found to be another one than this; each time it is made anew."""
        self._marks: dict[int, int] = {}
        self._wanted = False
        self._covered_at = 0
        self._confirmed = 0
        self._held: deque[tuple[int, Address, m.Message]] = deque()
        self._told: dict[Address, int] = {}

    # --- what happens --------------------------------------------------------------------------------------------

    def hear(self, sender: Address, message: m.Message) -> Out:
        """A message has come; `fault` says whether its sender must not have said it."""
        self.fault = None
        if sender == self.shadow:
            return self._echoed(message)
        if isinstance(message, m.ResumeConnection):
            return self._resumed(sender, message)
        out = self._greet(sender)
        if isinstance(message, m.Ack):
            out += self._event(TAKEN, sender, message.heard)
            return out + (self._tell(sender) if message.ask else [])
        out += self._event(WORD, sender, 0, message)
        if isinstance(message, m.Commit) or self._heard(sender) >= self._told.get(sender, 0) + OFTEN:
            out += self._tell(sender)
        return out

    def lost(self, worker: Address) -> Out:
        """A worker's process is gone; what waits to be said to it is not for the one that takes its place."""
        self.up.discard(worker)
        self._told.pop(worker, None)
        self._held = deque(held for held in self._held if held[1] != worker)
        return self._event(LOST, worker)

    def parted(self, server: Address) -> None:
        """The way to another server has ended; what is said to it is kept until there is another."""
        self.up.discard(server)

    def connected(self, server: Address) -> Out:
        """There is a way to another server, on which nothing was ever said."""
        self.up.add(server)
        return []

    def reconnected(self, server: Address) -> Out:
        """There is a new way to another server, which has a new process."""
        self.up.discard(server)
        return [(server, m.ResumeConnection(self._heard(server)))]

    def probe(self) -> Out:
        """An event in which nothing happens, to be confirmed."""
        return self._event(TAKEN, self.me)

    def confirmed(self, index: int) -> bool:
        """Whether the second copy, if there is one, has taken that event from here, and so did not speak itself."""
        return not self.joined or self._confirmed >= index

    def orphaned(self) -> Out:
        """This copy speaks from now on, in place of one whose process is gone."""
        return self._event(ORPHANED, self.me)

    # --- the second copy -----------------------------------------------------------------------------------------

    def join(self) -> Out:
        """There is a way to a fresh shadow: it is told everything as soon as that can be told."""
        self.covered = self.joined = False
        self._wanted = True
        return self._join_if_quiet()

    def alone(self) -> Out:
        """The second copy's process is gone, as those know who see all processes: nobody is waited for any more."""
        self.covered = self.joined = self._wanted = False
        return self._release(self.copy.events)

    def _join_if_quiet(self) -> Out:
        data = self._portray(self.copy) if self._wanted else None
        if data is None:
            return []
        self._wanted, self.joined = False, True
        self._marks.clear()
        index = self._covered_at = self.copy.events
        count = -(-data.numel() // PART)
        return [
            (self.shadow, m.StateTransfer(index, part, count, data.numel(), body=data[part * PART : (part + 1) * PART]))
            for part in range(count)
        ]

    def _echoed(self, message: m.Message) -> Out:
        """What the second copy says. What it has said before it was made anew counts no more."""
        if isinstance(message, m.ReplicaChecksum):
            found = self._marks.pop(message.index, None)
            if found in (None, message.mark) or not self.covered:
                return []
            self.differs += 1
            return self.alone() + self.join()
        if not isinstance(message, m.ReplicaAck):
            raise m.ProtocolError(f"{self.shadow} says {type(message).__name__}")
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

    def _forward(self, event: int, who: Address, count: int, message: m.Message | None) -> m.ReplicatedEvent:
        kind, meta = m.encode(message) if message is not None else (0, b"")
        body = None if message is None else message.body
        if body is not None and not isinstance(message, _STAYS):
            body = body.clone()
        return m.ReplicatedEvent(
            event, self.copy.events + 1, int(who.role), who.group, who.index, count, kind, meta, body=body
        )

    def _put(self, said: Out) -> Out:
        """Say it, as soon as nobody can lose any more what it answers."""
        if self.joined:
            self._held.extend((self.copy.events, to, message) for to, message in said)
            return []
        return [(to, message) for to, message in said if to in self.up or to not in self.copy.lines]

    def _tell(self, peer: Address) -> Out:
        """Tell it how many of its messages are here for good, once they are."""
        self._told[peer] = heard = self._heard(peer)
        return self._put([(peer, m.Ack(heard))])

    def _heard(self, peer: Address) -> int:
        line = self.copy.lines.get(peer)
        return 0 if line is None else line.heard

    def _greet(self, sender: Address) -> Out:
        """A first word on a way: of a process that has had none here, or none has had."""
        if sender in self.up or sender == self.me:
            return []
        out: Out = []
        if sender.role is Role.WORKER and sender in self.copy.lines:  # whoever had its place is gone
            out = self.lost(sender)
        self.up.add(sender)
        return out + self._again(sender)

    def _resumed(self, sender: Address, message: m.ResumeConnection) -> Out:
        """A peer has made its way here anew. Raises ProtocolError for one that had none."""
        line, out = self.copy.lines.get(sender), Out()
        if line is not None and line.life < message.life:  # what it had begun to say has died with the other copy
            line, out = None, self.lost(sender)
        if (line is None and message.heard) or (line is not None and line.life > message.life):
            raise m.ProtocolError(f"{sender} goes on where it has never been")
        out += self._event(TAKEN, sender, message.heard)
        self.up.add(sender)
        if not message.answer:
            out.append((sender, m.ResumeConnection(self._heard(sender), True)))
        return out + self._again(sender)

    def _again(self, peer: Address) -> Out:
        """All that a peer has not heard, but for what has to wait."""
        line = self.copy.lines.get(peer)
        if line is None:
            return []
        waiting = sum(to == peer and not isinstance(held, UNCOUNTED) for _, to, held in self._held)
        kept = list(line.kept)
        return [(peer, message) for message in kept[: len(kept) - waiting]]

    @property
    def clear(self) -> bool:
        """Everything was said that has an address, and heard by those who still listen."""
        lines = self.copy.lines.items()
        return not self._held and not any(
            peer in self.up or line.kept for peer, line in lines if peer.role is Role.WORKER
        )


class Standby:
    """The copy that listens.

    Args:
        make: see Make.
        restore: makes a fresh copy the one of these bytes (1-D uint8).
    """

    def __init__(self, make: Make, restore: Callable[[ReplicatedServer, torch.Tensor], None]) -> None:
        self._make, self._restore = make, restore
        self._parts: list[torch.Tensor] = []
        self.copy: ReplicatedServer | None = None
        self.over = False
        """There is nothing left to do."""

    def place(self, message: m.Message) -> torch.Tensor | None:
        """Where a body is to be received. Raises ProtocolError."""
        if isinstance(message, m.StateTransfer):
            left = message.nbytes - message.part * PART
            if left <= 0 or message.part != len(self._parts):
                raise m.ProtocolError(f"part {message.part} of a likeness of {message.nbytes} bytes")
            if not message.part:
                self.copy = None  # it is made anew, for it was not what it should be
            return torch.empty(min(PART, left), dtype=torch.uint8)
        if isinstance(message, m.ReplicatedEvent) and self.copy is not None:
            return self.copy.server.place(_who(message), m.decode(message.kind, message.meta), False)
        return None

    def receipt(self, message: m.Message) -> m.ReplicaAck | None:
        """What may be answered before the message is acted upon."""
        return m.ReplicaAck(message.index) if isinstance(message, m.ReplicatedEvent) and self.copy is not None else None

    def hear(self, message: m.Message) -> m.ReplicaAck | m.ReplicaChecksum | None:
        """Take what the lead says; returns what is to be answered. Raises ProtocolError."""
        if isinstance(message, m.StateTransfer) and message.body is not None:
            return self._part(message, message.body)
        if isinstance(message, m.ReplicaReleased):
            self.over = True
        elif isinstance(message, m.ReplicatedEvent):
            return self._follow(message)
        return None

    def _part(self, message: m.StateTransfer, body: torch.Tensor) -> m.ReplicaAck | None:
        self._parts.append(body)
        if len(self._parts) < message.parts:
            return None
        parts, self._parts = self._parts, []
        copy = ReplicatedServer(self._make)
        self._restore(copy, parts[0] if len(parts) == 1 else torch.cat(parts))
        copy.events = message.index
        self.copy = copy
        return m.ReplicaAck(message.index, whole=True)

    def _follow(self, message: m.ReplicatedEvent) -> m.ReplicaChecksum | None:
        copy = self.copy
        if copy is None or message.index != copy.events + 1:
            raise m.ProtocolError(f"event {message.index} does not follow")
        inner = m.decode(message.kind, message.meta, message.body) if message.kind else None
        try:
            copy.take(message.event, _who(message), message.count, inner)
        except m.ProtocolError:  # the lead has turned its sender away, and said the same
            copy.said()
        found = copy.mark()
        return None if found is None else m.ReplicaChecksum(message.index, found)


def _who(message: m.ReplicatedEvent) -> Address:
    return Address(Role(message.role), message.group, message.number)
