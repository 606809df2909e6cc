"""Messages between workers and the data service: leases, and drawn batches.

The data service is server (0,0).
"""

from dataclasses import dataclass

from topotrain.core.protocol.message import (
    FROM_DATA_SERVICE,
    MOST,
    MOST_EPOCHS,
    TO_DATA_SERVICE,
    Message,
    Receiver,
    Route,
    Sender,
    message,
)


@message(50, TO_DATA_SERVICE)
@dataclass(frozen=True, slots=True)
class LeaseRequest(Message):
    """Worker -> server (0,0): request for a lease of the worker's group.

    It is the `ordinal`-th lease of the group in this epoch.

    Attributes:
        total: the number of batches in the epoch. -1: not known.
        digest: hash of the epoch's list of batches, which must agree. 0: not known.
        passed: the number of leases of the epoch that the group has finished.
        wait: delay the reply until there is a lease, or the epoch ends.
        uncounted: the first epoch of which the worker has read batches that may not count yet. -1: this one.
        most: the batches that the group may have of the epoch, because its script goes by that number. -1: any number.
    """

    epoch: int
    ordinal: int
    total: int
    digest: int
    passed: int
    wait: bool
    uncounted: int = -1
    most: int = -1

    def is_valid(self) -> bool:
        lease = 0 <= self.epoch < MOST_EPOCHS and 0 <= self.passed <= self.ordinal < MOST_EPOCHS
        return lease and -1 <= self.total < MOST and -1 <= self.most < MOST and -1 <= self.uncounted <= self.epoch

    @property
    def first_uncounted(self) -> int:
        """The first epoch of which the worker may have batches that do not count yet."""
        return self.epoch if self.uncounted < 0 else self.uncounted


@message(51, FROM_DATA_SERVICE)
@dataclass(frozen=True, slots=True)
class Lease(Message):
    """Server -> worker: batches [first, last) of the epoch.

    last < 0: the epoch is over. last == first: there is no batch now.

    Attributes:
        rested: the group had to wait for this lease. All workers of the group get the same reply.
        done_by_others: batches of the epoch that other groups, or earlier processes of this one, have done. It is as of
            the first reply, so that all workers of the group have the same number.
    """

    epoch: int
    ordinal: int
    lease: int
    first: int
    last: int
    rested: bool = False
    done_by_others: int = 0


@message(52, TO_DATA_SERVICE)
@dataclass(frozen=True, slots=True)
class LeaseRelease(Message):
    """Worker -> server (0,0): the worker's group has left the epoch.

    From batch `first` of lease `ordinal` on, all batches of the group are free.
    """

    epoch: int
    ordinal: int
    first: int

    def is_valid(self) -> bool:
        return 0 <= self.epoch < MOST_EPOCHS and 0 <= self.ordinal < MOST_EPOCHS and 0 <= self.first < MOST


@message(53, Route(Sender.MAIN_WORKER, Receiver.DATA_SERVICE), FROM_DATA_SERVICE)
@dataclass(frozen=True, slots=True)
class DrawnBatches(Message):
    """Worker (0,0) -> server (0,0): consecutive batches of the epoch.

    The reply to DrawRequest is this message, too.

    Attributes:
        sizes: the size of each batch.
        indices: the indices of all batches, one batch after the other.
        end: these are the last batches of the epoch.
        keep: the server keeps them for a worker that restarts alone in this epoch.
    """

    epoch: int
    chunk: int
    end: bool
    sizes: tuple[int, ...]
    indices: tuple[int, ...]
    keep: bool = False

    def is_valid(self) -> bool:
        return 0 <= self.epoch < MOST_EPOCHS and 0 <= self.chunk < MOST


@message(54, TO_DATA_SERVICE, FROM_DATA_SERVICE)
@dataclass(frozen=True, slots=True)
class DrawRequest(Message):
    """Worker -> server (0,0): request for a chunk of the epoch's draw.

    The reply is DrawnBatches number `chunk`, as soon as they have arrived. While worker (0,0) waits in a step for this
    `worker`, it is told of the request.

    since: the first pass that the worker still reads. -1: this one.
    """

    epoch: int
    chunk: int
    worker: int = 0
    since: int = -1

    def is_valid(self) -> bool:
        return 0 <= self.epoch < MOST_EPOCHS and 0 <= self.chunk < MOST and -1 <= self.since <= self.epoch


@message(55, TO_DATA_SERVICE)
@dataclass(frozen=True, slots=True)
class PassBegun(Message):
    """Worker -> server (0,0): a pass over a loader begins, the same on all workers.

    Attributes:
        loader: its number among those that the script has prepared.
        samples: of the data set. -1: not told.
        indices, content: fingerprints of the first batch's indices, and of a sample or the first batch. 0: not told.
        dice: fingerprint of the random number generators before the indices were drawn. -1: they would always be these.
    """

    epoch: int
    loader: int
    samples: int = -1
    indices: int = 0
    content: int = 0
    dice: int = 0

    def is_valid(self) -> bool:
        return 0 <= self.epoch < MOST_EPOCHS and 0 <= self.loader < MOST_EPOCHS and -1 <= self.samples < MOST
