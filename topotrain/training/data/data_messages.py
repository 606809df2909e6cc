"""Messages about data, optimizer state, worker states, snapshots and split models."""

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
    """Server -> worker: batches [first, last) of the epoch.

    last < 0: the epoch is over. last == first: there is none now. rested: the group had to wait for this lease, which
    all its workers learn.
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
    """Worker -> server (0,0): my group left the epoch.

    From batch `first` of lease `ordinal` on, all are free.
    """

    epoch: int
    ordinal: int
    first: int


@numbered(53)
@dataclass(frozen=True, slots=True)
class DrawnBatches(Message):
    """Worker (0,0) -> server (0,0): a range of the epoch's batches.

    sizes: of each batch. indices: of all. end: there are no more.
    """

    epoch: int
    chunk: int
    end: bool
    sizes: tuple[int, ...]
    indices: tuple[int, ...]


@numbered(54)
@dataclass(frozen=True, slots=True)
class DrawRequest(Message):
    """Worker -> server (0,0): request chunk number `chunk` of the epoch.

    The reply is DrawnBatches, when the chunk is there.
    """

    epoch: int
    chunk: int


# --- optimizer state -------------------------------------------------------------------------------------------------


@numbered(60)
@dataclass(frozen=True, slots=True)
class StateRequest(Message):
    """Worker -> server: request the server's optimizer state.

    The replies are StatePart. An empty key marks the end.
    """

    round: int


@numbered(61)
@dataclass(frozen=True, slots=True)
class StatePart(Message):
    """One entry of the optimizer state of one piece of a parameter.

    It is a tensor (body, float32 bytes) or a number.

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
    """Worker -> server (0,0), and back on request: a part of the worker's state.

    It is part `part` of `parts` of a state of `nbytes` bytes. The body is a snapshot.

    number: -1 for the state in which the worker's last epoch began, -2 for later changes, from 1 on for the state at
    this snapshot. All parts but the last have `worker_state_store.PART` bytes. Back go -1 and -2. A state that is not
    there is one message with parts = 0.
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
    """Worker -> server (0,0): request the state of the earlier process."""


# --- snapshots (see `snapshot_coordinator`)
# ----------------------------------------------------------------------------------


@numbered(64)
@dataclass(frozen=True, slots=True)
class SnapshotRequest(Message):
    """A coordinator's own host -> it: it is time for a snapshot. No other sends this.

    last: the job is to end, so it is to be behind the very next step.
    """

    last: bool = False


@numbered(65)
@dataclass(frozen=True, slots=True)
class SnapshotPart(Message):
    """Shard -> coordinator, and back: a part of a text (JSON) about a snapshot.

    shard: the author. A coordinator passes on the texts of its shards to the first coordinator.
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
    """Group -> master group: the changes of a bucket since an exchange, at a snapshot.

    number: the snapshot's. sync: the exchange's. The body is a snapshot.
    """

    number: int
    bucket: int
    sync: int


# --- between the workers of a group that share one model (see `split`) -----------------------------------------------


@numbered(96)
@dataclass(frozen=True, slots=True)
class Activation(Message):
    """Worker -> worker: a part of a value of the model's forward, or of its gradient.

    forward, micro, edge, backward: which one (`channel.TensorKey`). grad: the sender wants its gradient back. The body
    is part number `part` of `parts`, in order, of the `nbytes` bytes of a contiguous tensor of `sizes` and `dtype`
    (torch's name without "torch."). There is no body if nbytes is 0. taken: how many activations of the receiver the
    sender has read. A body is a view that does not change until its receiver has reported it as read.
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
    """Worker -> worker of its group: the first message on a connection that it opened."""
