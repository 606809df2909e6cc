"""Messages with the state of an inner optimizer, see `inner_state_transfers`."""

from dataclasses import dataclass

from topotrain.core.protocol.message import (
    FROM_COORDINATOR,
    MOST,
    TO_COORDINATOR,
    Message,
    Receiver,
    Route,
    Sender,
    message,
)


@message(160, TO_COORDINATOR, FROM_COORDINATOR)
@dataclass(frozen=True, slots=True)
class InnerStateRequest(Message):
    """Worker -> coordinator: asks for the next part. Coordinator -> donor: this part.

    Attributes:
        group: the worker group that asks.
        number: of the transfer. A worker that asks does not know it, and sends 0.
        part: from 0. The donor's copy is made with part 0. -1: the copy is not needed any more.
    """

    group: int
    number: int = 0
    part: int = 0

    def is_valid(self) -> bool:
        return 0 <= self.group < MOST and 0 <= self.number < MOST and -1 <= self.part < MOST


@message(161, TO_COORDINATOR, FROM_COORDINATOR)
@dataclass(frozen=True, slots=True)
class InnerStatePart(Message):
    """Donor -> coordinator -> worker: a part of the donor's state, as the body.

    All parts except the last have `inner_state_client.PART` bytes.

    Attributes:
        group: the worker group that asks.
        number: of the transfer. The parts of two transfers are not of one state.
        parts: of the state. 0: there is none, and no body.
        nbytes: of the whole state.
    """

    group: int
    number: int
    part: int
    parts: int
    nbytes: int

    def is_valid(self) -> bool:
        numbers = (self.group, self.number, self.part, self.parts, self.nbytes)
        return min(numbers) >= 0 and max(numbers) < MOST


@message(162, Route(Sender.SELF, Receiver.COORDINATOR))
@dataclass(frozen=True, slots=True)
class DonorSilent(Message):
    """Timer of a coordinator: a donor is gone, or this part has had its time."""

    group: int
    number: int
    part: int

    def is_valid(self) -> bool:
        numbers = (self.group, self.number, self.part)
        return min(numbers) >= 0 and max(numbers) < MOST
