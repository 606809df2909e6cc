"""Messages of a step: gradients, commits, values, and the servers' decision."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from topotrain.config.sharding import Bucket
from topotrain.config.topology import Address
from topotrain.core.protocol.message import (
    FROM_COORDINATOR,
    FROM_SERVER,
    MOST,
    MOST_EPOCHS,
    MOST_SAMPLES,
    TO_COORDINATOR,
    TO_SERVER,
    Message,
    ProtocolError,
    Receiver,
    Route,
    Sender,
    message,
)

# --- bitmaps ---------------------------------------------------------------------------------------------------------

NO_REVISION = 255  # in Commit.revisions: this worker has no gradient in the bucket


def bits_to_int(bits: bytes) -> int:
    """A bitmap as it travels -> a Python int, bit i for item i."""
    return int.from_bytes(bits, "little")


def int_to_bits(value: int, count: int) -> bytes:
    """A bitmap over `count` items as it travels."""
    return value.to_bytes((count + 7) // 8, "little")


def per_bucket(buckets: Sequence[Bucket], bits: int) -> list[tuple[Bucket, int]]:
    """A bitmap over the pieces of these buckets as one bitmap per bucket."""
    found = []
    for bucket in buckets:
        found.append((bucket, bits & ((1 << len(bucket.pieces)) - 1)))
        bits >>= len(bucket.pieces)  # one integer of Python's: a model has more pieces than a machine word has bits
    return found


def per_piece(buckets: Sequence[Bucket], found: Mapping[int, int]) -> int:
    """One bitmap over the pieces of all buckets: the inverse of `per_bucket`."""
    bits = shift = 0
    for at, bucket in enumerate(buckets):
        bits |= found.get(at, 0) << shift
        shift += len(bucket.pieces)
    return bits


def check_bits(bits: bytes, count: int, sender: Address, what: str) -> None:
    """Check a bitmap of `count` items. An empty bitmap means that no item is set.

    Raises:
        ProtocolError: `bits` is not a valid bitmap of `count` items.
    """
    # Unused bits of the last byte must be 0.
    if bits and (len(bits) != (count + 7) // 8 or (count % 8 and bits[-1] >> count % 8)):
        raise ProtocolError(f"{sender}: {what}: a bitmap of {len(bits)} bytes over {count} items")


def refused_pairs(flat: tuple[int, ...]) -> list[tuple[int, int]]:
    """The (worker, parameter) pairs in `refused` of a message."""
    return list(zip(flat[::2], flat[1::2], strict=True))


# --- one step --------------------------------------------------------------------------------------------------------


@message(10, TO_SERVER, handled="reduce")
@dataclass(frozen=True, slots=True)
class Push(Message):
    """Worker -> server: the local gradient of one bucket.

    The body is a view of the worker's local buffer. It stays valid until the mean of the reduction has come back, or
    the step is committed.

    Attributes:
        ordinal: the number of the backward in the step (visible gradients: each backward is a reduction of its own), or
            the revision (pushes that replace earlier ones).
        present: one bit per piece of the bucket. The body of an absent piece is zero.
        fresh: the worker's window "grad" has no gradient in this bucket that counts, so the mean may be written there.
        lazy: the worker asks for the mean if its script reads it (`MeanRequest`). All messages of a backward say so.
    """

    step: int
    ordinal: int
    bucket: int
    weight: float
    present: bytes
    fresh: bool = False
    lazy: bool = False

    def is_valid(self) -> bool:
        return 0 <= self.weight <= MOST_SAMPLES and self.ordinal >= 0


@message(7, TO_SERVER)
@dataclass(frozen=True, slots=True)
class StepRates(Message):
    """Worker -> server: hyper-parameters as in Commit.

    Sent before the pushes of a step that are applied on arrival.
    """

    hyper: bytes


@message(11, TO_SERVER, handled="reduce")
@dataclass(frozen=True, slots=True)
class BackwardEnd(Message):
    """Worker -> server: this backward has ended.

    Attributes:
        pushed: a bit for each of the server's buckets that was pushed.
        exits: the number of loops over the loader that this worker's script has left early so far.
        absent: the worker has called `step()` before this backward of others (`JoinBackward`). It has no gradient.
        lazy: as in Push.
    """

    step: int
    ordinal: int
    weight: float
    pushed: bytes
    exits: int = 0
    absent: bool = False
    lazy: bool = False

    def is_valid(self) -> bool:
        return 0 <= self.weight <= MOST_SAMPLES and self.ordinal >= 0 and 0 <= self.exits < MOST


@message(17, FROM_SERVER, sent="reduce (send)")
@dataclass(frozen=True, slots=True)
class BackwardReduced(Message):
    """Server -> worker: this backward is reduced.

    Attributes:
        contributed: a bit for each bucket with a ReducedGradient.
        written: a bit for each of the server's pieces with a mean that is in the worker's window "grad", or, for a lazy
            worker, that it may ask for. Empty: no piece.
        absent: workers with no script to change the step's gradients: absent ones, and those without a process.
    """

    step: int
    ordinal: int
    contributed: bytes
    written: bytes = b""
    absent: tuple[int, ...] = ()


@message(49, FROM_SERVER)
@dataclass(frozen=True, slots=True)
class JoinBackward(Message):
    """Server -> worker: others of its group make this backward, so its commit is void.

    The worker ends the backward without a gradient and commits again.
    """

    step: int
    ordinal: int


@message(12, FROM_SERVER, sent="reduce (send)")
@dataclass(frozen=True, slots=True)
class ReducedGradient(Message):
    """Server -> worker: the group's mean of one bucket and backward.

    `present` is the union over the workers. The body is a view of the server's buffer. It stays valid until this worker
    pushes the bucket again.
    """

    step: int
    ordinal: int
    bucket: int
    present: bytes


@message(8, TO_SERVER)
@dataclass(frozen=True, slots=True)
class MeanRequest(Message):
    """Lazy worker -> server: send the means of this backward, the group's last one."""

    step: int
    ordinal: int


@message(13, TO_SERVER, handled="reduce")
@dataclass(frozen=True, slots=True)
class GradientOverride(Message):
    """Worker -> server: the gradient of a bucket as the script has changed it.

    It is sent where the gradient differs from the running sum.
    """

    step: int
    bucket: int


@message(14, TO_SERVER, handled="commit")
@dataclass(frozen=True, slots=True)
class Commit(Message):
    """Worker -> server: the script has called `optimizer.step()`.

    Attributes:
        backwards: the number of reductions in the step.
        ages: for each of them, how many batches the script was given after it. Empty: none after any.
        revisions: for replacing pushes, a byte per bucket of the server: the revision that counts, or 255 for none.
        resets: how often gradients of the step were dropped before a later backward, by the script or an exception.
        edited, dropped: a bit per piece of the server: the script has changed the gradient, or set it to None.
        digest: of the bits of all gradients that the script has changed, or made itself. 0: of none, or not known.
        hyper: JSON of the parameter groups' hyper-parameters. Empty: unchanged.
        marks: flat triples (stream, first, last) of the data batches that this step consumed.
        inv_scale: the factor of gradients (1.0: no loss scaling).
        clip_norm: the bound of the global norm, which the servers apply (0: none).
        fetch: send values.
        exits: as in BackwardEnd.
        samples: the number of samples in this worker's gradient.
        optimizer: the number of the optimizer of which this is a step. It has gradients of no other one's parameters.
        counts: this is a step of the script. Otherwise it is a change of values without gradients, and no clock moves.
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
    samples: int = 0
    optimizer: int = 0
    counts: bool = True
    ages: tuple[int, ...] = ()
    resets: int = 0
    digest: int = 0

    def is_valid(self) -> bool:
        clips = self.clip_norm > 0
        return (
            # Every bound is written so that NaN fails it.
            0 <= self.step < MOST
            and 0 <= self.backwards < MOST_EPOCHS
            and 0 <= self.weight <= MOST_SAMPLES
            and 0 < self.inv_scale < inf
            and (self.clip_norm == 0 or clips)  # false for NaN
            and (not clips or self.clip_type > 0)
            and 0 <= self.exits < MOST
            and 0 <= self.optimizer < MOST
            and len(self.marks) % 3 == 0
            and (not self.marks or (min(self.marks) >= 0 and max(self.marks) < MOST))
        )


@message(15, FROM_SERVER, sent="apply (send)")
@dataclass(frozen=True, slots=True)
class Applied(Message):
    """Server -> worker: the step is committed on this server.

    Attributes:
        norm: the global gradient norm if it was requested, else -1.
        snapshot: the number of a snapshot that is being taken, to which the worker's state at its next batch belongs.
            0: none.
        found_inf: the step was skipped.
        refused: as in StepDecision.
        leaves: this was the group's last step for now, and its workers leave the job. Only the coordinator sets this.
    """

    step: int
    version: int
    staleness: int
    found_inf: bool
    norm: float
    snapshot: int = 0
    refused: tuple[int, ...] = ()
    leaves: bool = False


@message(16, TO_SERVER)
@dataclass(frozen=True, slots=True)
class Finish(Message):
    """Worker -> server: the script has ended after `steps` steps.

    The worker pushes nothing more.
    """

    steps: int

    def is_valid(self) -> bool:
        return 0 <= self.steps < MOST


@message(18, TO_COORDINATOR, FROM_COORDINATOR)
@dataclass(frozen=True, slots=True)
class GroupIdle(Message):
    """Worker -> coordinator: the worker's group rests or continues.

    A group rests while it has no batch, until other groups return some or the epoch ends. A resting group does not
    count as live, since otherwise a group that is bound to its clock would wait for it while it waits for that group.
    `epoch` and `ordinal` name the lease for which the group waits, which is the same for all its workers. The
    coordinator echoes the end of a rest when other groups are bound to this group again. Values that are read after
    that are not older than the job allows.
    """

    epoch: int
    ordinal: int
    resting: bool

    def is_valid(self) -> bool:
        return 0 <= self.epoch < MOST_EPOCHS and 0 <= self.ordinal < MOST_EPOCHS


@message(19, TO_SERVER)
@dataclass(frozen=True, slots=True)
class LoopExited(Message):
    """Worker -> servers: the worker's script has left a loop over the loader early.

    It was the exit number `exits`, in this step, after `backwards` backwards of the step.
    """

    exits: int
    step: int
    backwards: int

    def is_valid(self) -> bool:
        return 0 <= self.exits < MOST and 0 <= self.step < MOST and 0 <= self.backwards < MOST


# --- values ----------------------------------------------------------------------------------------------------------


@message(3, TO_SERVER)
@dataclass(frozen=True, slots=True)
class Fetch(Message):
    """Worker -> server: request for the current values.

    `round` numbers the fetches of one worker.
    """

    round: int

    def is_valid(self) -> bool:
        return 0 <= self.round < MOST


# Fetches count their rounds down from -1, and steps count up from 0. Neither reaches this range.
_FIRST_EXTRA_ROUND = 1 << 40


def extra_round(number: int) -> int:
    """`Values.round` of the reply to a worker's question of another kind than Fetch."""
    return -_FIRST_EXTRA_ROUND - number


@message(4, FROM_SERVER, sent="pull")
@dataclass(frozen=True, slots=True)
class Values(Message):
    """Server -> worker: current values of one bucket.

    The body is a view of the server's values if a single group uses them. It then changes only after this worker's next
    Commit. Otherwise it is a snapshot.

    Attributes:
        round: as in Fetch, or the step that made the values. Negative: no step made them.
        bucket: -1 means that all values of the server are in the worker's parameter buffer. A bucket without a body
            means that this bucket is there.
        coded: the body is an encoding of the difference to the values that this worker's group got before (see
            `error_feedback.DeltaStream`).
    """

    round: int
    bucket: int
    version: int
    coded: bool = False

    def is_valid(self) -> bool:
        return self.bucket >= -1


# --- between the shards of a server group ----------------------------------------------------------------------------


@message(20, Route(Sender.GROUP_SERVERS, Receiver.COORDINATOR), names_group=True, handled="decide")
@dataclass(frozen=True, slots=True)
class StepVote(Message):
    """Shard -> coordinator: every contribution to this step has arrived.

    Attributes:
        finite: the step may be applied.
        power: the shard's sum of |g|^p for the global norm, or its largest |g| with `infinity`.
        applied: the sender has applied all decisions below this number, so they need not be kept for it.
        incarnation: the incarnation of the group. A vote of an earlier one is void.
        refused: flat pairs (worker, parameter) of gradients that are not finite. Parameter -1 means none in particular:
            the sum is not finite, or a table's gradient.
        members: with backup workers, the workers with complete contributions so far. The vote is sent again for each
            further worker.
        measured: an extension's measures of the step on this shard, for the shards that carry it out.
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
    measured: bytes = b""

    def is_valid(self) -> bool:
        return 0 <= self.step < MOST and 0 <= self.applied < MOST and 0 <= self.incarnation < MOST


@message(21, Route(Sender.COORDINATOR, Receiver.SHARD), names_group=True, handled="apply")
@dataclass(frozen=True, slots=True)
class StepDecision(Message):
    """Coordinator -> shards: decision number `index`: apply a step, or change members.

    Without `change` the decision is to apply this step of this group, or to skip it (`found_inf`). Clocks and members
    change only by decisions, so that they are the same on all shards.

    Attributes:
        change: 0, or one of the following.
            - 1: the group rests.
            - 2: the group is back, and its clock is `step`.
            - 3: the group is restarted as incarnation `step`, and rests until it is back.
            - 4: take snapshot number `step`. This belongs to no group.
            - 5: the group has left. If it returns, it is incarnation `step`.
            - 6: some workers of the group get the present values. `members` has flat pairs (worker, round of its
              StepCatchUp).
            - 7: the worker in `members` has a new process, incarnation `step`.
            - 8: a worker joins its group again, after its new process. `members` has its number and the round of its
              request. The group's step is dropped, and repeated with this worker.
        refused: as in StepVote, of all shards. The gradients of these workers do not count.
        members: with backup workers, the workers with gradients that the step is made of.
        joined: this step and that of the next decision are one update of the values.
        measured: as in StepVote, of all shards in their order.
    """

    index: int
    group: int
    step: int
    found_inf: bool
    power: float
    change: int = 0
    refused: tuple[int, ...] = ()
    members: tuple[int, ...] = ()
    joined: bool = False
    measured: bytes = b""

    def is_valid(self) -> bool:
        in_bounds = 0 <= self.index < MOST and 0 <= self.step < MOST and 0 <= self.change <= 8
        return in_bounds and not (self.joined and self.change)


@message(22, Route(Sender.GROUP_SERVERS, Receiver.COORDINATOR))
@dataclass(frozen=True, slots=True)
class StepDecisionRequest(Message):
    """Shard -> coordinator: request for all decisions from number `index` on.

    The sender has applied all decisions below it.
    """

    index: int

    def is_valid(self) -> bool:
        return 0 <= self.index < MOST
