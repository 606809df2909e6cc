"""Reliable messages between two units: numbered, in order, exactly once.

A message is JSON, and travels in parts. Each part is kept until the other end has acknowledged it. After a reconnection
all kept parts are sent again. The module does no I/O and reads no clock.
"""

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from topotrain.core.protocol import Message, ProtocolError, message

# The fields of a wire message are limited, so a message travels in parts.
PART_BYTES = 32 << 10
"""Bytes of one part."""
MESSAGE_BYTES = 16 << 20
"""Limit of a message. A peer that sends more loses its connection."""
_TEXT = 20_000  # the last characters of an event's text are the most useful ones

Words = Mapping[str, Any]


@message(110)
@dataclass(frozen=True, slots=True)
class UnitPart(Message):
    """A part of a message between two units, or an acknowledgement alone.

    number: the number of the part, from 1; 0: an acknowledgement without a part, which is also the heartbeat.
    received: the number of the last part that the sender has received. more: further parts of the message follow.
    """

    number: int
    received: int
    more: bool
    text: bytes


class ReliableEnd:
    """One end of the messages between two units; it outlives their connections."""

    def __init__(self) -> None:
        self._kept: deque[UnitPart] = deque()
        self._number = self._received = 0
        self._text = bytearray()

    @property
    def waiting(self) -> bool:
        """Whether the other end has not acknowledged some parts yet."""
        return bool(self._kept)

    def send(self, words: Words) -> list[UnitPart]:
        """Return the parts of a message, and keep them until they are acknowledged."""
        text = json.dumps(words, separators=(",", ":")).encode()
        parts = []
        for at in range(0, len(text), PART_BYTES):
            self._number += 1
            more = at + PART_BYTES < len(text)
            parts.append(UnitPart(self._number, self._received, more, text[at : at + PART_BYTES]))
        self._kept.extend(parts)
        return parts

    def acknowledgement(self) -> UnitPart:
        """Return a part without content, which acknowledges everything received."""
        return UnitPart(0, self._received, False, b"")

    def unacknowledged(self) -> list[UnitPart]:
        """Return the kept parts in their order, to be sent again over a new connection."""
        # The acknowledgement in a kept part is of the time of its first sending.
        return [replace(part, received=self._received) for part in self._kept]

    def receive(self, part: UnitPart) -> Words | None:
        """Return the message that this part completes, if it completes one.

        Raises:
            ProtocolError: the message is too large, or not a JSON object.
        """
        # First, and also for a part without content: the acknowledgement counts by itself.
        while self._kept and self._kept[0].number <= part.received:
            self._kept.popleft()
        # A repeated part came before. One after a gap comes again: the other end keeps both.
        if part.number != self._received + 1:
            return None
        self._received += 1
        self._text += part.text
        # Checked before the last part, so that a faulty peer cannot fill the memory.
        if part.more and len(self._text) <= MESSAGE_BYTES:
            return None
        text, self._text = bytes(self._text), bytearray()
        if len(text) > MESSAGE_BYTES:
            raise ProtocolError(f"a message of {len(text)} bytes between units, at most {MESSAGE_BYTES}")
        try:
            words = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a message between units is not JSON: {error}") from None
        if not isinstance(words, dict):
            raise ProtocolError("a message between units is not a JSON object")
        return words


def shortened(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with long texts cut to their ends."""
    return {key: value[-_TEXT:] if isinstance(value, str) else value for key, value in values.items()}
