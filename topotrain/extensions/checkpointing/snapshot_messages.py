"""Messages of snapshots (see `snapshot_coordinator`)."""

from dataclasses import dataclass

from topotrain.core.protocol.message import (
    MOST,
    Condition,
    Message,
    Receiver,
    Route,
    Sender,
    message,
)


@message(64, Route(Sender.SELF, Receiver.COORDINATOR))
@dataclass(frozen=True, slots=True)
class SnapshotRequest(Message):
    """Process of a coordinator -> coordinator: a snapshot is due.

    Attributes:
        last: the job is to end, so the snapshot is to follow the next step.
    """

    last: bool = False


@message(
    65,
    Route(Sender.SELF, Receiver.SERVER),
    Route(Sender.GROUP_SERVERS, Receiver.COORDINATOR),
    Route(Sender.COORDINATOR, Receiver.SHARD),
    Route(Sender.COORDINATORS, Receiver.DATA_SERVICE),
    Route(Sender.DATA_SERVICE, Receiver.COORDINATOR),
)
@dataclass(frozen=True, slots=True)
class SnapshotPart(Message):
    """Shard -> coordinator, and back: one part of a text (JSON) about a snapshot at this stage.

    Attributes:
        shard: the shard that the text is from. A coordinator forwards the texts of its shards to server (0,0).
    """

    number: int
    stage: int
    part: int
    parts: int
    text: str
    shard: int = 0

    def is_valid(self) -> bool:
        numbers = (self.number, self.stage, self.part, self.parts)
        return min(numbers) >= 0 and max(numbers) < MOST


@message(66, Route(Sender.SAME_SHARD, Receiver.SERVER, Condition.SERVER_GROUPS))
@dataclass(frozen=True, slots=True)
class Remainder(Message):
    """Server -> master server: the changes of a bucket since exchange `sync`, at snapshot `number`. Snapshot."""

    number: int
    bucket: int
    sync: int
