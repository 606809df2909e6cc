"""The requests and replies of a tcp:// store, as frames (see `request_reply`).

The fields of a request are in the meta of its frame, and values in its payload. Each length is checked before a byte
after the header of the frame is read.
"""

import secrets
import struct
from dataclasses import dataclass, field
from enum import IntEnum

from topotrain.comm.request_reply import RequestChannel
from topotrain.comm.store.key_validation import MAX_KEY, MAX_TTL, MAX_VALUE
from topotrain.comm.transport import ConnectionLost

SERVICE = "store"
MAX_WAIT = 366 * 86_400.0  # seconds
FRAME_SECONDS = 30.0
"""For one frame, in or out; a side that stops in the middle of one loses its connection."""
ONCE_BYTES = 16

_FIELDS = struct.Struct("<B16sQdI")  # flags, once, milliseconds of lifetime, seconds of a watch, bytes of `known`


class Op(IntEnum):
    """The operations of a store: the kinds of its requests."""

    GET = 1
    SET = 2
    COMPARE_AND_SET = 3
    DELETE = 4
    KEYS = 5
    WATCH = 6


class Status(IntEnum):
    """The outcome of a request: the kinds of replies."""

    YES = 1  # a value, or done
    NO = 2  # no value, or not the expected one
    TIMEOUT = 3  # of a watch
    REFUSED = 4  # an error


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """One request."""

    op: Op
    key: str
    value: bytes = b""
    known: bytes | None = None  # the expected value of COMPARE_AND_SET, the known one of WATCH
    life: int = 0  # milliseconds; 0: for ever
    seconds: float = 0.0  # how long WATCH may take
    # The same number in every repetition of one request, so that it is carried out once.
    once: bytes = field(default_factory=lambda: secrets.token_bytes(ONCE_BYTES))


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply."""

    status: Status
    body: bytes = b""  # the value, the keys joined by newlines, or the text of a refusal


def send_request(channel: RequestChannel, request: StoreRequest, seconds: float = FRAME_SECONDS) -> None:
    """Send a request. Raises ConnectionLost."""
    known = request.known or b""
    fields = _FIELDS.pack(request.known is not None, request.once, request.life, request.seconds, len(known))
    channel.send(seconds, request.op, fields + request.key.encode(), known + request.value)


def receive_request(channel: RequestChannel, seconds: float = FRAME_SECONDS) -> StoreRequest | None:
    """Return the next request, or None when the client has closed.

    seconds: for all but its first byte.

    Raises:
        ConnectionLost: the connection has broken, or these bytes are no request.
    """
    # Both values of a compare-and-set.
    frame = channel.receive(None, seconds, 2 * MAX_VALUE)
    if frame is None:
        return None
    if frame.kind not in tuple(Op) or not _FIELDS.size <= len(frame.meta) <= _FIELDS.size + MAX_KEY:
        raise ConnectionLost("not a request")
    flags, once, life, wait, known_size = _FIELDS.unpack_from(frame.meta)
    value_size = len(frame.payload) - known_size
    if flags > 1 or known_size > MAX_VALUE or not 0 <= value_size <= MAX_VALUE:
        raise ConnectionLost("a request with a value of an invalid size")
    if life > MAX_TTL * 1000 or not 0 <= wait <= MAX_WAIT:
        raise ConnectionLost("a request with an invalid time")
    key = frame.meta[_FIELDS.size :].decode("ascii", "replace")
    known, value = bytes(frame.payload[:known_size]), bytes(frame.payload[known_size:])
    return StoreRequest(Op(frame.kind), key, value, known if flags else None, life, wait, once)


def send_reply(channel: RequestChannel, reply: Reply) -> None:
    """Send a reply. Raises ConnectionLost."""
    channel.send(FRAME_SECONDS, reply.status, payload=reply.body)


def receive_reply(channel: RequestChannel, seconds: float) -> Reply:
    """Return the next reply. Raises ConnectionLost, also after so many seconds."""
    frame = channel.receive(seconds, seconds)
    if frame is None:
        raise ConnectionLost("the store closed the connection")
    if frame.kind not in tuple(Status) or frame.meta:
        raise ConnectionLost("not a reply")
    return Reply(Status(frame.kind), bytes(frame.payload))
