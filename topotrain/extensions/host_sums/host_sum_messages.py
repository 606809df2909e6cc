"""Messages of the sums of hosts.

They are between the workers of a unit, and with servers of other hosts.

"Lead" is the worker of a unit that adds up for one server (`HostUnit.lead`).
"""

from dataclasses import dataclass

from topotrain.core.protocol.message import (
    FROM_SERVER,
    MOST,
    MOST_SAMPLES,
    TO_SERVER,
    Message,
    Receiver,
    Route,
    Sender,
    message,
)

_BETWEEN_WORKERS = Route(Sender.GROUP_WORKERS, Receiver.WORKER)
_NEVER = -1
_MOST_SUMS = 1 << 16  # of one bucket in a step: a worker has fewer revisions of it, see `Commit.revisions`


# --- the beginning ---------------------------------------------------------------------------------------------------


@message(130, _BETWEEN_WORKERS)
@dataclass(frozen=True, slots=True)
class HostHello(Message):
    """Worker -> worker of its unit: the first message on a new connection."""


@message(131, TO_SERVER)
@dataclass(frozen=True, slots=True)
class HostReady(Message):
    """Worker -> server: the worker is connected to all other workers of its unit."""


@message(132, FROM_SERVER)
@dataclass(frozen=True, slots=True)
class HostSumStart(Message):
    """Server -> worker: the unit sends sums to this server from a step on. -1: never.

    A unit begins between two steps: the message is before the reply to the step before it.
    """

    step: int = _NEVER

    def is_valid(self) -> bool:
        return _NEVER <= self.step < MOST


# --- gradients -------------------------------------------------------------------------------------------------------


@message(133, _BETWEEN_WORKERS)
@dataclass(frozen=True, slots=True)
class HostGradient(Message):
    """Worker -> lead: the local gradient of one bucket, as in `Push`.

    The body is a view of the worker's local buffer, and stays valid as that of a Push does.
    """

    step: int
    ordinal: int
    bucket: int
    weight: float
    present: bytes

    def is_valid(self) -> bool:
        return 0 <= self.step < MOST and 0 <= self.weight <= MOST_SAMPLES and self.ordinal >= 0


@message(134, _BETWEEN_WORKERS)
@dataclass(frozen=True, slots=True)
class HostBackwardEnd(Message):
    """Worker -> lead: this backward has ended, as in `BackwardEnd`.

    Attributes:
        pushed: a bit for each bucket of the model that the worker has pushed.
    """

    step: int
    ordinal: int
    pushed: bytes

    def is_valid(self) -> bool:
        return 0 <= self.step < MOST and self.ordinal >= 0


@message(135, _BETWEEN_WORKERS)
@dataclass(frozen=True, slots=True)
class HostCommit(Message):
    """Worker -> lead: which of its pushes count in a step, as in `Commit`.

    Attributes:
        shard: the server that the lead adds up for.
        revisions: a byte for each bucket of that server.
        weight: the number of samples that counts.
        finite: all gradients that count are finite, or not checked. Else the servers may make the step without them.
    """

    shard: int
    step: int
    weight: float
    finite: bool
    revisions: bytes

    def is_valid(self) -> bool:
        return 0 <= self.shard < MOST and 0 <= self.step < MOST and 0 <= self.weight <= MOST_SAMPLES


@message(136, TO_SERVER, handled="reduce")
@dataclass(frozen=True, slots=True)
class HostPush(Message):
    """Lead -> server: the plain sum of gradients of one bucket of the lead's unit.

    The body is a view of memory of the lead's host. It stays valid as that of a Push does.

    Attributes:
        number: of the sums of this bucket in the step, from 0. A later one replaces an earlier one, where the step's
            gradients can be replaced.
        weight: of each worker in `workers`.
        present: one bit for each piece of the bucket of which some worker has a gradient.
        workers: the workers of these gradients.
        idle: workers that have pushed the bucket with weight 0, so that nothing is added.
        revisions: of the pushes of these workers, in the order of `workers` and `idle`. Empty: `ordinal` of all.
    """

    step: int
    ordinal: int
    bucket: int
    number: int
    weight: float
    present: bytes
    workers: tuple[int, ...]
    idle: tuple[int, ...] = ()
    revisions: tuple[int, ...] = ()

    def is_valid(self) -> bool:
        named = (*self.workers, *self.idle)
        return (
            0 <= self.step < MOST
            and self.ordinal >= 0
            and 0 <= self.number < _MOST_SUMS
            and 0 <= self.weight <= MOST_SAMPLES
            and 0 < len(named) == len(set(named))
            and len(self.revisions) in (0, len(named))
        )


@message(137, TO_SERVER)
@dataclass(frozen=True, slots=True)
class HostStepEnd(Message):
    """Lead -> server: the unit's last sums of a step are sent.

    It is for steps in which a later push replaces an earlier one.

    Attributes:
        sums: for each bucket of the server a byte: `number` of its last sum, plus 1. 0: there is none.
    """

    step: int
    sums: bytes

    def is_valid(self) -> bool:
        return 0 <= self.step < MOST


@message(138, FROM_SERVER)
@dataclass(frozen=True, slots=True)
class SeparateGradients(Message):
    """Server -> lead: request for the gradients of a bucket one by one.

    The workers of the group have different weights, so their sum is of no use.
    """

    step: int
    ordinal: int
    bucket: int

    def is_valid(self) -> bool:
        return 0 <= self.step < MOST and self.ordinal >= 0


# --- means and values ------------------------------------------------------------------------------------------------


@message(139, _BETWEEN_WORKERS)
@dataclass(frozen=True, slots=True)
class HostMean(Message):
    """Lead -> worker: a mean of the server of a shard, as in `ReducedGradient`.

    The body is a view of the lead's memory. It stays valid until this worker pushes the bucket again.
    """

    shard: int
    step: int
    ordinal: int
    bucket: int
    present: bytes

    def is_valid(self) -> bool:
        return 0 <= self.shard < MOST


@message(140, FROM_SERVER, _BETWEEN_WORKERS, sent="pull")
@dataclass(frozen=True, slots=True)
class HostValues(Message):
    """Server -> lead -> worker: a step's values of one bucket, for the whole unit.

    The fields are as in `Values`. The body is a view of the server's values, or of the lead's memory, which changes
    only with the values of a later step: that needs this worker's commit.
    """

    shard: int
    round: int
    bucket: int
    version: int

    def is_valid(self) -> bool:
        return 0 <= self.shard < MOST and self.round >= 0 and self.bucket >= 0
