"""The byte format of requests and replies between a tcp:// store and its clients.

Every frame begins with a header of fixed size, which holds every length. Each length is checked before a byte after the
header is read.
"""

import secrets
import struct
from dataclasses import dataclass, field
from enum import IntEnum

from topotrain.comm.store.key_validation import MAX_KEY, MAX_TTL, MAX_VALUE
from topotrain.comm.transport.multi_socket import HandshakeSocket

MAX_REPLY = 64 << 20  # bytes: the keys of a big store
MAX_WAIT = 366 * 86_400.0  # seconds
ONCE_BYTES = 16

_REQUEST = struct.Struct("<2sBB16sQdHII")
_REPLY = struct.Struct("<2sBI")
_MAGIC = b"tS"


class MalformedFrame(Exception):
    """A frame that breaks the protocol, or ends in the middle."""


class Op(IntEnum):
    """The operations of a store."""

    GET = 1
    SET = 2
    COMPARE_AND_SET = 3
    DELETE = 4
    KEYS = 5
    WATCH = 6


class Status(IntEnum):
    """The outcome of a request.

    YES: a value, or done. NO: no value, or not the expected one. TIMEOUT: of a watch. REFUSED: an error.
    """

    YES = 1
    NO = 2
    TIMEOUT = 3
    REFUSED = 4


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """One request.

    known: the expected value of COMPARE_AND_SET, the known one of WATCH. life: milliseconds, 0 for ever. seconds: how
    long WATCH may take. once: the same number in every repetition of one request, so that it is carried out once.
    """

    op: Op
    key: str
    value: bytes = b""
    known: bytes | None = None
    life: int = 0
    seconds: float = 0.0
    once: bytes = field(default_factory=lambda: secrets.token_bytes(ONCE_BYTES))


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply.

    body: the value, the keys joined by newlines, or the text of a refusal.
    """

    status: Status
    body: bytes = b""


def send_request(sock: HandshakeSocket, request: StoreRequest) -> None:
    """Send a request. Raises OSError."""
    known, key = request.known, request.key.encode()
    sizes = (len(key), len(known or b""), len(request.value))
    flags, life = int(known is not None), request.life
    head = _REQUEST.pack(_MAGIC, request.op, flags, request.once, life, request.seconds, *sizes)
    sock.sendall(b"".join((head, key, known or b"", request.value)))


def receive_request(sock: HandshakeSocket, seconds: float) -> StoreRequest | None:
    """Return the next request, or None when the client has closed.

    seconds: for all but its first byte.

    Raises:
        OSError, MalformedFrame.
    """
    sock.settimeout(None)
    first = sock.recv(1)
    if not first:
        return None
    sock.settimeout(seconds)
    head = _REQUEST.unpack(first + _exactly(sock, _REQUEST.size - 1))
    magic, op, flags, once, life, wait, key_size, known_size, value_size = head
    if magic != _MAGIC or op not in tuple(Op) or flags > 1:
        raise MalformedFrame("not a request")
    if key_size > MAX_KEY or known_size > MAX_VALUE or value_size > MAX_VALUE:
        raise MalformedFrame("a request that is too big")
    if life > MAX_TTL * 1000 or not 0 <= wait <= MAX_WAIT:
        raise MalformedFrame("a request with an invalid time")
    key = _exactly(sock, key_size).decode("ascii", "replace")
    known, value = _exactly(sock, known_size), _exactly(sock, value_size)
    return StoreRequest(Op(op), key, value, known if flags else None, life, wait, once)


def send_reply(sock: HandshakeSocket, reply: Reply) -> None:
    """Send a reply. Raises OSError."""
    sock.sendall(_REPLY.pack(_MAGIC, reply.status, len(reply.body)) + reply.body)


def receive_reply(sock: HandshakeSocket) -> Reply:
    """Return the next reply.

    Raises OSError (also when the socket's own timeout is over), MalformedFrame.
    """
    magic, status, size = _REPLY.unpack(_exactly(sock, _REPLY.size))
    if magic != _MAGIC or status not in tuple(Status) or size > MAX_REPLY:
        raise MalformedFrame("not a reply")
    return Reply(Status(status), _exactly(sock, size))


def _exactly(sock: HandshakeSocket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise MalformedFrame("the other side closed the connection")
        parts += part
    return bytes(parts)
