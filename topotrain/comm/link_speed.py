"""The speed of a link, measured by sending bytes over it.

The sizes of slices follow it (`config.slice_size`): on a fast link large ones need fewer calls, and on a slow one
small ones let answers begin earlier.
"""

import socket
import threading
import time
from contextlib import suppress

from topotrain.comm.request_reply import RequestChannel
from topotrain.comm.transport import ConnectionLost
from topotrain.comm.transport.tcp_socket import prepare

SENT_BYTES = 8 << 20
"""Most bytes of one round. They take 2 ms on a loopback, and 70 ms at 1 Gbit/s."""
LIMIT_S = 0.3
_FIRST_BYTES, _GROWTH = 1 << 14, 4
_FRAME_BYTES = 1 << 18
_MORE, _LAST = 1, 2  # kinds of frames: the last one of a round is answered
_IDLE_S = 10.0


def send_for_measurement(channel: RequestChannel, nbytes: int = SENT_BYTES, limit_s: float = LIMIT_S) -> float:
    """Send bytes in rounds; return the Mbit/s at which the peer has received them.

    Each round has more bytes than the one before, and the last one counts. A round begins only if the time is enough
    for it at the speed of the one before. The peer runs `receive_for_measurement`.

    Raises:
        ConnectionLost: the connection has ended, or the peer has not answered at all within the time.
    """
    began = time.monotonic()
    until = began + limit_s
    trip, size, speed = _round(channel, 0, until), min(_FIRST_BYTES, nbytes), 0.0
    try:
        while True:
            took = _round(channel, size, until)
            # On a long way most of a short round is the way of the answer.
            speed = size * 8e-6 / max(took - trip, took / 2)
            more = min(size * _GROWTH, nbytes)
            if size >= nbytes or took * more / size > until - time.monotonic():
                return speed
            size = more
    except ConnectionLost:
        spent = time.monotonic() - began
        if spent < limit_s:
            raise
        # Not even this has come within the time, so the link is no faster.
        return speed or size * 8e-6 / spent


def _round(channel: RequestChannel, size: int, until: float) -> float:
    """Send bytes and wait for the answer; return the seconds of both.

    Raises ConnectionLost.
    """
    began, left, zeros = time.monotonic(), size, memoryview(bytes(min(size, _FRAME_BYTES)))
    while left > _FRAME_BYTES:
        channel.send(_seconds_to(until), _MORE, payload=zeros)
        left -= _FRAME_BYTES
    channel.send(_seconds_to(until), _LAST, payload=zeros[:left])
    # What the kernel has buffered has not crossed the link yet.
    if channel.receive(_seconds_to(until), _seconds_to(until), most=0) is None:
        raise ConnectionLost("the peer has closed the connection")
    return time.monotonic() - began


def _seconds_to(until: float) -> float:
    return max(1e-3, until - time.monotonic())  # 0 would not wait at all, and not be a timeout


def receive_for_measurement(channel: RequestChannel) -> None:
    """Receive and answer all rounds of a peer. Raises ConnectionLost."""
    while (frame := channel.receive(_IDLE_S, _IDLE_S, most=_FRAME_BYTES)) is not None:
        if frame.kind == _LAST:
            channel.send(_IDLE_S, _LAST)


def loopback_mbit() -> float:
    """Return the Mbit/s of TCP connections inside this host; 0: not measured."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as sender:
            sender.connect(listener.getsockname())
            receiver, _ = listener.accept()
            # As for connections of a job: the system's congestion control may be slow on loopback.
            prepare(sender)
            with receiver:
                thread = threading.Thread(target=_receive, args=(RequestChannel(receiver),), daemon=True)
                thread.start()
                speed = send_for_measurement(RequestChannel(sender))
                sender.shutdown(socket.SHUT_WR)
                thread.join()
                return speed
    except (OSError, ConnectionLost):
        return 0.0


def _receive(channel: RequestChannel) -> None:
    # The sender sees the end of the connection, too.
    with suppress(ConnectionLost):
        receive_for_measurement(channel)
