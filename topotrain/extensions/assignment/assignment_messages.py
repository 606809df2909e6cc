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
        buckets: the number of the server's buckets that this worker has changed. Each has an AssignedBucket.
        stream, batch: the place in the script: the batch that was read last, or a negative number between two passes.
        number: the number of earlier changes at this place.
        repeated: an earlier start of the job has made this change, so its values hold it already.
    """

    step: int
    buckets: int
    stream: int
    batch: int
    number: int
    repeated: bool

    def is_valid(self) -> bool:
        numbers = (self.step, self.buckets, self.batch, self.number)
        return min(numbers) >= 0 and max(numbers) < MOST and -MOST < self.stream < MOST


@message(121, TO_SERVER)
@dataclass(frozen=True, slots=True)
class AssignedBucket(Message):
    """Worker -> server: the new values of a bucket.

    Only one worker of the group sends the body, a view of its buffer. It stays valid until the step is committed.

    Attributes:
        changed: a bit for each changed piece of the bucket.
        checksums: of the new values of these pieces. All workers of the group must send the same.
        masked: an AssignedElements follows.
    """

    step: int
    bucket: int
    changed: bytes
    checksums: tuple[int, ...]
    masked: bool

    def is_valid(self) -> bool:
        return 0 <= self.step < MOST and self.bucket >= 0


@message(122, TO_SERVER)
@dataclass(frozen=True, slots=True)
class AssignedElements(Message):
    """Worker -> server: a bit for each element of a bucket that the script has changed. Snapshot."""

    step: int
    bucket: int

    def is_valid(self) -> bool:
        return 0 <= self.step < MOST and self.bucket >= 0
