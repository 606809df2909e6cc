"""Messages between a late worker, in a group with backup workers, and its servers."""

from dataclasses import dataclass

from topotrain.core.protocol.message import (
    MOST,
    MOST_EPOCHS,
    Condition,
    Message,
    Receiver,
    Route,
    Sender,
    message,
)


@message(36, Route(Sender.COORDINATOR, Receiver.WORKER, Condition.BACKUP_WORKERS))
@dataclass(frozen=True, slots=True)
class StepMissed(Message):
    """Coordinator -> worker: this step was decided without the worker's gradients."""

    step: int

    def is_valid(self) -> bool:
        return 0 <= self.step < MOST


@message(37, Route(Sender.GROUP_WORKERS, Receiver.COORDINATOR, Condition.BACKUP_WORKERS))
@dataclass(frozen=True, slots=True)
class StepCatchUp(Message):
    """Worker -> coordinator: request for the values and the step of the group.

    Every shard replies.

    Attributes:
        round: numbers the requests of one worker from 1. 0: this is no request, and only reports `through`.
        through: reply only when all other workers have used the batches of this epoch, as the sender has. -1: at once.
    """

    round: int
    through: int

    def is_valid(self) -> bool:
        in_bounds = 0 <= self.round < MOST and -1 <= self.through < MOST_EPOCHS
        return in_bounds and (self.round > 0 or self.through >= 0)


@message(38, Route(Sender.GROUP_SERVERS, Receiver.WORKER, Condition.BACKUP_WORKERS))
@dataclass(frozen=True, slots=True)
class StepCaughtUp(Message):
    """Shard -> worker: the values of StepCatchUp number `round` were sent.

    The group is in `step`.

    Attributes:
        snapshot: as in Applied.
    """

    round: int
    step: int
    version: int
    snapshot: int = 0

    def is_valid(self) -> bool:
        return 0 <= self.round < MOST and 0 <= self.step < MOST and 0 <= self.version < MOST
