"""Who is there: groups that come back, leave and join, backup workers, and two copies of a server."""

from dataclasses import dataclass

from topotrain.core.protocol.codec import Message, numbered

# --- a worker group that comes back (see `membership`) ---------------------------------------------------------------


@numbered(23)
@dataclass(frozen=True, slots=True)
class WorkerRejoined(Message):
    """Worker -> its servers and server (0,0): my group was started again, and I am of its `incarnation`.

    It is the worker's first word, and its only one until all have echoed it; what it hears before may have been meant
    for its predecessor. begun: in the echo, the server's values are known and need not be given again.
    """

    incarnation: int
    begun: bool = False


@numbered(24)
@dataclass(frozen=True, slots=True)
class RestartRequest(Message):
    """Shard -> coordinator: let the workers of this incarnation of a group in, and let go of those before them.

    index: of the one worker that is meant; -1: the whole group.
    """

    group: int
    incarnation: int
    index: int = -1


@numbered(25)
@dataclass(frozen=True, slots=True)
class AppliedBatchesOfStreams(Message):
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


@numbered(26)
@dataclass(frozen=True, slots=True)
class AppliedBatchesRequest(Message):
    """Worker -> its coordinator: how many batches of this data stream are applied? Of stream -1: my group's steps."""

    stream: int


@numbered(27)
@dataclass(frozen=True, slots=True)
class AppliedBatchesReply(Message):
    """Coordinator -> worker: the first `count` batches of the stream are applied, and no others of it."""

    stream: int
    count: int


@numbered(28)
@dataclass(frozen=True, slots=True)
class GroupLeaveRequest(Message):
    """A coordinator's own host -> it: this group's workers are to end after their next step. Nobody else says this.

    incarnation: which of them are meant; those that come after them, since they have died meanwhile, stay.
    """

    group: int
    incarnation: int


@numbered(29)
@dataclass(frozen=True, slots=True)
class GroupLeft(Message):
    """A coordinator's own host -> it: all processes of the group before this incarnation have ended, none follows now.

    Nobody else says this.
    """

    group: int
    incarnation: int


# --- backup workers (see `backup`) -----------------------------------------------------------------------------------


@numbered(36)
@dataclass(frozen=True, slots=True)
class StepMissed(Message):
    """Coordinator -> worker: this step was decided without what you pushed for it; nothing of that counts."""

    step: int


@numbered(37)
@dataclass(frozen=True, slots=True)
class StepCatchUp(Message):
    """Worker -> coordinator: show me the values, and tell me which step the group is in; answered by every shard.

    through: not before all others are through with the batches of this epoch, as I am; -1: at once. round: numbers the
    questions of one worker from 1; 0: it does not ask, it only tells that it is through.
    """

    round: int
    through: int


@numbered(38)
@dataclass(frozen=True, slots=True)
class StepCaughtUp(Message):
    """Shard -> worker: the values were sent that it asked for with the CatchUp of this round; the group is in `step`.

    snapshot: as in Applied.
    """

    round: int
    step: int
    version: int
    snapshot: int = 0


# --- two copies of a server (see `state_machine`)
# ----------------------------------------------------------------------


@numbered(100)
@dataclass(frozen=True, slots=True)
class ResumeConnection(Message):
    """On a way that was made anew, both sides' first word: so many of your messages have I heard, ever.

    What was said after those is said again. answer: this one answers the other side's. life: a worker's group has been
    started so often again; an earlier process in its place said, and heard, other messages.
    """

    heard: int
    answer: bool = False
    life: int = 0


@numbered(101)
@dataclass(frozen=True, slots=True)
class Ack(Message):
    """Worker <-> server, server <-> server: the first so many of your messages will not be asked for again.

    Not counted itself, as all messages of this section. ask: tell me as much, once both copies have what I said.
    """

    heard: int
    ask: bool = False


@numbered(102)
@dataclass(frozen=True, slots=True)
class ReplicatedEvent(Message):
    """Server -> its second copy: event number `index` is this; see `state_machine.ReplicatedServer` for the events.

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


@numbered(103)
@dataclass(frozen=True, slots=True)
class ReplicaAck(Message):
    """Second copy -> server: I have all events up to number `index`. whole: I have become what you were by then."""

    index: int
    whole: bool = False


@numbered(104)
@dataclass(frozen=True, slots=True)
class StateTransfer(Message):
    """Server -> a fresh second copy: part `part` of `parts` of the `nbytes` bytes of all that it is (see `transfer`).

    index: events that are in it. The body is a snapshot.
    """

    index: int
    part: int
    parts: int
    nbytes: int


@numbered(105)
@dataclass(frozen=True, slots=True)
class ReplicaReleased(Message):
    """Server -> its second copy: nothing is left to do, for you neither."""


@numbered(106)
@dataclass(frozen=True, slots=True)
class ReplicaChecksum(Message):
    """Second copy -> server: this, a CRC, is what I have found behind event number `index` (see `replica_checksum`)."""

    index: int
    mark: int
