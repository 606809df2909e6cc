"""How a job begins and ends, and what server groups tell each other."""

from dataclasses import dataclass

from topotrain.core.protocol.codec import Message, numbered

# --- joining ---------------------------------------------------------------------------------------------------------


@numbered(1)
@dataclass(frozen=True, slots=True)
class SchemaPart(Message):
    """One part of the description of the model and the optimizer (JSON text, at most MAX_TEXT).

    Worker -> server; and server -> server of the same shard in group 0, which then knows that it may send values.
    """

    part: int
    parts: int
    text: str


@numbered(2)
@dataclass(frozen=True, slots=True)
class Init(Message):
    """Initial (or, after warm-up, first common) values of one bucket. The body is read before the sender goes on."""

    bucket: int


@numbered(3)
@dataclass(frozen=True, slots=True)
class Fetch(Message):
    """Worker -> server: send me your current values. `round` numbers the fetches of one worker."""

    round: int


@numbered(4)
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


@numbered(5)
@dataclass(frozen=True, slots=True)
class Fail(Message):
    """The sender cannot go on with the job, and why, in the user's words; config: the job itself is wrong.

    cause: the sender knows that nothing else explains it; otherwise it may be what follows from something else.
    quarantine: it is about this worker group alone, without which others may go on.
    """

    text: str
    config: bool = False
    cause: bool = False
    quarantine: bool = False


@numbered(6)
@dataclass(frozen=True, slots=True)
class SharedBuffer(Message):
    """The body shows a flat buffer of the sender, for the rest of the job; `shared_windows` says who may write it when.

    Worker -> server: "grad", the part that the server's shard covers. First server of a group -> its other servers:
    a parameter buffer, the part that the shard covers; -> workers: all of theirs. `space` as in the slice map.
    """

    name: str
    space: int


# --- between server groups -------------------------------------------------------------------------------------------


@numbered(30)
@dataclass(frozen=True, slots=True)
class Delta(Message):
    """Group -> master group: what this group added to a bucket since the last sync. Snapshot.

    cut: the last snapshot for which the sender had frozen when it sent this. updates: so many local ones are in it.
    """

    bucket: int
    sync: int
    cut: int = 0
    updates: int = 0


@numbered(31)
@dataclass(frozen=True, slots=True)
class MasterValue(Message):
    """Master group -> group: the master's value after taking Delta number `sync`. Snapshot.

    updates: so many of all other groups are in it, since the start.
    """

    bucket: int
    sync: int
    updates: int = 0


@numbered(32)
@dataclass(frozen=True, slots=True)
class RingOffer(Message):
    """Group -> its right neighbor: my value of a bucket, round number `sync` of this pair. Snapshot."""

    bucket: int
    sync: int


@numbered(33)
@dataclass(frozen=True, slots=True)
class RingReply(Message):
    """Right neighbor -> group: what to add so that both hold the average. Snapshot.

    updates: so many the neighbor has made since the start.
    """

    bucket: int
    sync: int
    updates: int = 0


@numbered(34)
@dataclass(frozen=True, slots=True)
class Drained(Message):
    """Server -> servers of the same shard in other groups: all my groups have ended, all my updates are with you."""


@numbered(35)
@dataclass(frozen=True, slots=True)
class FinalValue(Message):
    """Master -> server group 0: the final value of a bucket it masters. View: it never changes again."""

    bucket: int


# --- the end ---------------------------------------------------------------------------------------------------------


@numbered(40)
@dataclass(frozen=True, slots=True)
class ModelBufferValue(Message):
    """Model buffer number `index` of a worker group (BatchNorm statistics), as raw bytes.

    Worker -> server (0,0): index -1: that was all of worker 0's. Where a model is split, others have some, too.
    """

    group: int
    index: int


@numbered(41)
@dataclass(frozen=True, slots=True)
class FinalRequest(Message):
    """Worker (0,0) -> servers of its group: the master view, once everybody has drained; replied with Values."""

    round: int


@numbered(42)
@dataclass(frozen=True, slots=True)
class BufferRequest(Message):
    """Worker (0,0) -> server (0,0): the buffers of all groups; replied with BufferPut, the end marked by index -1."""
