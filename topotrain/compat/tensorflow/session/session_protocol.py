"""Messages between a session's processes: JSON with tensors behind it.

* A header of fixed size has every length, and a length is checked before a byte behind it is read.
* Memory is allocated for bytes that have come, not for bytes that were announced.
* The handshake is that of the stores (`tcp_store_handshake`), with a key of its own.
* Connections to other machines use TLS.
"""

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from topotrain.comm.security.handshake import DEADLINE, Identity
from topotrain.comm.security.secret import job_key
from topotrain.comm.store.tcp_store_handshake import go_in, resolve
from topotrain.comm.transport.multi_socket import HandshakeSocket
from topotrain.config.field_checks import ConfigError
from topotrain.core.model.schema import torch_dtype
from topotrain.parallel.remote.argument_codec import read_json
from topotrain.parallel.remote.graph_description import TensorForm

MAX_WORDS = 64 << 20
"""Bytes of the JSON of one frame."""
MAX_BODY = 1 << 36
"""Bytes of the tensors of one frame."""
FRAME_S = 120.0
"""Seconds without any progress in the middle of a frame, after which the other side counts as gone."""
_MAX_TENSORS = 200_000
_PIECE = 1 << 20
_HEAD = struct.Struct("<4sIQ")
_MAGIC = b"ttSe"


class SessionClosed(Exception):
    """The other side has closed the connection, or does not keep to the protocol."""


def identity(secret: bytes) -> Identity:
    """Return the identity that both sides of a session prove."""
    return Identity("topotrain session", job_key(secret, "session"), 0, 0, "")


class SessionConnection:
    """One side of a session's connection. One thread at a time uses it."""

    def __init__(self, line: HandshakeSocket) -> None:
        self._line = line

    def say(self, words: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a message with tensors on the CPU. Raises SessionClosed."""
        flat = [tensor.detach().contiguous().resolve_conj().resolve_neg() for tensor in tensors]
        text = json.dumps({"words": words, "tensors": [TensorForm.of(tensor).to_data() for tensor in flat]}).encode()
        if len(text) > MAX_WORDS:
            raise ConfigError("session", f"{len(text):,} bytes", f"a description may have {MAX_WORDS:,}")
        body = sum(tensor.nbytes for tensor in flat)
        try:
            self._line.settimeout(FRAME_S)
            self._line.sendall(_HEAD.pack(_MAGIC, len(text), body) + text)
            for tensor in flat:
                if tensor.nbytes:
                    self._line.sendall(tensor.view(-1).view(torch.uint8).numpy().data)
        except OSError as error:
            raise SessionClosed(str(error)) from error

    def hear(self, seconds: float | None = None) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Return the next message and its tensors. Raises SessionClosed.

        seconds: in which the message must begin; None: any time.
        """
        try:
            self._line.settimeout(seconds)
            first = self._line.recv(1)
            if not first:
                raise SessionClosed("it has closed the connection")
            self._line.settimeout(FRAME_S)
            magic, size, body = _HEAD.unpack(first + self._exactly(_HEAD.size - 1))
            if magic != _MAGIC or size > MAX_WORDS or body > MAX_BODY:
                raise SessionClosed("it does not keep to the protocol of sessions")
            words, forms = _opened(read_json(bytes(self._exactly(size))))
            if sum(form.nbytes for form in forms) != body:
                raise SessionClosed("its tensors have other sizes than its header gives")
            return words, [self._tensor(form) for form in forms]
        except (OSError, ConfigError) as error:
            raise SessionClosed(str(error)) from error

    def close(self) -> None:
        """Close the connection, which wakes a thread that waits for a message."""
        with suppress(OSError):  # it may be down already
            self._line.shutdown(socket.SHUT_RDWR)
        self._line.close()

    def _tensor(self, form: TensorForm) -> torch.Tensor:
        dtype = torch_dtype(form.dtype)
        if not form.nbytes:
            return torch.empty(form.sizes, dtype=dtype)
        return torch.frombuffer(self._exactly(form.nbytes), dtype=dtype).view(form.sizes)

    def _exactly(self, size: int) -> bytearray:
        # Grows with the bytes that come, so an announced size allocates nothing.
        came = bytearray()
        while len(came) < size:
            part = self._line.recv(min(size - len(came), _PIECE))
            if not part:
                raise SessionClosed("it has closed the connection")
            came += part
        return came


def _opened(data: Any) -> tuple[dict[str, Any], list[TensorForm]]:
    if not isinstance(data, dict) or data.keys() != {"words", "tensors"} or not isinstance(data["words"], dict):
        raise SessionClosed("it does not keep to the protocol of sessions")
    tensors = data["tensors"]
    if not isinstance(tensors, list) or len(tensors) > _MAX_TENSORS:
        raise SessionClosed("it announces too many tensors")
    return data["words"], [TensorForm.from_data(tensor) for tensor in tensors]


def call(host: str, port: int, secret: bytes) -> SessionConnection:
    """Open a connection to a task.

    Raises OSError where no process answers, TransportError where it refuses this one.
    """
    _, address = resolve(host, port)
    sock = socket.create_connection((address, port), timeout=DEADLINE)
    try:
        return SessionConnection(go_in(sock, identity(secret)))
    except BaseException:
        sock.close()
        raise
