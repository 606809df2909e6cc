"""Messages of snapshots, and the JSON texts that they carry in parts."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from topotrain.config.topology import Address
from topotrain.core.protocol import MAX_TEXT, ProtocolError
from topotrain.core.protocol.message import (
    MOST,
    Condition,
    Message,
    Receiver,
    Route,
    Sender,
    message,
)
from topotrain.core.server.component_state import State

FROZEN, LAYOUT, WRITTEN, PUBLISHED, CUT = 0, 1, 2, 3, 4
"""Values of SnapshotPart.stage."""

# Bounds of the memory that texts of other servers can take.
_MOST_PARTS = 4096
# Texts of one sender with missing parts. They go into the manifest, for which `checkpoint_reader` has the same limit.
_MOST_BYTES = 1 << 28
# What a part takes besides its text.
_PART_BYTES = 128
# MAX_TEXT is in bytes, and a character of UTF-8 has at most four.
_PART = MAX_TEXT // 4


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
    """Shard -> coordinator, and back: a part of the text (JSON) of a stage.

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
    """Server -> master server: the changes of a bucket since exchange `sync`.

    Of groups that average, it is the value that the group had when it froze, and `sync` is 0.
    """

    number: int
    bucket: int
    sync: int


def snapshot_parts(number: int, stage: int, data: Mapping[str, Any], shard: int = 0) -> list[SnapshotPart]:
    """The messages that carry the data of a stage."""
    text = json.dumps(data, separators=(",", ":"))
    cuts = [text[i : i + _PART] for i in range(0, len(text), _PART)]
    return [SnapshotPart(number, stage, i, len(cuts), cut, shard) for i, cut in enumerate(cuts)]


class TextParts:
    """Joins the parts of texts, in whatever order they arrive."""

    def __init__(self) -> None:
        self._parts: dict[tuple[Address, int, int], dict[int, str]] = {}
        self._bytes: Counter[Address] = Counter()

    def add(self, sender: Address, message: SnapshotPart) -> dict[str, Any] | None:
        """Keep a part. Returns the data with the last part. Raises ProtocolError."""
        # These numbers come from a peer and decide about memory.
        if not 0 <= message.part < message.parts <= _MOST_PARTS:
            raise ProtocolError(f"part {message.part} of {message.parts} about a snapshot")
        key = (sender, message.number, message.stage)
        # A snapshot begins after the one before it, of which a sender that has died may have left parts.
        for old in [known for known in self._parts if known[0] == sender and known[1] < message.number]:
            self._forget(old)
        parts = self._parts.setdefault(key, {})
        # By number: a repeated part changes nothing, and parts may overtake each other on new connections.
        if message.part not in parts:
            parts[message.part] = message.text
            self._bytes[sender] += len(message.text) + _PART_BYTES
        if len(parts) < message.parts:
            if self._bytes[sender] > _MOST_BYTES:
                self._forget(key)
                raise ProtocolError(f"{sender} begins too many texts about snapshots")
            return None
        self._forget(key)
        try:
            data = json.loads("".join(parts[i] for i in range(message.parts)))
        # KeyError: parts with different totals. RecursionError: deeply nested JSON.
        except (ValueError, KeyError, RecursionError) as error:
            raise ProtocolError(f"not about a snapshot: {error}") from error
        if not isinstance(data, dict):
            raise ProtocolError("not about a snapshot")
        return data

    def _forget(self, key: tuple[Address, int, int]) -> None:
        self._bytes[key[0]] -= sum(len(text) + _PART_BYTES for text in self._parts.pop(key).values())

    def state_dict(self) -> State:
        return {"parts": self._parts, "bytes": dict(self._bytes)}

    def load_state_dict(self, state: State) -> None:
        self._parts = {key: dict(parts) for key, parts in state["parts"].items()}
        self._bytes = Counter(state["bytes"])
