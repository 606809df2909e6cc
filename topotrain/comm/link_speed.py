"""The speed of a link, measured by sending bytes over it.

The sizes of slices follow it (`config.slice_size`): on a fast link large ones need fewer calls, and on a slow one
small ones let answers begin earlier.
"""

import socket
import threading
import time

from topotrain.comm.transport.tcp_socket import prepare

SENT_BYTES = 8 << 20
"""Bytes of one measurement. It takes 2 ms on a loopback, and a second at 64 Mbit/s."""
_PIECE = 1 << 20
_LIMIT_S = 1.0


def send_for_measurement(sock: socket.socket, nbytes: int = SENT_BYTES, limit_s: float = _LIMIT_S) -> float:
    """Send bytes; return the Mbit/s that the peer has received.

    This ends when the bytes are sent or the time is over.
    The peer answers with one byte when the sending end has been shut down, see `receive_for_measurement`.

    Raises:
        OSError: the connection has ended.
    """
    piece, sent = memoryview(bytes(_PIECE)), 0
    began = time.monotonic()
    while sent < nbytes and time.monotonic() - began < limit_s:
        # Whole pieces are not awaited: on a slow link one of them takes longer than the limit.
        sent += sock.send(piece[: min(_PIECE, nbytes - sent)])
    sock.shutdown(socket.SHUT_WR)
    # What the kernel has buffered has not crossed the link yet.
    sock.recv(1)
    return sent * 8e-6 / (time.monotonic() - began)


def receive_for_measurement(sock: socket.socket) -> None:
    """Receive until the peer has sent everything, and confirm it. Raises OSError."""
    target = bytearray(_PIECE)
    while sock.recv_into(target):
        pass
    sock.send(b"!")


def loopback_mbit() -> float:
    """Return the Mbit/s of TCP connections inside this host; 0: not measured."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as sender:
            sender.connect(listener.getsockname())
            receiver, _ = listener.accept()
            # As for connections of a job: the system's congestion control may be slow on loopback.
            prepare(sender)
            with receiver:
                thread = threading.Thread(target=_receive, args=(receiver,), daemon=True)
                thread.start()
                speed = send_for_measurement(sender)
                thread.join()
                return speed
    except OSError:
        return 0.0


def _receive(sock: socket.socket) -> None:
    try:
        receive_for_measurement(sock)
    except OSError:
        # The sender sees the end of the connection, too.
        return
