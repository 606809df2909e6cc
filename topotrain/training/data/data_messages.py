"""What is kept and taken up again: leases of data, optimizer state, workers' states, snapshots; and split models."""

from dataclasses import dataclass

from topotrain.core.protocol.codec import Message, numbered

# --- data ------------------------------------------------------------------------------------------------------------


@numbered(50)
@dataclass(frozen=True, slots=True)
class LeaseRequest(Message):
    """Worker -> server (0,0): the `ordinal`-th lease of my group in this epoch.

    total: batches in the epoch (-1: not known). digest: hash of the epoch's batch list (must agree; 0: unknown).
    passed: how many of its leases the group has finished. wait: hold the answer until a lease or the end.
    """

    epoch: int
    ordinal: int
    total: int
    digest: int
    passed: int
    wait: bool


@numbered(51)
@dataclass(frozen=True, slots=True)
class Lease(Message):
    """Server -> worker: batches [first, last) of the epoch; last < 0: the epoch is over; last == first: none now.

    rested: the group had to wait for this lease; all its workers are told the same.
    """

    epoch: int
    ordinal: int
    lease: int
    first: int
    last: int
    rested: bool = False


@numbered(52)
@dataclass(frozen=True, slots=True)
class LeaseRelease(Message):
    """Worker -> server (0,0): my group left the epoch; from batch `first` of lease `ordinal` on, all are free."""

    epoch: int
    ordinal: int
    first: int


@numbered(53)
@dataclass(frozen=True, slots=True)
class DrawnBatches(Message):
    """Worker (0,0) -> server (0,0): a run of the epoch's batches; sizes per batch, then all indices. end: no more."""

    epoch: int
    chunk: int
    end: bool
    sizes: tuple[int, ...]
    indices: tuple[int, ...]


@numbered(54)
@dataclass(frozen=True, slots=True)
class DrawRequest(Message):
    """Worker -> server (0,0): chunk number `chunk` of the epoch; replied with DrawPut when it is there."""

    epoch: int
    chunk: int


# --- optimizer state -------------------------------------------------------------------------------------------------


@numbered(60)
@dataclass(frozen=True, slots=True)
class StateRequest(Message):
    """Worker -> server: your optimizer state; replied with StatePart, the end marked by an empty key."""

    round: int


@numbered(61)
@dataclass(frozen=True, slots=True)
class StatePart(Message):
    """One entry of the optimizer state of one piece of a parameter: a tensor (body, float32 bytes), or a number.

    The last one has no key, and the number of entries before it as its number.
    """

    round: int
    bucket: int
    piece: int
    number: float
    key: str


# --- what a worker's next process needs (see `worker_state_store`)
# -------------------------------------------------------------


@numbered(62)
@dataclass(frozen=True, slots=True)
class WorkerStatePart(Message):
    """Worker -> server (0,0): part `part` of `parts` of the worker's state of `nbytes` bytes; and back, if asked for.

    number: what it is good for: -1, the state in which the worker's last epoch began; -2, what has changed since; from
    1 on, the state at this snapshot. All parts have `worker_state_store.PART` bytes but the last. Back, -1 and -2 are
    told, and of what is not there one part of none (parts = 0). The body is a snapshot.
    """

    group: int
    index: int
    number: int
    part: int
    parts: int
    nbytes: int


@numbered(63)
@dataclass(frozen=True, slots=True)
class WorkerStateRequest(Message):
    """Worker -> server (0,0): what did the process before me leave? Answered by Deposit."""


# --- snapshots (see `snapshot_coordinator`)
# ----------------------------------------------------------------------------------


@numbered(64)
@dataclass(frozen=True, slots=True)
class SnapshotRequest(Message):
    """A coordinator's own host -> it: it is time for a snapshot. Nobody else says this.

    last: the job is to end, so it is to be behind the very next step.
    """

    last: bool = False


@numbered(65)
@dataclass(frozen=True, slots=True)
class SnapshotPart(Message):
    """Shard -> coordinator, and back: one part of what there is to say about a snapshot at this stage (JSON text).

    shard: who says it; a coordinator passes on what shards of its group have to say to the first one of all.
    """

    number: int
    stage: int
    part: int
    parts: int
    text: str
    shard: int = 0


@numbered(66)
@dataclass(frozen=True, slots=True)
class Remainder(Message):
    """Group -> master group: at snapshot `number` this had been added to a bucket since exchange `sync`. Snapshot."""

    number: int
    bucket: int
    sync: int


# --- between the workers of a group that share one model (see `split`) -----------------------------------------------


@numbered(96)
@dataclass(frozen=True, slots=True)
class Activation(Message):
    """Worker -> worker: a part of a value of the model's forward, or of the gradient of one on its way back.

    forward, micro, edge, backward: which one (`split.passage.TensorKey`). grad: the sender wants its gradient back. The
    body is part number `part` of `parts`, in order, of the `nbytes` bytes of a contiguous tensor of `sizes` and `dtype`
    (torch's name without "torch."); there is none where nbytes is 0. taken: how many activations of the receiver's the
    sender has read. A body is a view that nobody writes until its receiver has said so of it.
    """

    forward: int
    micro: int
    edge: int
    backward: bool
    grad: bool
    part: int
    parts: int
    nbytes: int
    sizes: tuple[int, ...]
    dtype: str
    taken: int = 0


@numbered(97)
@dataclass(frozen=True, slots=True)
class ActivationHello(Message):
    """Worker -> worker of its group: the first word on the way that the sender has opened between the two."""
