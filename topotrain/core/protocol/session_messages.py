"""Messages of the start and end of a job, and between server groups."""

from dataclasses import dataclass

from topotrain.core.protocol.codec import MAX_TEXT
from topotrain.core.protocol.message import (
    FROM_COORDINATOR,
    FROM_DATA_SERVICE,
    FROM_SERVER,
    MOST,
    MOST_EPOCHS,
    TO_COORDINATOR,
    TO_DATA_SERVICE,
    TO_SERVER,
    Condition,
    Message,
    Receiver,
    Route,
    Sender,
    message,
)

_MAX_KEY = 200  # characters of the name of an entry of optimizer state
_BETWEEN_GROUPS = Route(Sender.SAME_SHARD, Receiver.SERVER, Condition.SERVER_GROUPS)

# --- joining ---------------------------------------------------------------------------------------------------------


@message(1, TO_SERVER, Route(Sender.SAME_SHARD, Receiver.FIRST_GROUP))
@dataclass(frozen=True, slots=True)
class SchemaPart(Message):
    """Worker -> server: one part of the description of the model and the optimizer.

    It is JSON text of at most MAX_TEXT bytes. A server also sends it to the server of the same shard in group 0, which
    then knows that it may send values.
    """

    part: int
    parts: int
    text: str

    def is_valid(self) -> bool:
        return 0 <= self.part < self.parts and len(self.text) <= MAX_TEXT // 4


@message(
    2, Route(Sender.FIRST_GROUP_WORKERS, Receiver.FIRST_GROUP), Route(Sender.FIRST_SAME_SHARD, Receiver.LATER_GROUP)
)
@dataclass(frozen=True, slots=True)
class Init(Message):
    """Worker or server -> server: initial values of one bucket.

    After a warm-up they are the first common values. The body is read before the sender continues.
    """

    bucket: int


@message(5, TO_SERVER, Route(Sender.SAME_SHARD, Receiver.SERVER), FROM_SERVER, FROM_DATA_SERVICE)
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


@message(
    6,
    Route(Sender.GROUP_WORKERS, Receiver.SERVER, Condition.SHARED_MEMORY),
    Route(Sender.COORDINATOR, Receiver.SHARD, Condition.SHARED_MEMORY),
    FROM_COORDINATOR,
)
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


@message(30, _BETWEEN_GROUPS, handled="agree")
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

    def is_valid(self) -> bool:
        return 0 <= self.sync < MOST


@message(31, _BETWEEN_GROUPS, handled="agree")
@dataclass(frozen=True, slots=True)
class MasterValue(Message):
    """Master server -> server: the master's value with Delta number `sync` added.

    Snapshot. `updates` is the number of updates of all other groups in it since the start.
    """

    bucket: int
    sync: int
    updates: int = 0

    def is_valid(self) -> bool:
        return 0 <= self.sync < MOST


@message(32, _BETWEEN_GROUPS, handled="agree")
@dataclass(frozen=True, slots=True)
class PairOffer(Message):
    """Server -> server of another group: the sender's value of a bucket.

    Snapshot. `sync` numbers the exchanges of the sender in this bucket.

    Attributes:
        cut: the last snapshot for which the sender had frozen its state before this message.
        updates: the number of local updates since its last exchange.
    """

    bucket: int
    sync: int
    cut: int = 0
    updates: int = 0

    def is_valid(self) -> bool:
        return 0 <= self.sync < MOST and 0 <= self.updates < MOST_EPOCHS


@message(33, _BETWEEN_GROUPS, handled="agree")
@dataclass(frozen=True, slots=True)
class PairReply(Message):
    """Reply to PairOffer: the difference to add, which this server has subtracted.

    Snapshot.

    Attributes:
        updates: the number of updates since the start that the exchange brings.
        cut: the last snapshot for which the sender had frozen its state before it subtracted the difference.
    """

    bucket: int
    sync: int
    updates: int = 0
    cut: int = 0

    def is_valid(self) -> bool:
        return 0 <= self.sync < MOST


@message(34, _BETWEEN_GROUPS)
@dataclass(frozen=True, slots=True)
class Drained(Message):
    """Server -> same shard in other groups: its groups ended, all updates are sent."""


@message(35, Route(Sender.SAME_SHARD, Receiver.FIRST_GROUP, Condition.SERVER_GROUPS))
@dataclass(frozen=True, slots=True)
class FinalValue(Message):
    """Master server -> server of group 0: the final value of a bucket.

    The body is a view that never changes again.
    """

    bucket: int


# --- end of the job --------------------------------------------------------------------------------------------------


@message(40, TO_DATA_SERVICE, FROM_DATA_SERVICE)
@dataclass(frozen=True, slots=True)
class ModelBufferValue(Message):
    """Worker -> server (0,0): a buffer of the model (BatchNorm statistics), as bytes.

    Server (0,0) also sends it to worker (0,0) in reply to BufferRequest.

    Attributes:
        group: the worker group of the buffer.
        index: the number of the buffer. -1 means that worker 0 of the group has sent all of its buffers. In a split
            model other workers send buffers, too.
    """

    group: int
    index: int

    def is_valid(self) -> bool:
        return -1 <= self.index < MOST


@message(41, Route(Sender.MAIN_WORKER, Receiver.FIRST_GROUP))
@dataclass(frozen=True, slots=True)
class FinalRequest(Message):
    """Worker (0,0) -> servers of its group: request for the final values.

    The servers reply with Values once all groups have drained.
    """

    round: int

    def is_valid(self) -> bool:
        return -MOST <= self.round < MOST


@message(42, Route(Sender.MAIN_WORKER, Receiver.DATA_SERVICE))
@dataclass(frozen=True, slots=True)
class BufferRequest(Message):
    """Worker (0,0) -> server (0,0): request for the model buffers of all groups.

    The reply is LastWrites messages, and then ModelBufferValue messages, the last one with index -1.
    """


@message(43, TO_DATA_SERVICE, FROM_DATA_SERVICE)
@dataclass(frozen=True, slots=True)
class LastWrites(Message):
    """Worker -> server (0,0): the parameters changed after the script's last step.

    The body has a digest of 8 bytes for each parameter, which is 0 for one that was not changed. The server echoes the
    message without a body, and hands all of them to worker (0,0) in reply to BufferRequest. A worker that has changed
    nothing sends none, and one that has waits for the echo before it says that its script has ended.
    """

    group: int
    index: int

    def is_valid(self) -> bool:
        return 0 <= self.group < MOST and 0 <= self.index < MOST


# --- processes that replace others, and what was applied so far ------------------------------------------------------


@message(23, TO_SERVER, Route(Sender.ALL_WORKERS, Receiver.DATA_SERVICE), FROM_SERVER, FROM_DATA_SERVICE)
@dataclass(frozen=True, slots=True)
class WorkerRejoined(Message):
    """Worker -> its servers and server (0,0): the worker's incarnation.

    It is the first message of a worker of a restarted group. The worker sends nothing else, and ignores all other
    messages, until all servers have echoed it: messages before the echo may be meant for its predecessor.

    Attributes:
        begun: in the echo, the server's values are known and need not be sent again.
    """

    incarnation: int
    begun: bool = False

    def is_valid(self) -> bool:
        return 0 <= self.incarnation < MOST_EPOCHS


@message(26, TO_COORDINATOR)
@dataclass(frozen=True, slots=True)
class AppliedBatchesRequest(Message):
    """Worker -> its coordinator: request for the progress of a data stream.

    With stream -1 it is the number of steps of the worker's group.
    """

    stream: int

    def is_valid(self) -> bool:
        return -1 <= self.stream < MOST


@message(27, FROM_COORDINATOR)
@dataclass(frozen=True, slots=True)
class AppliedBatchesReply(Message):
    """Coordinator -> worker: exactly the first `count` batches of it are applied.

    Attributes:
        first: the first batch of the group's last step with batches, if they are of this stream.
        made: the number of steps from that one on: the others had no batch of their own. 0: it had batches elsewhere.
    """

    stream: int
    count: int
    first: int = 0
    made: int = 0


# --- optimizer state -------------------------------------------------------------------------------------------------


@message(60, TO_SERVER)
@dataclass(frozen=True, slots=True)
class StateRequest(Message):
    """Worker -> server: request for the optimizer state.

    The server replies with StatePart messages. An empty key marks the last one.
    """

    round: int

    def is_valid(self) -> bool:
        return 0 <= self.round < MOST


@message(61, TO_SERVER, FROM_SERVER)
@dataclass(frozen=True, slots=True)
class StatePart(Message):
    """One entry of the optimizer state of a piece: a number, or a tensor as the body.

    The last message of a server has no key. Its number is the number of entries before it. Where a worker sends no key,
    the server forgets the entries of the piece's segment.

    Attributes:
        round: that of the request. From a worker 0: the state with which the script begins; 1: a later change.
    """

    round: int
    bucket: int
    piece: int
    number: float
    key: str

    def is_valid(self) -> bool:
        return -MOST < self.round < MOST and len(self.key) <= _MAX_KEY
