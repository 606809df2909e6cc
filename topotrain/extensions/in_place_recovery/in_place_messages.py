"""Messages of a group and its servers when a worker dies, and when it is back."""

from dataclasses import dataclass

from topotrain.core.protocol.message import (
    FROM_COORDINATOR,
    FROM_SERVER,
    MOST,
    MOST_EPOCHS,
    TO_COORDINATOR,
    Message,
    message,
)


@message(44, FROM_SERVER)
@dataclass(frozen=True, slots=True)
class StepAborted(Message):
    """Shard -> worker: this step of the group is dropped.

    Its number is that of no update. The group repeats its batch in the step after it. Every shard sends the message.

    Attributes:
        members: the workers of that step, in rising order. The batch is divided among them.
    """

    step: int
    members: tuple[int, ...]

    def is_valid(self) -> bool:
        return 0 <= self.step < MOST and all(0 <= index < MOST_EPOCHS for index in self.members)


@message(45, TO_COORDINATOR)
@dataclass(frozen=True, slots=True)
class GroupEpochRequest(Message):
    """Worker -> coordinator: request for the epoch that the worker's group is in."""

    number: int

    def is_valid(self) -> bool:
        return 0 < self.number < MOST


@message(46, FROM_COORDINATOR)
@dataclass(frozen=True, slots=True)
class GroupEpoch(Message):
    """Coordinator -> worker: reply to GroupEpochRequest.

    Attributes:
        epoch: the last epoch of which a batch of the group is applied.
        joined: the worker is a member of its group already.
    """

    number: int
    epoch: int
    joined: bool

    def is_valid(self) -> bool:
        return 0 < self.number < MOST and 0 <= self.epoch < MOST_EPOCHS


@message(47, TO_COORDINATOR)
@dataclass(frozen=True, slots=True)
class JoinRequest(Message):
    """Worker -> coordinator: a new process asks to be a member of its group.

    Every shard replies with the values, and then with Joined.

    Attributes:
        number: of the request. It gives the round of the values, see `extra_round`.
    """

    number: int

    def is_valid(self) -> bool:
        return 0 < self.number < MOST


@message(48, FROM_SERVER)
@dataclass(frozen=True, slots=True)
class Joined(Message):
    """Shard -> worker: the worker is a member from this step of its group on.

    Attributes:
        members: as in StepAborted, with the worker itself.
    """

    number: int
    step: int
    version: int
    members: tuple[int, ...]

    def is_valid(self) -> bool:
        in_bounds = 0 < self.number < MOST and 0 <= self.step < MOST and 0 <= self.version < MOST
        return in_bounds and all(0 <= index < MOST_EPOCHS for index in self.members)
