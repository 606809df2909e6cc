"""Messages about the rounds of an outer optimizer."""

from dataclasses import dataclass

from topotrain.core.protocol.message import FROM_COORDINATOR, MOST, MOST_EPOCHS, TO_COORDINATOR, Message, message

MOST_SECONDS = 1e9  # of a step
OWN_TURN = -1
"""No fragment: the worker goes on with its own turn."""


@message(158, TO_COORDINATOR)
@dataclass(frozen=True, slots=True)
class StepTime(Message):
    """Worker -> coordinator: the seconds of one of the worker's steps."""

    seconds: float

    def is_valid(self) -> bool:
        return 0 < self.seconds < MOST_SECONDS


@message(159, FROM_COORDINATOR)
@dataclass(frozen=True, slots=True)
class NextRound(Message):
    """Coordinator -> worker: the fragment of the next push, and the pace.

    Attributes:
        pushes: the number of pushes that were decided before.
        fragment: the fragment that the others push next, or OWN_TURN.
        back: the worker is back, or has rested. The fragment holds until its next push.
        seconds: the time of a step of the fastest worker. 0: not known.
    """

    pushes: int
    fragment: int
    seconds: float = 0.0
    back: bool = False

    def is_valid(self) -> bool:
        return 0 <= self.pushes < MOST and OWN_TURN <= self.fragment < MOST_EPOCHS and 0 <= self.seconds < MOST_SECONDS
