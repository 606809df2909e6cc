"""What travels: every message as a frozen dataclass, and its bytes.

Rule: nothing here is pickled and no length read from a peer reaches an allocator. The typed fields ("meta") are
packed with `struct`: first all fixed fields, then the variable ones, each with a length that is checked against the
bytes that are there. The tensor of a message, its `body`, is no part of the meta: a road receives it into a buffer
that its receiver already owns, or hands over a view of the sender's memory.

A body is a *view of a buffer somebody owns* unless the class says "snapshot"; how long a view stays valid is part of
the message's meaning and is written at each class.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

import torch

MAX_META = 64 * 1024
MAX_BODY = 64 * 1024 * 1024
MAX_TEXT = 48 * 1024  # room for the other fields of a message that carries text


class ProtocolError(Exception):
    """A peer sent bytes that are no message, or a message that has no place here."""


@dataclass(frozen=True, slots=True)
class Message:
    """Base of everything that travels. `body` is 1-D and contiguous, or None."""

    KIND: ClassVar[int] = 0
    body: torch.Tensor | None = field(default=None, compare=False, repr=False, kw_only=True)


_KINDS: dict[int, type[Message]] = {}
_CODECS: dict[type[Message], "_Codec"] = {}


@dataclass(frozen=True, slots=True)
class _Codec:
    fixed: struct.Struct
    fixed_names: tuple[str, ...]
    fixed_values: Callable[[Message], tuple[Any, ...]]
    variable: tuple[tuple[str, str], ...]


_FIXED_CODES = {int: "q", float: "d", bool: "?"}


def _codec_of(cls: type[Message]) -> _Codec:
    fixed, names, variable = "<", [], []
    for f in fields(cls):
        if f.name == "body":
            continue
        if isinstance(f.type, type) and f.type in _FIXED_CODES:
            fixed += _FIXED_CODES[f.type]
            names.append(f.name)
        elif f.type in (str, bytes):
            variable.append((f.name, "text" if f.type is str else "bytes"))
        else:
            variable.append((f.name, "ints"))
    return _Codec(struct.Struct(fixed), tuple(names), _values_of(names), tuple(variable))


def _values_of(names: list[str]) -> Callable[[Message], tuple[Any, ...]]:
    """Reads these attributes in one call: a message is read every few microseconds."""
    if len(names) < 2:
        return lambda message: tuple(getattr(message, name) for name in names)
    return attrgetter(*names)


_M = TypeVar("_M", bound=Message)


def _message(kind: int) -> Callable[[type[_M]], type[_M]]:
    """Give a message class its type number on the wire, for ever."""

    def wrap(cls: type[_M]) -> type[_M]:
        if kind in _KINDS:
            raise AssertionError(f"message number {kind} used twice")
        cls.KIND = kind
        _KINDS[kind] = cls
        _CODECS[cls] = _codec_of(cls)
        return cls

    return wrap


_U32 = struct.Struct("<I")


def encode(message: Message) -> tuple[int, bytes]:
    """The type number and the meta bytes of a message (at most MAX_META); the body is not included."""
    codec = _CODECS[type(message)]
    parts = [codec.fixed.pack(*codec.fixed_values(message))]
    for name, how in codec.variable:
        value = getattr(message, name)
        if how == "text":
            raw = value.encode()
        elif how == "ints":
            raw = struct.pack(f"<{len(value)}q", *value)
        else:
            raw = value
        parts.append(_U32.pack(len(raw)))
        parts.append(raw)
    meta = b"".join(parts)
    if len(meta) > MAX_META:
        raise ProtocolError(f"{type(message).__name__} has {len(meta)} bytes of fields, the limit is {MAX_META}")
    return message.KIND, meta


def decode(kind: int, meta: bytes, body: torch.Tensor | None = None) -> Message:
    """The message of a type number and its meta.

    Raises:
        ProtocolError: unknown type, or bytes that are not exactly such a message.
    """
    cls = kind_of(kind)
    codec = _CODECS[cls]
    if len(meta) < codec.fixed.size:
        raise ProtocolError(f"{cls.__name__}: {len(meta)} bytes of fields, too few")
    values: dict[str, Any] = dict(zip(codec.fixed_names, codec.fixed.unpack_from(meta), strict=True))
    at = codec.fixed.size
    for name, how in codec.variable:
        values[name], at = _variable(cls, how, meta, at)
    if at != len(meta):
        raise ProtocolError(f"{cls.__name__}: {len(meta) - at} bytes too many")
    return cls(**values, body=body)


def kind_of(number: int) -> type[Message]:
    """The class of a type number. Raises ProtocolError if there is none."""
    cls = _KINDS.get(number)
    if cls is None:
        raise ProtocolError(f"unknown message type {number}")
    return cls


def _variable(cls: type[Message], how: str, meta: bytes, at: int) -> tuple[Any, int]:
    if at + 4 > len(meta):
        raise ProtocolError(f"{cls.__name__}: cut short")
    (length,) = _U32.unpack_from(meta, at)
    start, end = at + 4, at + 4 + length
    if end > len(meta):
        raise ProtocolError(f"{cls.__name__}: cut short")
    raw = bytes(meta[start:end])
    if how == "bytes":
        return raw, end
    if how == "ints":
        if length % 8:
            raise ProtocolError(f"{cls.__name__}: a list of integers of {length} bytes")
        return struct.unpack(f"<{length // 8}q", raw), end
    try:
        return raw.decode(), end
    except UnicodeDecodeError as error:
        raise ProtocolError(f"{cls.__name__}: text is not UTF-8") from error


# --- joining -----------------------------------------------------------------------------------------------------


@_message(1)
@dataclass(frozen=True, slots=True)
class SchemaPart(Message):
    """One part of the description of the model and the optimizer (JSON text, at most MAX_TEXT).

    Worker -> server; and server -> server of the same shard in group 0, which then knows that it may send values.
    """

    part: int
    parts: int
    text: str


@_message(2)
@dataclass(frozen=True, slots=True)
class Init(Message):
    """Initial (or, after warm-up, first common) values of one bucket. The body is read before the sender goes on."""

    bucket: int


@_message(3)
@dataclass(frozen=True, slots=True)
class Fetch(Message):
    """Worker -> server: send me your current values. `round` numbers the fetches of one worker."""

    round: int


@_message(4)
@dataclass(frozen=True, slots=True)
class Values(Message):
    """Server -> worker: current values of one bucket; `round` as in Fetch, or the step that made them (negative: none).

    bucket -1: all of the server's stand in the worker's parameter buffer. A bucket without a body: it stands there.
    coded: the body is an encoding of the difference to what this worker's group was shown before (see `encoding`).

    The body is a view of the server's values when a single group uses them (it changes only after this worker's
    next COMMIT), else a snapshot.
    """

    round: int
    bucket: int
    version: int
    coded: bool = False


@_message(5)
@dataclass(frozen=True, slots=True)
class Fail(Message):
    """The sender cannot go on with the job, and why, in the user's words; config: the job itself is wrong.

    cause: the sender knows that nothing else explains it; otherwise it may be what follows from something else.
    """

    text: str
    config: bool = False
    cause: bool = False


@_message(6)
@dataclass(frozen=True, slots=True)
class Window(Message):
    """The body shows a flat buffer of the sender, for the rest of the job; `windows` says who may write it when.

    Worker -> server: "grad", the part that the server's shard covers. First server of a group -> its other servers:
    a parameter buffer, the part that the shard covers; -> workers: all of theirs. `space` as in the slice map.
    """

    name: str
    space: int


# --- one step ----------------------------------------------------------------------------------------------------


@_message(10)
@dataclass(frozen=True, slots=True)
class Push(Message):
    """Worker -> server: the local gradient of one bucket.

    fresh: the worker's window "grad" has nothing in this bucket that counts; the mean may be written there.
    `ordinal` counts the backwards of the step (visible gradients: each is a reduction of its own) or the revision
    (replacing pushes). `present` has one bit per piece of the bucket; the body of an absent piece is zero. The body is
    a view of the worker's local buffer: it stays until the reduction's mean has come back, or the step is committed.
    """

    step: int
    ordinal: int
    bucket: int
    weight: float
    present: bytes
    fresh: bool = False


@_message(7)
@dataclass(frozen=True, slots=True)
class Rates(Message):
    """Worker -> server: hyper-parameters as in Commit, before the pushes of a step that are applied on arrival."""

    hyper: bytes


@_message(11)
@dataclass(frozen=True, slots=True)
class BackwardEnd(Message):
    """Worker -> server: this backward is over; `pushed` has a bit for each of the server's buckets that was pushed.

    exits: loops over the loader that this worker's script left early so far.
    """

    step: int
    ordinal: int
    weight: float
    pushed: bytes
    exits: int = 0


@_message(17)
@dataclass(frozen=True, slots=True)
class Reduced(Message):
    """Server -> worker: this backward is reduced; `contributed` has a bit for each bucket that has a Mean.

    written: a bit for each of the server's pieces whose mean stands in the worker's window "grad"; empty: none.
    """

    step: int
    ordinal: int
    contributed: bytes
    written: bytes = b""


@_message(12)
@dataclass(frozen=True, slots=True)
class Mean(Message):
    """Server -> worker: the group's mean of one bucket and backward; `present` is the union over the workers.

    The body is a view of the server's buffer and stays until this worker pushes the bucket again.
    """

    step: int
    ordinal: int
    bucket: int
    present: bytes


@_message(13)
@dataclass(frozen=True, slots=True)
class Edit(Message):
    """Worker -> server: the gradient of a bucket as the script left it, where it differs from the running sum."""

    step: int
    bucket: int


@_message(14)
@dataclass(frozen=True, slots=True)
class Commit(Message):
    """Worker -> server: `optimizer.step()` was called.

    backwards: how many reductions the step has.
    revisions: of replacing pushes: a byte per bucket of the server, the revision that counts, 255 = none.
    edited, dropped: a bit per piece of the server: the script changed the gradient, or set it to None.
    hyper: JSON of the parameter groups' hyper-parameters (empty: as last time).
    marks: flat triples (stream, first, last) of the data batches this step consumed.
    inv_scale: what gradients are multiplied by (1.0: no loss scaling).
    clip_norm: bound of the global norm, kept by the servers (0: none). fetch: send values.
    exits: as in BackwardEnd.
    """

    step: int
    backwards: int
    weight: float
    inv_scale: float
    check_finite: bool
    clip_norm: float
    clip_type: float
    fetch: bool
    revisions: bytes
    edited: bytes
    dropped: bytes
    hyper: bytes
    marks: tuple[int, ...]
    exits: int = 0


@_message(15)
@dataclass(frozen=True, slots=True)
class Applied(Message):
    """Server -> worker: the step is committed here. norm: global gradient norm if it was asked for, else -1.

    snapshot: the number of one that is being taken; the worker's state at its next batch belongs to it. 0: none.
    found_inf: the step was skipped. refused: as in Apply. leaves: it was the group's last one for now (said by the
    coordinator): its workers leave the job.
    """

    step: int
    version: int
    staleness: int
    found_inf: bool
    norm: float
    snapshot: int = 0
    refused: tuple[int, ...] = ()
    leaves: bool = False


@_message(16)
@dataclass(frozen=True, slots=True)
class Finish(Message):
    """Worker -> server: the script ended after this many steps; nothing more will be pushed."""

    steps: int


@_message(18)
@dataclass(frozen=True, slots=True)
class Rest(Message):
    """Worker -> coordinator: my group has no batch until others give some back or the epoch ends; or it goes on.

    A group at rest counts as not live: whoever is bound to its clock would wait for a group that waits for him. The
    wait is named by its lease, which is the same for all workers of the group. The end of a rest is echoed when others
    are bound to the group again: what is read from then on is not older than the job allows.
    """

    epoch: int
    ordinal: int
    resting: bool


@_message(19)
@dataclass(frozen=True, slots=True)
class LeftEarly(Message):
    """Worker -> servers: my script left a loop over the loader early, for the `exits`-th time.

    It did so in this step, after so many backwards of it.
    """

    exits: int
    step: int
    backwards: int


# --- between the shards of a server group ------------------------------------------------------------------------


@_message(20)
@dataclass(frozen=True, slots=True)
class Staged(Message):
    """Shard -> coordinator: every contribution to this step is here.

    power: the shard's sum of |g|^p for the global norm (its largest |g| with `infinity`). applied: decisions below
    this number are applied here and need not be kept for me. incarnation: of the group; an earlier one's step is void.
    finite: the step may be applied. refused: flat pairs (worker, parameter) whose gradient is not finite; -1: nobody's
    in particular, since the sum is not finite, or a table's. members: with backup workers, whose contributions are all
    here so far; it is said again when there is one more.
    """

    group: int
    step: int
    finite: bool
    power: float
    infinity: bool
    applied: int
    incarnation: int = 0
    refused: tuple[int, ...] = ()
    members: tuple[int, ...] = ()


@_message(21)
@dataclass(frozen=True, slots=True)
class Apply(Message):
    """Coordinator -> shards: decision number `index`: apply this step of this group (or skip it: found_inf).

    change: 0, or no step but that the group rests (1), or is back and its clock is `step` (2), or is started again as
    incarnation `step`, and rests until it is back (3), or has left, and would be back as incarnation `step` (5): clocks
    and members change by decisions only, so that they are the same on all shards. Of no group: a snapshot, `step` (4).
    refused: as in Staged, of all shards; these workers' gradients count for nothing.

    members: with backup workers, those of whose gradients the step is made. Where it is no step but that some workers
    of the group are shown the values as they are (6): flat pairs (worker, round of its CatchUp).
    """

    index: int
    group: int
    step: int
    found_inf: bool
    power: float
    change: int = 0
    refused: tuple[int, ...] = ()
    members: tuple[int, ...] = ()


@_message(22)
@dataclass(frozen=True, slots=True)
class AskApply(Message):
    """Shard -> coordinator: I have applied everything below `index`; what was decided from there on?"""

    index: int


# --- a worker group that comes back (see `membership`) -----------------------------------------------------------


@_message(23)
@dataclass(frozen=True, slots=True)
class Return(Message):
    """Worker -> its servers and server (0,0): my group was started again, and I am of its `incarnation`.

    It is the worker's first word, and its only one until all have echoed it; what it hears before may have been meant
    for its predecessor. begun: in the echo, the server's values are known and need not be given again.
    """

    incarnation: int
    begun: bool = False


@_message(24)
@dataclass(frozen=True, slots=True)
class AskReturn(Message):
    """Shard -> coordinator: let the workers of this incarnation of a group in, and let go of those before them."""

    group: int
    incarnation: int


@_message(25)
@dataclass(frozen=True, slots=True)
class StreamsAt(Message):
    """Server (0,0) -> coordinator of another server group: how far are these data streams of a group that comes back?

    Echoed once nothing of an earlier incarnation can be applied any more. counts: flat pairs (stream, batches that are
    applied; as asked, 0). ended: all scripts of the group had come to their end.
    """

    group: int
    incarnation: int
    part: int
    parts: int
    counts: tuple[int, ...]
    ended: bool = False


@_message(26)
@dataclass(frozen=True, slots=True)
class AppliedAsk(Message):
    """Worker -> its coordinator: how many batches of this data stream are applied? Of stream -1: my group's steps."""

    stream: int


@_message(27)
@dataclass(frozen=True, slots=True)
class AppliedAt(Message):
    """Coordinator -> worker: the first `count` batches of the stream are applied, and no others of it."""

    stream: int
    count: int


@_message(28)
@dataclass(frozen=True, slots=True)
class Leave(Message):
    """A coordinator's own host -> it: this group's workers are to end after their next step. Nobody else says this."""

    group: int


@_message(29)
@dataclass(frozen=True, slots=True)
class Away(Message):
    """A coordinator's own host -> it: all processes of the group before this incarnation have ended, none follows now.

    Nobody else says this.
    """

    group: int
    incarnation: int


# --- backup workers (see `backup`) -------------------------------------------------------------------------------


@_message(36)
@dataclass(frozen=True, slots=True)
class Late(Message):
    """Coordinator -> worker: this step was decided without what you pushed for it; nothing of that counts."""

    step: int


@_message(37)
@dataclass(frozen=True, slots=True)
class CatchUp(Message):
    """Worker -> coordinator: show me the values, and tell me which step the group is in; answered by every shard.

    through: not before all others are through with the batches of this epoch, as I am; -1: at once. round: numbers the
    questions of one worker from 1; 0: it does not ask, it only tells that it is through.
    """

    round: int
    through: int


@_message(38)
@dataclass(frozen=True, slots=True)
class CaughtUp(Message):
    """Shard -> worker: the values were sent that it asked for with the CatchUp of this round; the group is in `step`.

    snapshot: as in Applied.
    """

    round: int
    step: int
    version: int
    snapshot: int = 0


# --- between server groups ---------------------------------------------------------------------------------------


@_message(30)
@dataclass(frozen=True, slots=True)
class Delta(Message):
    """Group -> master group: what this group added to a bucket since the last sync. Snapshot.

    cut: the last snapshot for which the sender had frozen when it sent this.
    """

    bucket: int
    sync: int
    cut: int = 0


@_message(31)
@dataclass(frozen=True, slots=True)
class Master(Message):
    """Master group -> group: the master's value after taking Delta number `sync`. Snapshot."""

    bucket: int
    sync: int


@_message(32)
@dataclass(frozen=True, slots=True)
class RingOffer(Message):
    """Group -> its right neighbor: my value of a bucket, round number `sync` of this pair. Snapshot."""

    bucket: int
    sync: int


@_message(33)
@dataclass(frozen=True, slots=True)
class RingReply(Message):
    """Right neighbor -> group: what to add so that both hold the average. Snapshot."""

    bucket: int
    sync: int


@_message(34)
@dataclass(frozen=True, slots=True)
class Drained(Message):
    """Server -> servers of the same shard in other groups: all my groups have ended, all my updates are with you."""


@_message(35)
@dataclass(frozen=True, slots=True)
class Final(Message):
    """Master -> server group 0: the final value of a bucket it masters. View: it never changes again."""

    bucket: int


# --- the end -----------------------------------------------------------------------------------------------------


@_message(40)
@dataclass(frozen=True, slots=True)
class BufferPut(Message):
    """Model buffer number `index` of a worker group (BatchNorm statistics), as raw bytes.

    Worker -> server (0,0): index -1: that was all of worker 0's. Where a model is split, others have some, too.
    """

    group: int
    index: int


@_message(41)
@dataclass(frozen=True, slots=True)
class FinalAsk(Message):
    """Worker (0,0) -> servers of its group: the master view, once everybody has drained; replied with Values."""

    round: int


@_message(42)
@dataclass(frozen=True, slots=True)
class BufferAsk(Message):
    """Worker (0,0) -> server (0,0): the buffers of all groups; replied with BufferPut, the end marked by index -1."""


# --- data --------------------------------------------------------------------------------------------------------


@_message(50)
@dataclass(frozen=True, slots=True)
class LeaseAsk(Message):
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


@_message(51)
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


@_message(52)
@dataclass(frozen=True, slots=True)
class LeaseFree(Message):
    """Worker -> server (0,0): my group left the epoch; from batch `first` of lease `ordinal` on, all are free."""

    epoch: int
    ordinal: int
    first: int


@_message(53)
@dataclass(frozen=True, slots=True)
class DrawPut(Message):
    """Worker (0,0) -> server (0,0): a run of the epoch's batches; sizes per batch, then all indices. end: no more."""

    epoch: int
    chunk: int
    end: bool
    sizes: tuple[int, ...]
    indices: tuple[int, ...]


@_message(54)
@dataclass(frozen=True, slots=True)
class DrawAsk(Message):
    """Worker -> server (0,0): chunk number `chunk` of the epoch; replied with DrawPut when it is there."""

    epoch: int
    chunk: int


# --- optimizer state ---------------------------------------------------------------------------------------------


@_message(60)
@dataclass(frozen=True, slots=True)
class StateAsk(Message):
    """Worker -> server: your optimizer state; replied with StatePart, the end marked by an empty key."""

    round: int


@_message(61)
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


# --- what a worker's next process needs (see `deposits`) -----------------------------------------------------------


@_message(62)
@dataclass(frozen=True, slots=True)
class Deposit(Message):
    """Worker -> server (0,0): part `part` of `parts` of the worker's state of `nbytes` bytes; and back, if asked for.

    number: what it is good for: -1, the state in which the worker's last epoch began; -2, what has changed since; from
    1 on, the state at this snapshot. All parts have `deposits.PART` bytes but the last. Back, -1 and -2 are told, and
    of what is not there one part of none (parts = 0). The body is a snapshot.
    """

    group: int
    index: int
    number: int
    part: int
    parts: int
    nbytes: int


@_message(63)
@dataclass(frozen=True, slots=True)
class DepositAsk(Message):
    """Worker -> server (0,0): what did the process before me leave? Answered by Deposit."""


# --- snapshots (see `snapshotbook`) ------------------------------------------------------------------------------


@_message(64)
@dataclass(frozen=True, slots=True)
class SnapshotAsk(Message):
    """A coordinator's own host -> it: it is time for a snapshot. Nobody else says this.

    last: the job is to end, so it is to be behind the very next step.
    """

    last: bool = False


@_message(65)
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


@_message(66)
@dataclass(frozen=True, slots=True)
class Remainder(Message):
    """Group -> master group: at snapshot `number` this had been added to a bucket since exchange `sync`. Snapshot."""

    number: int
    bucket: int
    sync: int


# --- between units, for collectives ------------------------------------------------------------------------------


@_message(70)
@dataclass(frozen=True, slots=True)
class Hop(Message):
    """Rank -> rank of a collective: what was added up so far of a bucket, or (not `up`) what became of the sum.

    Upwards: weight, count: sum and number of the weights above 0 that are in it; each: their common value and the body
    is the plain sum, or 0.0 and it is the weighted sum. present: a bit per piece, the union so far; a Hop without body
    has nobody's gradient. Downwards: ordinal -1 means new values and their `version`, else the mean of that backward.

    The body is a view. Upwards it stays until a result of the bucket has come down to the sender; downwards until the
    sender has everybody's part of a later reduction of the bucket.
    """

    step: int
    ordinal: int
    bucket: int
    up: bool
    weight: float
    count: int
    each: float
    present: bytes
    version: int


# --- tables (see `tabledoor`) ------------------------------------------------------------------------------------
#
# `number` counts what one worker says to one server about tables, from 0: the server takes it in this order and once,
# whatever the road does. `table` is the worker's own number for a table. `ids` are rows, each 8 bytes (little-endian),
# at most MAX_IDS; the body has one row for each of them, and is a snapshot.

MAX_IDS = 4096


@_message(80)
@dataclass(frozen=True, slots=True)
class TableOpen(Message):
    """Worker -> server: my table number `table` is the one of this description; echoed (without it) when it is made."""

    number: int
    table: int
    spec: str


@_message(81)
@dataclass(frozen=True, slots=True)
class TablePush(Message):
    """Worker -> server: a part of a push. turn: the step, or the how-manieth push of the table; last: it is complete.

    A push is told to every server, without ids where it has no rows: all count the same pushes.
    """

    number: int
    table: int
    turn: int
    last: bool
    ids: bytes


@_message(82)
@dataclass(frozen=True, slots=True)
class TableStep(Message):
    """Worker -> server: all that I push to the tables of this step has been sent."""

    number: int
    step: int


@_message(83)
@dataclass(frozen=True, slots=True)
class TablePull(Message):
    """Worker -> server: send me these rows, as they are once `seen` turns are applied."""

    number: int
    table: int
    round: int
    seen: int
    ids: bytes


@_message(84)
@dataclass(frozen=True, slots=True)
class TableRows(Message):
    """Server -> worker: the rows of the pull of this round. Snapshot."""

    round: int


@_message(85)
@dataclass(frozen=True, slots=True)
class TableGive(Message):
    """Worker -> server: these rows are so from now on, whatever they were."""

    number: int
    table: int
    ids: bytes


@_message(86)
@dataclass(frozen=True, slots=True)
class TableRule(Message):
    """Worker -> server: from turn `since` on, pushes are applied by this optimizer (`update.OptimizerSpec.to_text`)."""

    number: int
    table: int
    since: int
    optimizer: str


@_message(87)
@dataclass(frozen=True, slots=True)
class TableAsk(Message):
    """Worker -> server: how large is the table; replied with TableStats."""

    number: int
    table: int
    round: int


@_message(88)
@dataclass(frozen=True, slots=True)
class TableStats(Message):
    """Server -> worker: rows that this server holds, and bytes: of their values, optimizer state and index."""

    round: int
    rows: int
    value_bytes: int
    state_bytes: int
    index_bytes: int


@_message(89)
@dataclass(frozen=True, slots=True)
class TableBarrier(Message):
    """Worker -> server: I am at barrier number `round`; echoed when all workers of the job are there."""

    number: int
    round: int


@_message(90)
@dataclass(frozen=True, slots=True)
class TablesBye(Message):
    """Worker -> server: nothing more from me about tables."""

    number: int


@_message(91)
@dataclass(frozen=True, slots=True)
class TableList(Message):
    """Worker -> server: which rows do you hold, from the `first`-touched one on? Replied with TableIds."""

    number: int
    table: int
    round: int
    first: int


@_message(92)
@dataclass(frozen=True, slots=True)
class TableIds(Message):
    """Server -> worker: rows, in the order of first touch; at most MAX_IDS, fewer only at the end."""

    round: int
    ids: bytes


# --- between the workers of a group that share one model (see `split`) -----------------------------------------------


@_message(96)
@dataclass(frozen=True, slots=True)
class Activation(Message):
    """Worker -> worker: a part of a value of the model's forward, or of the gradient of one on its way back.

    forward, micro, edge, backward: which one (`split.passage.Key`). grad: the sender wants its gradient back. The body
    is part number `part` of `parts`, in order, of the `nbytes` bytes of a contiguous tensor of `sizes` and `dtype`
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


@_message(97)
@dataclass(frozen=True, slots=True)
class Greeting(Message):
    """Worker -> worker of its group: the first word on the way that the sender has opened between the two."""


# --- two copies of a server (see `replication`) ----------------------------------------------------------------------


@_message(100)
@dataclass(frozen=True, slots=True)
class Resume(Message):
    """On a way that was made anew, both sides' first word: so many of your messages have I heard, ever.

    What was said after those is said again. answer: this one answers the other side's. life: a worker's group has been
    started so often again; an earlier process in its place said, and heard, other messages.
    """

    heard: int
    answer: bool = False
    life: int = 0


@_message(101)
@dataclass(frozen=True, slots=True)
class Taken(Message):
    """Worker <-> server, server <-> server: the first so many of your messages will not be asked for again.

    Not counted itself, as all messages of this section. ask: tell me as much, once both copies have what I said.
    """

    heard: int
    ask: bool = False


@_message(102)
@dataclass(frozen=True, slots=True)
class Forward(Message):
    """Server -> its second copy: event number `index` is this; see `replication.Copy` for the events.

    role, group, number: the address of whom it comes from or is about. count: of event TAKEN. kind, meta: the message
    that came, whose body is this one's: a view that stays until the event is echoed.
    """

    event: int
    index: int
    role: int
    group: int
    number: int
    count: int
    kind: int
    meta: bytes


@_message(103)
@dataclass(frozen=True, slots=True)
class Echoed(Message):
    """Second copy -> server: I have all events up to number `index`. whole: I have just become what you were by then."""

    index: int
    whole: bool = False


@_message(104)
@dataclass(frozen=True, slots=True)
class Likeness(Message):
    """Server -> a fresh second copy: part `part` of `parts` of the `nbytes` bytes of all that it is (see `transfer`).

    index: events that are in it. The body is a snapshot.
    """

    index: int
    part: int
    parts: int
    nbytes: int


@_message(105)
@dataclass(frozen=True, slots=True)
class Dismissed(Message):
    """Server -> its second copy: nothing is left to do, for you neither."""


@_message(106)
@dataclass(frozen=True, slots=True)
class Compared(Message):
    """Second copy -> server: this, a CRC, is what I have found behind event number `index` (see `comparison`)."""

    index: int
    mark: int


TABLE_ANSWERS = (TableOpen, TableRows, TableStats, TableBarrier, TableIds)
"""What a server says about tables."""
