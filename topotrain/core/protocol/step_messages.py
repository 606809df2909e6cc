"""A step: values out to the workers, gradients in, and the decision of a group's servers."""

from dataclasses import dataclass

from topotrain.core.protocol.codec import Message, numbered

# --- one step --------------------------------------------------------------------------------------------------------


@numbered(10)
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


@numbered(7)
@dataclass(frozen=True, slots=True)
class StepRates(Message):
    """Worker -> server: hyper-parameters as in Commit, before the pushes of a step that are applied on arrival."""

    hyper: bytes


@numbered(11)
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


@numbered(17)
@dataclass(frozen=True, slots=True)
class BackwardReduced(Message):
    """Server -> worker: this backward is reduced; `contributed` has a bit for each bucket that has a Mean.

    written: a bit for each of the server's pieces whose mean stands in the worker's window "grad"; empty: none.
    """

    step: int
    ordinal: int
    contributed: bytes
    written: bytes = b""


@numbered(12)
@dataclass(frozen=True, slots=True)
class ReducedGradient(Message):
    """Server -> worker: the group's mean of one bucket and backward; `present` is the union over the workers.

    The body is a view of the server's buffer and stays until this worker pushes the bucket again.
    """

    step: int
    ordinal: int
    bucket: int
    present: bytes


@numbered(13)
@dataclass(frozen=True, slots=True)
class GradientOverride(Message):
    """Worker -> server: the gradient of a bucket as the script left it, where it differs from the running sum."""

    step: int
    bucket: int


@numbered(14)
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
    exits: as in BackwardEnd. samples: of how many this worker's gradient is.
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


@numbered(15)
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


@numbered(16)
@dataclass(frozen=True, slots=True)
class Finish(Message):
    """Worker -> server: the script ended after this many steps; nothing more will be pushed."""

    steps: int


@numbered(18)
@dataclass(frozen=True, slots=True)
class GroupIdle(Message):
    """Worker -> coordinator: my group has no batch until others give some back or the epoch ends; or it goes on.

    A group at rest counts as not live: whoever is bound to its clock would wait for a group that waits for him. The
    wait is named by its lease, which is the same for all workers of the group. The end of a rest is echoed when others
    are bound to the group again: what is read from then on is not older than the job allows.
    """

    epoch: int
    ordinal: int
    resting: bool


@numbered(19)
@dataclass(frozen=True, slots=True)
class LoopExited(Message):
    """Worker -> servers: my script left a loop over the loader early, for the `exits`-th time.

    It did so in this step, after so many backwards of it.
    """

    exits: int
    step: int
    backwards: int


# --- between the shards of a server group ----------------------------------------------------------------------------


@numbered(20)
@dataclass(frozen=True, slots=True)
class StepVote(Message):
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


@numbered(21)
@dataclass(frozen=True, slots=True)
class StepDecision(Message):
    """Coordinator -> shards: decision number `index`: apply this step of this group (or skip it: found_inf).

    change: 0, or no step but that the group rests (1), or is back and its clock is `step` (2), or is started again as
    incarnation `step`, and rests until it is back (3), or has left, and would be back as incarnation `step` (5): clocks
    and members change by decisions only, so that they are the same on all shards. Of no group: a snapshot, `step` (4).
    refused: as in Staged, of all shards; these workers' gradients count for nothing.

    members: with backup workers, those of whose gradients the step is made. Where it is no step but that some workers
    of the group are shown the values as they are (6): flat pairs (worker, round of its CatchUp). The one worker whose
    process is another, of incarnation `step` (7).
    """

    index: int
    group: int
    step: int
    found_inf: bool
    power: float
    change: int = 0
    refused: tuple[int, ...] = ()
    members: tuple[int, ...] = ()


@numbered(22)
@dataclass(frozen=True, slots=True)
class StepDecisionRequest(Message):
    """Shard -> coordinator: I have applied everything below `index`; what was decided from there on?"""

    index: int


# --- between units, for collectives ----------------------------------------------------------------------------------


@numbered(70)
@dataclass(frozen=True, slots=True)
class CollectivePart(Message):
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
