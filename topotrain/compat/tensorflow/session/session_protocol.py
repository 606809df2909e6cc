"""Messages between a session's processes: JSON with tensors behind it.

They travel in frames (see `request_reply`). A message is one frame with the JSON, which gives the form of each tensor,
and frames with the tensors' bytes.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from topotrain.comm.request_reply import Frame, RequestChannel, connect, service_identity
from topotrain.comm.transport import TransportError
from topotrain.comm.transport.socket_transport import retried
from topotrain.config.field_checks import ConfigError
from topotrain.core.message_limits import MAX_BODY
from topotrain.core.model.schema import torch_dtype
from topotrain.parallel.remote.argument_codec import read_json
from topotrain.parallel.remote.graph_description import TensorForm

SERVICE = "session"
MAX_TENSOR_BYTES = 1 << 36
"""Bytes of the tensors of one message."""
FRAME_S = 120.0
"""Seconds without any progress in the middle of a message, after which the other side counts as gone."""
CALL_S = 10.0
"""Seconds for which a task is called again that refuses a connection for a reason that passes."""
# Bounds what a peer may announce before its tensors come.
_MAX_TENSORS = 200_000
_MAX_TEXT, _MAX_ITEMS = 16 << 20, 1 << 20
"""Bytes of a text, and items in it: an item of two bytes takes up to a hundred in memory."""
_MAX_FIRST = 1 << 12
"""Bytes of the first message of a connection, which has no tensors."""
# Kinds of frames.
_TEXT, _TENSOR = 1, 2


class SessionClosed(TransportError):
    """The other side has closed the connection, or does not keep to the protocol."""


class SessionConnection:
    """One side of a session's connection. One thread at a time uses it."""

    def __init__(self, channel: RequestChannel) -> None:
        self._channel = channel

    def send(self, fields: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a message with tensors on the CPU. Raises SessionClosed."""
        # A lazy conjugate or negative view has other bytes in memory than its values.
        flat = [tensor.detach().contiguous().resolve_conj().resolve_neg() for tensor in tensors]
        forms = [TensorForm.of(tensor).to_data() for tensor in flat]
        text = json.dumps({"words": fields, "tensors": forms}).encode()
        if len(text) > _MAX_TEXT or _items(text) > _MAX_ITEMS:
            accepted = f"a description may have {_MAX_TEXT:,}, and {_MAX_ITEMS:,} numbers and names"
            raise ConfigError("session", f"{len(text):,} bytes", accepted)
        try:
            self._channel.send(FRAME_S, _TEXT, payload=text)
            for tensor in flat:
                # A view of the tensor's memory, so nothing is copied.
                raw = tensor.view(-1).view(torch.uint8).numpy().data if tensor.nbytes else memoryview(b"")
                for at in range(0, len(raw), MAX_BODY):
                    self._channel.send(FRAME_S, _TENSOR, payload=raw[at : at + MAX_BODY])
        except TransportError as error:
            raise SessionClosed(str(error)) from error

    def receive(
        self, seconds: float | None = None, most: int = _MAX_TEXT, tensors: int = _MAX_TENSORS
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Return the next message and its tensors. Raises SessionClosed.

        seconds: in which the message must begin; None: any time. most: bytes of its text. tensors: at most so many.
        """
        try:
            text = bytes(self._frame(_TEXT, seconds, most).payload)
            if _items(text) > _MAX_ITEMS:
                raise SessionClosed("its message has too many items")
            fields, forms = _opened(read_json(text), tensors)
            return fields, [self._tensor(form) for form in forms]
        # ConfigError: the text is no valid description. Such a peer cannot be understood any further.
        except (TransportError, ConfigError) as error:
            raise SessionClosed(str(error)) from error

    def receive_first(self) -> dict[str, Any]:
        """Return the first message of a peer without a session. Raises SessionClosed."""
        # A deadline: a peer that says nothing must not keep a place.
        return self.receive(FRAME_S, _MAX_FIRST, tensors=0)[0]

    def close(self) -> None:
        """Close the connection, which wakes a thread that waits for a message."""
        # `close` alone does not wake a thread that waits in `recv`.
        self._channel.shutdown()
        self._channel.close()

    def _frame(self, kind: int, begin: float | None, most: int = MAX_BODY) -> Frame:
        frame = self._channel.receive(begin, FRAME_S, most)
        if frame is None:
            raise SessionClosed("it has closed the connection")
        if frame.kind != kind or frame.meta:
            raise SessionClosed("it does not keep to the protocol of sessions")
        return frame

    def _tensor(self, form: TensorForm) -> torch.Tensor:
        dtype, came = torch_dtype(form.dtype), bytearray()
        if not form.nbytes:
            return torch.empty(form.sizes, dtype=dtype)
        # Memory grows with the bytes that have come, and not with those that were announced.
        while len(came) < form.nbytes:
            due = min(form.nbytes - len(came), MAX_BODY)
            payload = self._frame(_TENSOR, FRAME_S, due).payload
            if len(payload) != due:
                raise SessionClosed("its tensors have other sizes than it said")
            if came:
                came += payload
            else:
                # A tensor of one frame is not copied.
                came = payload
        return torch.frombuffer(came, dtype=dtype).view(form.sizes)


def _items(text: bytes) -> int:
    """Return at least the number of items in a JSON text."""
    return sum(map(text.count, (b",", b"[", b"{")))


def _opened(data: Any, most: int) -> tuple[dict[str, Any], list[TensorForm]]:
    if not isinstance(data, dict) or data.keys() != {"words", "tensors"} or not isinstance(data["words"], dict):
        raise SessionClosed("it does not keep to the protocol of sessions")
    tensors = data["tensors"]
    if not isinstance(tensors, list) or len(tensors) > most:
        raise SessionClosed("it announces too many tensors")
    forms = [TensorForm.from_data(tensor) for tensor in tensors]
    if sum(form.nbytes for form in forms) > MAX_TENSOR_BYTES:
        raise SessionClosed(f"it announces tensors of more than {MAX_TENSOR_BYTES:,} bytes")
    return data["words"], forms


def call(host: str, port: int, secret: bytes) -> SessionConnection:
    """Open a connection to a task; retry while the reason of a refusal passes.

    Raises OSError where no process answers, TransportError where it refuses this one.
    """
    identity = service_identity(SERVICE, secret)
    return SessionConnection(retried(lambda: connect(host, port, identity), CALL_S, time.sleep))
