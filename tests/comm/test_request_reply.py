"""The common ground of stores and sessions: one listener, one handshake, one framing.

What is refused here reaches no service: its handler is never called, or hears of the end of its connection.
"""

import os
import socket
import threading
from contextlib import closing, suppress
from queue import Queue

import pytest

from topotrain.comm.request_reply import CLIENT, SERVER, RequestChannel, RequestServer, connect, service_identity
from topotrain.comm.security.handshake import dial
from topotrain.comm.transport import ConnectionLost, Refused
from topotrain.comm.transport.frame import BODY, CONTROL, Header
from topotrain.core.message_limits import MAX_BODY, MAX_META

SECRET = bytes(range(32))
WAIT = 20.0


class Echo:
    """A service that sends every frame back; `ends` has the reason of each connection's end."""

    def __init__(self):
        self.served, self.ends = Queue(), Queue()

    def serve_client(self, channel):
        self.served.put(True)
        try:
            while (frame := channel.receive(None, WAIT, 1000)) is not None:
                channel.send(WAIT, frame.kind, frame.meta, bytes(frame.payload))
            self.ends.put("")
        except ConnectionLost as error:
            self.ends.put(str(error))


@pytest.fixture(params=["store", "session"])
def served(request):
    echo = Echo()
    server = RequestServer(request.param, "127.0.0.1", 0, SECRET, echo.serve_client, 3)
    server.start()
    yield request.param, server.port, echo
    server.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(f"{request.param} 127")]


def proven(service, port):
    sock = socket.create_connection(("127.0.0.1", port), WAIT)
    dial(sock, service_identity(service, SECRET), CLIENT, SERVER)
    sock.settimeout(WAIT)
    return sock


def closed(sock):
    with closing(sock):
        sock.settimeout(WAIT)
        try:
            return sock.recv(1000) == b""
        except ConnectionResetError:
            return True


def test_frames_go_there_and_back(served):
    service, port, echo = served
    channel = connect("127.0.0.1", port, service_identity(service, SECRET))
    for frame in ((1, b"", b""), (2, b"m" * MAX_META, b""), (65535, b"x", os.urandom(1000))):
        channel.send(WAIT, *frame)
        came = channel.receive(WAIT, WAIT)
        assert (came.kind, came.meta, bytes(came.payload)) == frame
    channel.close()
    assert echo.ends.get(timeout=WAIT) == ""


@pytest.mark.parametrize("raw", [b"", b"GET / HTTP/1.1\r\n\r\n" * 40, Header(0, 1, 0, 0, 0, 1).pack(), os.urandom(600)])
def test_a_stranger_reaches_no_service(served, raw):
    _, port, echo = served
    stranger = socket.create_connection(("127.0.0.1", port), WAIT)
    stranger.sendall(raw)
    with suppress(OSError):  # it was hung up on already
        stranger.shutdown(socket.SHUT_WR)
    assert closed(stranger)
    assert echo.served.empty()


OTHER = {"store": "session", "session": "store"}


@pytest.mark.parametrize("wrong", ["service", "secret"])
def test_the_key_of_another_service_or_secret_is_refused(served, wrong):
    service, port, echo = served
    proof = service_identity(OTHER[service], SECRET) if wrong == "service" else service_identity(service, bytes(32))
    with pytest.raises(Refused, match=r"AUTH|JOB"):
        connect("127.0.0.1", port, proof)
    assert echo.served.empty()


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"\0" * 50, "not a frame"),
        (Header(0, 1, 0, 0, 0, 1).pack()[:-1] + b"\0\0", "checksum"),
        (Header(0, 1, MAX_META + 1, 0, 0, 1).pack(), "limits"),
        (Header(BODY, 1, 0, MAX_BODY + 1, 0, 1).pack(), "limits"),
        (Header(BODY, 1, 0, 1001, 0, 1).pack(), "at most 1000"),
        (Header(0, 1, 0, 0, 0, 2).pack(), "number 2 where 1"),
        (Header(0, 1, 0, 0, 0, 1).pack() * 2, "number 1 where 2"),
        (Header(CONTROL, 1, 0, 0, 0, 1).pack(), "flags"),
        (Header(2, 1, 0, 0, 0, 1).pack(), "flags"),
    ],
)
def test_a_frame_that_is_none_ends_its_connection_alone(served, raw, reason):
    service, port, echo = served
    other = connect("127.0.0.1", port, service_identity(service, SECRET))
    client = proven(service, port)
    client.sendall(raw)
    assert reason in echo.ends.get(timeout=WAIT)
    client.close()
    other.send(WAIT, 1)
    assert other.receive(WAIT, WAIT).kind == 1
    other.close()


def test_one_connection_too_many_is_refused_and_may_come_later(served):
    service, port, echo = served
    channels = [connect("127.0.0.1", port, service_identity(service, SECRET)) for _ in range(3)]
    with pytest.raises(Refused, match="FULL"):
        connect("127.0.0.1", port, service_identity(service, SECRET))
    channels.pop().close()
    assert echo.ends.get(timeout=WAIT) == ""
    until = threading.Event()
    while True:  # its thread may be ending still
        try:
            channels.append(connect("127.0.0.1", port, service_identity(service, SECRET)))
            break
        except Refused:
            until.wait(0.01)
    for channel in channels:
        channel.close()


def test_a_frame_that_is_too_large_is_not_sent():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for meta, payload in ((b"m" * (MAX_META + 1), b""), (b"", memoryview(bytearray(MAX_BODY + 1)))):
            with pytest.raises(ValueError, match="at most"):
                RequestChannel(ours).send(WAIT, 1, meta, payload)
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)


def test_an_announced_size_allocates_nothing():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(Header(BODY, 1, 0, MAX_BODY, 0, 1).pack() + b"few")
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionLost, match="in the middle"):
            RequestChannel(ours).receive(WAIT, WAIT)
