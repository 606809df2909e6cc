"""One copy of a replicated server, with its channels and the number of its events."""

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field

from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.server.component_state import State, field_values
from topotrain.core.server.consistency import AWAY
from topotrain.core.server.gradients.committed_pushes import CommittedPushes
from topotrain.core.server.server import ServerFactory
from topotrain.core.server.server_context import Out
from topotrain.core.transport_contract import MessageSender
from topotrain.extensions.checkpointing.checkpoint_extension import snapshots_of
from topotrain.extensions.elastic.membership_messages import GroupLeft
from topotrain.extensions.replication.replica_checksum import mark

MESSAGE, LOST, CONFIRMED, NEW_PRIMARY = 0, 1, 2, 3
"""ReplicatedEvent.event: a message, the end of a worker's process, an ack of a peer, a new primary."""


def standby_of(server: Address) -> Address:
    """Return the address of a server's standby."""
    return Address(Role.STANDBY, server.group, server.index)


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


class OutgoingObserver(ABC):
    """Is notified of each message that a server sends while it handles an event."""

    @abstractmethod
    def on_outgoing(self) -> None:
        """A message is among the outgoing ones."""


class ReplicatedServer(MessageSender):
    """One copy of a server with its whole state: server, channels and event count."""

    def __init__(self, factory: ServerFactory, me: Address) -> None:
        self._out: Out = []
        self._observer: OutgoingObserver | None = None
        self.server = factory.make(me, self)
        self.channels: dict[Address, ReliableChannel] = {}
        self.events = 0
        self._before = 0  # the version of the values, one event ago

    def send(self, to: Address, message: m.Message) -> None:
        """Collect a message of the server, which `outgoing` returns."""
        self._out.append((to, message))
        if self._observer is not None:
            self._observer.on_outgoing()

    def attach(self, observer: OutgoingObserver) -> None:
        """Notify this observer from here on."""
        self._observer = observer

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
        # A probe confirms messages of the server itself, which has no channel: an event without effect.
        if event == CONFIRMED:
            if who in self.channels:
                self.channels[who].confirm(count)
        elif event == LOST:
            self.channels.pop(who, None)
            self.server.lost(who)
        # The process that wrote snapshots is gone, so each part under way has failed. Both copies handle that.
        elif event == NEW_PRIMARY:
            for part in snapshots_of(self.server).failed_replies():
                self.server.handle(self.server.me, part)
        elif message is not None:
            self._handle_message(who, message)
        return self.outgoing()

    def _handle_message(self, who: Address, message: m.Message) -> None:
        # The server's messages to itself stay in its process: there is no connection on which to count them.
        if who != self.server.me:
            channel = self.channels.setdefault(who, ReliableChannel())
            channel.receive()
            if isinstance(message, m.WorkerRejoined) and channel.received == 1:  # first message of a restarted worker
                channel.restart(message.incarnation)
        self.server.handle(who, message)
        if isinstance(message, GroupLeft) or (isinstance(message, m.StepDecision) and message.change == AWAY):
            for worker in [worker for worker in self.channels if self.server.worker_groups.is_away(worker)]:
                del self.channels[worker]  # the worker will not reconnect

    def received(self, peer: Address) -> int:
        """Return the number of messages of a peer."""
        channel = self.channels.get(peer)
        return 0 if channel is None else channel.received

    def found_finite(self, worker: Address, push: m.Push) -> bool:
        """Return whether this copy has found only finite numbers in a push."""
        source = self._source(worker)
        return source is not None and source.found_finite(worker.index, push.bucket)

    def expect_finite(self, worker: Address, push: m.Push) -> None:
        """Note that the other copy has found so in the push that is handled next."""
        source = self._source(worker)
        if source is not None:
            source.expect_finite(worker.index, push.bucket)

    def _source(self, worker: Address) -> CommittedPushes | None:
        # The other sources look at sums, and each copy adds up by itself.
        source = None if self.server.model is None else self.server.model.staging.get(worker.group)
        return source if isinstance(source, CommittedPushes) else None

    def mark(self) -> int | None:
        """Return the checksum to compare after the last event, or None."""
        return mark(self.server, self._before)

    def outgoing(self) -> Out:
        """Return the messages to send since the last event."""
        out, self._out = self._out, []
        return [(to, message) for to, message in out if self._counted(to, message)]

    def _counted(self, to: Address, message: m.Message) -> bool:
        """Count a message. Returns False for a worker that is gone."""
        # A worker's channel begins with the first message of its process. Until then only a Fail is sent to it.
        if to.role is Role.SERVER:
            self.channels.setdefault(to, ReliableChannel())
        channel = self.channels.get(to)
        if channel is not None:
            channel.send(message)
        return channel is not None or isinstance(message, m.Fail)
