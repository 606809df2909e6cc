"""The header of a frame, and the few numbers that both ends must agree on.

    magic 4 | version 1 | flags 1 | type 2 | meta length 4 | payload length 4 | generation 8 | number 8 | CRC-32 4

A header is read whole or refused. The lengths in it are checked before they are used.
"""

import struct
import zlib
from typing import NamedTuple

from topotrain.core.message_limits import MAX_BODY, MAX_META, ProtocolError

MAGIC = b"ttFR"
VERSION = 1
BODY, REFERENCE, CONTROL = 1, 2, 4  # flags: payload follows; payload is a reference; frame is for the connection itself
BYE, REGION, BEAT = 1, 2, 3  # types of control frames

_HEADER = struct.Struct("<4sBBHIIQQ")
_CRC = struct.Struct("<I")
REFERENCE_AT = struct.Struct("<QQQ")  # region, offset in it, bytes; the header's payload is 0: nothing else travels
REGION_IS = struct.Struct("<QQ")  # region, bytes; the frame's first byte carries the file descriptor
HEADER_BYTES = _HEADER.size + _CRC.size
_FLAGS = (0, BODY, REFERENCE, CONTROL)


class Header(NamedTuple):
    """The fixed part of a frame. Lengths are in bytes.

    `number` counts the frames of one direction from 1.
    """

    flags: int
    kind: int
    meta: int
    payload: int
    generation: int
    number: int

    def pack(self) -> bytes:
        """Return the bytes of the header, checksum included."""
        raw = _HEADER.pack(MAGIC, VERSION, *self)
        return raw + _CRC.pack(zlib.crc32(raw))

    @classmethod
    def unpack(cls, raw: bytes) -> "Header":
        """Read a header. Raises ProtocolError for bytes that `pack` does not write."""
        magic, version, *numbers = _HEADER.unpack_from(raw)
        if magic != MAGIC:
            raise ProtocolError("these bytes are not a frame")
        if _CRC.unpack_from(raw, _HEADER.size)[0] != zlib.crc32(raw[: _HEADER.size]):
            raise ProtocolError("the checksum of a frame header is wrong")
        # After the checksum: a damaged byte must not be reported as another version.
        if version != VERSION:
            raise ProtocolError(f"frame version {version}, this is version {VERSION}")
        header = cls(*numbers)
        if header.flags not in _FLAGS:
            raise ProtocolError(f"unknown frame flags {header.flags:#x}")
        if header.meta > MAX_META or header.payload > MAX_BODY:
            raise ProtocolError(f"a frame of {header.meta} + {header.payload} bytes, limits {MAX_META} and {MAX_BODY}")
        # The reader would take the bytes of this payload for the next header.
        if header.payload and header.flags != BODY:
            raise ProtocolError("a payload that no flag announces")
        return header
