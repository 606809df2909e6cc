"""Messages of the start and end of a job, and between server groups."""

from dataclasses import dataclass

from topotrain.core.protocol.codec import Message, numbered

# --- joining ---------------------------------------------------------------------------------------------------------


@numbered(1)
@dataclass(frozen=True, slots=True)
class SchemaPart(Message):
    """Worker -> server: one part of the description of the model and the optimizer.

    It is JSON text of at most MAX_TEXT bytes. A server also sends it to the server of the same shard in group 0, which
    then knows that it may send values.
    """

    part: int
    parts: int
    text: str


@numbered(2)
@dataclass(frozen=True, slots=True)
class Init(Message):
    """Worker or server -> server: initial values of one bucket.

    After a warm-up they are the first common values. The body is read before the sender continues.
    """

    bucket: int


@numbered(3)
@dataclass(frozen=True, slots=True)
class Fetch(Message):
    """Worker -> server: request for the current values.

    `round` numbers the fetches of one worker.
    """

    round: int


@numbered(4)
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


@numbered(5)
@dataclass(frozen=True, slots=True)
class Fail(Message):
    """Worker or server -> worker or server: the sender cannot continue the job.

    `text` is the reason in the user's words.

    Attributes:
        config: the job itself is wrong.
        cause: the sender knows that this is a root cause. Otherwise it may be a consequence of another failure.
        quarantine: only this worker group is affected, and other groups may continue without it.
    """

    text: str
    config: bool = False
    cause: bool = False
    quarantine: bool = False


@numbered(6)
@dataclass(frozen=True, slots=True)
class SharedBuffer(Message):
    """Worker or server -> server or worker: a window on a flat buffer of the sender.

    The body is valid until the end of the job. `shared_windows` has the rules for writing.

    - Worker -> server: "grad", the part that the server's shard covers.
    - First server of a group -> its other servers: a parameter buffer, the part that the shard covers.
    - First server of a group -> workers: all of their parameter buffers.

    `space` is as in the slice map.
    """

    name: str
    space: int


# --- between server groups -------------------------------------------------------------------------------------------


@numbered(30)
@dataclass(frozen=True, slots=True)
class Delta(Message):
    """Server -> master server: changes of a bucket by this group since the last sync.

    Snapshot.

    Attributes:
        cut: the last snapshot for which the sender had frozen its state before this message.
        updates: the number of local updates in it.
    """

    bucket: int
    sync: int
    cut: int = 0
    updates: int = 0


@numbered(31)
@dataclass(frozen=True, slots=True)
class MasterValue(Message):
    """Master server -> server: the master's value with Delta number `sync` added.

    Snapshot. `updates` is the number of updates of all other groups in it since the start.
    """

    bucket: int
    sync: int
    updates: int = 0


@numbered(32)
@dataclass(frozen=True, slots=True)
class RingOffer(Message):
    """Server -> server of the right neighbor group: the sender's value of a bucket.

    Snapshot. `sync` numbers the rounds of this pair.
    """

    bucket: int
    sync: int


@numbered(33)
@dataclass(frozen=True, slots=True)
class RingReply(Message):
    """Server of the right neighbor group -> server: the difference to add.

    With it both hold the average. Snapshot. `updates` is the number of updates of the neighbor since the start.
    """

    bucket: int
    sync: int
    updates: int = 0


@numbered(34)
@dataclass(frozen=True, slots=True)
class Drained(Message):
    """Server -> servers of the same shard in other groups: the sender has finished.

    All its worker groups have ended, and it has sent all its updates.
    """


@numbered(35)
@dataclass(frozen=True, slots=True)
class FinalValue(Message):
    """Master server -> server of group 0: the final value of a bucket.

    The body is a view that never changes again.
    """

    bucket: int


# --- end of the job --------------------------------------------------------------------------------------------------


@numbered(40)
@dataclass(frozen=True, slots=True)
class ModelBufferValue(Message):
    """Worker -> server (0,0): a buffer of the model as raw bytes.

    Such buffers are, for example, BatchNorm statistics. Server (0,0) also sends it to worker (0,0) in reply to
    BufferRequest.

    Attributes:
        group: the worker group of the buffer.
        index: the number of the buffer. -1 means that worker 0 of the group has sent all of its buffers. In a split
            model other workers send buffers, too.
    """

    group: int
    index: int


@numbered(41)
@dataclass(frozen=True, slots=True)
class FinalRequest(Message):
    """Worker (0,0) -> servers of its group: request for the final values.

    The servers reply with Values once all groups have drained.
    """

    round: int


@numbered(42)
@dataclass(frozen=True, slots=True)
class BufferRequest(Message):
    """Worker (0,0) -> server (0,0): request for the model buffers of all groups.

    The reply is ModelBufferValue messages, the last one with index -1.
    """
