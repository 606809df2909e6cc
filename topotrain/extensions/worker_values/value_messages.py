"""Messages about a script's values that workers exchange, such as of `tt.mean`."""

from dataclasses import dataclass

from topotrain.core.protocol.message import FROM_DATA_SERVICE, MOST, TO_DATA_SERVICE, Message, message

PART = 16 << 20
"""Bytes of a part, but for the last."""
LARGEST = 1 << 30
"""Bytes of one worker's value, at most."""


@message(170, TO_DATA_SERVICE, FROM_DATA_SERVICE)
@dataclass(frozen=True, slots=True)
class WorkerValue(Message):
    """Worker -> server (0,0): a part of a worker's value in a call.

    The server sends it to all workers of the call. The body is a snapshot, and missing for a value without bytes.

    Attributes:
        group, index: the worker with this value.
        job: the call is over all workers of the job, and not of the sender's group.
        number: the number of earlier parts of this worker's calls, by `job`. Negative: a part of the main worker's
            buffers; without a body, a question for it.
        part, nbytes: the body is part `part` of a value of `nbytes` bytes.
        what: the call, such as "tt.mean", which must be the same on all workers. Of buffers: the digest of the part.
        place: the worker's place in its script, as `CallPlace` has it.
    """

    group: int
    index: int
    job: bool
    number: int
    part: int
    nbytes: int
    what: str
    place: tuple[int, ...]

    def is_valid(self) -> bool:
        numbers = (self.group, self.index, self.part, *self.place)
        fits = -MOST < self.number < MOST and len(self.place) in (0, 4) and 0 <= self.nbytes <= LARGEST
        return fits and min(numbers) >= 0 and max(numbers) < MOST and self.part * PART <= self.nbytes

    @property
    def room(self) -> int:
        """The bytes of the body."""
        return min(PART, self.nbytes - self.part * PART)


@message(171, FROM_DATA_SERVICE)
@dataclass(frozen=True, slots=True)
class AwaitedCall(Message):
    """Server (0,0) -> worker: another worker waits in a call not yet made by this one.

    The fields are those of the other worker's `WorkerValue`.
    """

    group: int
    job: bool
    number: int
    place: tuple[int, ...]


@message(172, TO_DATA_SERVICE)
@dataclass(frozen=True, slots=True)
class PassedCall(Message):
    """Worker -> server (0,0): after `steps` it has passed a call that others wait in.

    Attributes:
        over: its script has ended, and it makes no call any more.
        metrics: the numbers of its `tt.report` then, a line "name=number" for each, and "path=1" for each file that it
            has written.
    """

    job: bool
    number: int
    steps: int
    over: bool
    metrics: str = ""

    def is_valid(self) -> bool:
        return 0 <= self.number < MOST and 0 <= self.steps < MOST
