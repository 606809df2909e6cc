"""Messages with the state of a worker, see `worker_state_store`."""

from dataclasses import dataclass

from topotrain.core.protocol.message import FROM_DATA_SERVICE, MOST, TO_DATA_SERVICE, Message, message


@message(62, TO_DATA_SERVICE, FROM_DATA_SERVICE)
@dataclass(frozen=True, slots=True)
class WorkerStatePart(Message):
    """Worker -> server (0,0): a part of the worker's state, and back on request.

    It is part `part` of `parts` of a state of `nbytes` bytes. All parts except the last have `worker_state_store.PART`
    bytes. A reply has the states -1 and -2, and for a missing state one message with parts = 0. The body is a snapshot.

    Attributes:
        number: -1: the state in which the worker's last epoch began. -2: the changes since then. From 1 on: the state
            at this snapshot.
    """

    group: int
    index: int
    number: int
    part: int
    parts: int
    nbytes: int

    def is_valid(self) -> bool:
        numbers = (self.group, self.index, self.part, self.parts, self.nbytes)
        return min(numbers) >= 0 and max(numbers) < MOST


@message(63, TO_DATA_SERVICE)
@dataclass(frozen=True, slots=True)
class WorkerStateRequest(Message):
    """Worker -> server (0,0): request for the state of a former process.

    The server replies with WorkerStatePart messages.

    Attributes:
        index: the worker of the sender's group of which the state is.
    """

    index: int

    def is_valid(self) -> bool:
        return 0 <= self.index < MOST
