"""Messages about the length of rounds with a quorum."""

from dataclasses import dataclass
from math import inf

from topotrain.core.protocol.message import MOST, TO_COORDINATOR, Message, Receiver, Route, Sender, message


@message(156, Route(Sender.SELF, Receiver.COORDINATOR))
@dataclass(frozen=True, slots=True)
class WindowOver(Message):
    """Timer of a coordinator -> coordinator: the grace window of a round has ended.

    Attributes:
        fragment: that of the round.
        number: of the window, from 1. A later window of the fragment has another number.
    """

    fragment: int
    number: int

    def is_valid(self) -> bool:
        return 0 <= self.fragment < MOST and 0 < self.number < MOST


@message(157, TO_COORDINATOR)
@dataclass(frozen=True, slots=True)
class ExchangeTime(Message):
    """Worker -> coordinator: how long an exchange took.

    Attributes:
        step: the number of its commit.
        seconds: from the push until the new values were there.
    """

    step: int
    seconds: float

    def is_valid(self) -> bool:
        return 0 <= self.step < MOST and 0 <= self.seconds < inf
