"""Messages about parameters that a script has changed (`tt.assign`).

A worker sends them before the commit that carries out the change. All of them name the step of that commit.
"""

from dataclasses import dataclass

from topotrain.core.protocol.message import MOST, TO_SERVER, Message, message


@message(120, TO_SERVER)
@dataclass(frozen=True, slots=True)
class Assignment(Message):
    """Worker -> server: the script has changed parameters.

    Attributes:
        buckets: the number of AssignedBucket messages of this worker to this server.
        stream, batch: the place in the script: the batch that was read last, or a negative number between two passes.
        number: the number of earlier changes at this place.
        follows_step: the script has read no batch since its last step.
        repeated: an earlier start of the job has made this change, so its values hold it already.
    """

    step: int
    buckets: int
    stream: int
    batch: int
    number: int
    follows_step: bool
    repeated: bool

    def is_valid(self) -> bool:
        numbers = (self.step, self.buckets, self.batch, self.number)
        return min(numbers) >= 0 and max(numbers) < MOST and -MOST < self.stream < MOST


@message(121, TO_SERVER)
@dataclass(frozen=True, slots=True)
class AssignedBucket(Message):
    """Worker -> server: the new values of a bucket.

    One worker of the group sends it (see `assignment_client.sender_of`). The body is a view of the worker's buffer. It
    stays valid until the step is committed.

    Attributes:
        changed: a bit for each changed piece of the bucket.
        masked: an AssignedElements follows.
    """

    step: int
    bucket: int
    changed: bytes
    masked: bool

    def is_valid(self) -> bool:
        return 0 <= self.step < MOST and self.bucket >= 0


@message(122, TO_SERVER)
@dataclass(frozen=True, slots=True)
class AssignedElements(Message):
    """Worker -> server: a bit for each element of a bucket. Snapshot.

    A set bit means that the script has changed the element.
    """

    step: int
    bucket: int

    def is_valid(self) -> bool:
        return 0 <= self.step < MOST and self.bucket >= 0
