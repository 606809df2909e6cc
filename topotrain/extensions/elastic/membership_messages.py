"""Messages about worker groups that restart, leave and join."""

from dataclasses import dataclass

from topotrain.core.protocol.message import (
    MOST_EPOCHS,
    Message,
    Receiver,
    Route,
    Sender,
    message,
)

_TO_DATA_SERVICE = Route(Sender.COORDINATORS, Receiver.DATA_SERVICE)
_OWN_PROCESS = Route(Sender.SELF, Receiver.COORDINATOR)


@message(24, Route(Sender.GROUP_SERVERS, Receiver.COORDINATOR), _TO_DATA_SERVICE, _OWN_PROCESS, names_group=True)
@dataclass(frozen=True, slots=True)
class RestartRequest(Message):
    """Shard -> coordinator: accept the workers of this incarnation of a group.

    The process of the coordinator sends it, too, where the launcher decides what restarts.

    Attributes:
        index: the one worker that is meant. -1: the whole group.
    """

    group: int
    incarnation: int
    index: int = -1

    def is_valid(self) -> bool:
        return 0 <= self.incarnation < MOST_EPOCHS and -1 <= self.index < MOST_EPOCHS


@message(25, _TO_DATA_SERVICE, Route(Sender.DATA_SERVICE, Receiver.COORDINATOR), names_group=True)
@dataclass(frozen=True, slots=True)
class AppliedBatchesOfStreams(Message):
    """Server (0,0) -> coordinator of other servers: request for applied batches.

    The streams belong to a worker group that restarts. The coordinator sends the message back, with the counts, once no
    step of an earlier incarnation can be applied any more.

    Attributes:
        counts: flat pairs (stream, number of applied batches). In the request the numbers are 0.
        ended: all scripts of the group had ended.
    """

    group: int
    incarnation: int
    part: int
    parts: int
    counts: tuple[int, ...]
    ended: bool = False

    def is_valid(self) -> bool:
        in_bounds = 0 <= self.incarnation < MOST_EPOCHS and 0 <= self.part < self.parts < MOST_EPOCHS
        return in_bounds and len(self.counts) % 2 == 0


@message(28, _OWN_PROCESS, names_group=True)
@dataclass(frozen=True, slots=True)
class GroupLeaveRequest(Message):
    """Process of a coordinator -> coordinator: a group ends after its next step.

    Attributes:
        incarnation: the workers that are meant. Workers of a later incarnation stay.
    """

    group: int
    incarnation: int


@message(29, _OWN_PROCESS, names_group=True)
@dataclass(frozen=True, slots=True)
class GroupLeft(Message):
    """Process of a coordinator -> coordinator: the processes of a group have ended.

    All processes before this incarnation have, and no other process follows now.
    """

    group: int
    incarnation: int

    def is_valid(self) -> bool:
        return 0 <= self.incarnation < MOST_EPOCHS
