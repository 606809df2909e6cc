"""Messages between copies of a server, and of channels that survive a reconnect.

The replication channel handles them itself, so they have no routes, and they are not counted on the channel.
"""

from dataclasses import dataclass

from topotrain.core.protocol.message import Message, message


@message(100)
@dataclass(frozen=True, slots=True)
class ResumeConnection(Message):
    """First message of both sides on a new connection: messages received so far.

    The other side sends the messages after these again.

    Attributes:
        answer: this message answers the one of the other side.
        restarts: the number of restarts of the sender's worker group. An earlier process of the worker has sent and
            received other messages.
    """

    received: int
    answer: bool = False
    restarts: int = 0


@message(101)
@dataclass(frozen=True, slots=True)
class Ack(Message):
    """Worker or server -> server, and back: the first `received` messages are safe.

    The receiver may drop them.

    Attributes:
        ask: request for such an ack, once both copies have the sender's messages.
    """

    received: int
    ask: bool = False


@message(102)
@dataclass(frozen=True, slots=True)
class ReplicatedEvent(Message):
    """Primary -> standby: event number `index`. `state_machine` describes the events.

    Attributes:
        role, group, number: the address from which the event comes, or which it is about.
        count: the number of acknowledged messages.
        kind, meta: the message of the event. Its body is this message's body: a view, which `landing_buffers` keeps
            valid as long as a standby may read it.
        finite: the body is a gradient in which the primary has found nothing that is not finite.
    """

    event: int
    index: int
    role: int
    group: int
    number: int
    count: int
    kind: int
    meta: bytes
    finite: bool = False


@message(103)
@dataclass(frozen=True, slots=True)
class ReplicaAck(Message):
    """Standby -> primary: all events up to number `index` have arrived.

    Attributes:
        whole: the standby has the primary's state as of this event.
        handled: the events up to this one are handled, or have bodies that were copied (`landing_buffers`).
    """

    index: int
    whole: bool = False
    handled: int = 0


@message(104)
@dataclass(frozen=True, slots=True)
class StateTransfer(Message):
    """Primary -> new standby: a part of the state (see `state_transfer`). Snapshot.

    Attributes:
        index: the number of events that are in the state.
        part, parts, nbytes: this is part number `part` of `parts`, of `nbytes` bytes in all.
    """

    index: int
    part: int
    parts: int
    nbytes: int


@message(105)
@dataclass(frozen=True, slots=True)
class ReplicaReleased(Message):
    """Primary -> standby: the job is over for both."""


@message(106)
@dataclass(frozen=True, slots=True)
class ReplicaChecksum(Message):
    """Standby -> primary: checksum after event number `index` (`replica_checksum`)."""

    index: int
    mark: int
