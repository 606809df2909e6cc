"""The entries of a recording, and their bytes.

A server is a function of its messages in their order. So its recording is that order, without the messages that have
none (`ordered_messages`). A worker's choices between two rounds depend on time, too, and are recorded beside it.

The bytes of a server, with all numbers as unsigned LEB128:

| first | then | meaning |
|---|---|---|
| 0 | role, group, index, kind | this sender and kind of message get the next symbol. Kind 0: the end of a process |
| 1 | group × 4 + skipped × 2 + advanced | a step of a worker group is over. Advanced: it made a new version |
| 2 | group, zigzag(version now − shown) | a worker group was shown a version after a request |
| 3 | kind, length, bytes | a message of the server's own process, such as a timer's |
| 4 | 8 bytes | the digest of the model |
| 8 + s | for a commit 2 bytes: checks | a message of symbol s |

The bytes of a worker: own step × 4 + what (0 push, 1 take, 2 fragment, 3 copy of the optimizer's state for another
group), where a fragment is followed by its number.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Commit

LOST = 0
"""Arrival.kind: the process of a worker is gone."""
CHECKS = 2
"""Bytes of `Arrival.checks` of a commit: of the message, and of the gradient."""
_SYMBOL, _UPDATE, _SHOWN, _OWN, _MODEL, _FIRST = 0, 1, 2, 3, 4, 8
_DIGEST = 8
_ROLES = tuple(Role)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message that a server handles. checks: of a commit, `CHECKS` bytes."""

    sender: Address
    kind: int
    checks: bytes = b""


@dataclass(frozen=True, slots=True)
class OwnMessage:
    """A message that a server gets from its own process, such as that of a timer.

    meta: as `codec.encode` makes it.
    """

    kind: int
    meta: bytes


@dataclass(frozen=True, slots=True)
class StepMade:
    """A step of a worker group is over.

    version: of the values then. skipped: they have not changed.
    """

    group: int
    version: int
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class VersionShown:
    """The workers of a group have asked for values, and get those of this version."""

    group: int
    version: int


@dataclass(frozen=True, slots=True)
class ModelKnown:
    """The workers have described a model with this digest."""

    digest: bytes


Note = StepMade | VersionShown
"""A fact that follows from the messages before it."""
Entry = Arrival | OwnMessage | Note | ModelKnown


def varint(number: int) -> bytes:
    """Return a number from 0 as unsigned LEB128."""
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)


class EntryEncoder:
    """Encodes the entries of one server, in their order."""

    def __init__(self) -> None:
        self._symbols: dict[tuple[Address, int], int] = {}
        self._version = 0

    def encode(self, entry: Entry) -> bytes:
        """Return the bytes of the next entry."""
        match entry:
            case Arrival(sender, kind, checks):
                return self._arrival(sender, kind) + checks
            case OwnMessage(kind, meta):
                return varint(_OWN) + varint(kind) + varint(len(meta)) + meta
            case StepMade(group, version, skipped):
                advanced, self._version = version - self._version, version
                return varint(_UPDATE) + varint(group << 2 | skipped << 1 | advanced)
            case VersionShown(group, version):
                behind = self._version - version
                return varint(_SHOWN) + varint(group) + varint(behind << 1 if behind >= 0 else -behind << 1 | 1)
            case ModelKnown(digest):
                return varint(_MODEL) + digest

    def _arrival(self, sender: Address, kind: int) -> bytes:
        known = self._symbols.get((sender, kind))
        if known is not None:
            return varint(_FIRST + known)
        number = self._symbols[sender, kind] = len(self._symbols)
        place = (_ROLES.index(sender.role), sender.group, sender.index, kind)
        return varint(_SYMBOL) + b"".join(map(varint, place)) + varint(_FIRST + number)


class ByteReader:
    """Reads numbers and bytes. Raises EOFError where too few are left."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def over(self) -> bool:
        """Whether nothing is left."""
        return self._at >= len(self._data)

    def number(self) -> int:
        """Return the next number. Raises ValueError for one that no recording has."""
        found = shift = 0
        while True:
            (byte,) = self.take(1)
            found |= (byte & 0x7F) << shift
            if byte < 0x80:
                return found
            shift += 7
            if shift > 63:
                raise ValueError("a number with too many bytes")

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        found = self._data[self._at : self._at + count]
        if len(found) < count:
            raise EOFError
        self._at += count
        return found


def decode_entries(data: bytes) -> Iterator[Entry]:
    """Yield the entries of one server.

    The last one may be cut off, where a process was killed while it was written: it is left out.

    Raises:
        ValueError: these are no entries.
    """
    # Of a symbol without checks all entries are one object: a recording may have millions.
    reader, symbols, version = ByteReader(data), list[Arrival](), 0
    try:
        while not reader.over:
            first = reader.number()
            if first == _SYMBOL:
                role, group, index, kind = (reader.number() for _ in range(4))
                if role >= len(_ROLES):
                    raise ValueError(f"role {role}")
                symbols.append(Arrival(Address(_ROLES[role], group, index), kind))
            elif first == _UPDATE:
                number = reader.number()
                version += number & 1
                yield StepMade(number >> 2, version, bool(number & 2))
            elif first == _SHOWN:
                group, behind = reader.number(), reader.number()
                yield VersionShown(group, version - (-(behind >> 1) if behind & 1 else behind >> 1))
            elif first == _OWN:
                kind = reader.number()
                yield OwnMessage(kind, reader.take(reader.number()))
            elif first == _MODEL:
                yield ModelKnown(reader.take(_DIGEST))
            elif not _FIRST <= first < _FIRST + len(symbols):
                raise ValueError(f"symbol {first}")
            else:
                known = symbols[first - _FIRST]
                yield replace(known, checks=reader.take(CHECKS)) if known.kind == Commit.KIND else known
    except EOFError:
        return
