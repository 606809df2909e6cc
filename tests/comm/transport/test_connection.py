"""Frames: whatever comes, a connection takes it whole or ends with a reason; it neither crashes nor allocates."""

import os
import socket
import struct
import tracemalloc
import zlib
from array import array
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples
from transport_pairs import SERVER, WORKER, Recorder, place_new, place_view

from topotrain.comm.transport.connection import Connection
from topotrain.comm.transport.frame import (
    BODY,
    BYE,
    CONTROL,
    HEADER_BYTES,
    REFERENCE,
    REFERENCE_AT,
    REGION,
    REGION_IS,
    Header,
)
from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.core.protocol import MAX_BODY, MAX_META, Drained, Fail, Fetch, Message, ProtocolError, Values, encode

FIELDS = len(encode(Values(0, 0, 0))[1])
"""Bytes of the fields of a `Values` message."""


@contextmanager
def server(memory=None, generation=0, placing=place_new):
    """A connection with a raw socket at the other end."""
    a, b = socket.socketpair()
    resident = Recorder(placing)
    connection = Connection(b, SERVER, WORKER, resident, generation, memory)
    connection.start()
    try:
        yield a, resident, connection
    finally:
        a.close()
        assert connection.join(20)
        assert resident.ends.empty() or resident.ends.get()


def frame(message: Message, number: int, flags: int = 0, payload: int = 0, generation: int = 0) -> bytes:
    kind, meta = encode(message)
    return Header(flags, kind, len(meta), payload, generation, number).pack() + meta


def control(kind: int, meta: bytes, number: int) -> bytes:
    return Header(CONTROL, kind, len(meta), 0, 0, number).pack() + meta


def said(sock: socket.socket) -> str:
    """The words with which the other side ended."""
    raw = b""
    while part := sock.recv(4096):
        raw += part
    header = Header.unpack(raw[:HEADER_BYTES])
    assert (header.flags, header.kind) == (CONTROL, BYE)
    return raw[HEADER_BYTES:].decode()


VALUES = Values(round=0, bucket=10, version=0)
PAYLOAD = torch.arange(10.0).numpy().tobytes()


def header_with(**changes: int) -> bytes:
    return Header(**{"flags": 0, "kind": 3, "meta": 8, "payload": 0, "generation": 0, "number": 1} | changes).pack()


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n" + b"\0" * 20, "not a frame"),
        (header_with()[:-1] + b"\0", "checksum"),
        (header_with(flags=8), "unknown frame flags 0x8"),
        (header_with(flags=BODY | REFERENCE), "unknown frame flags 0x3"),
        (header_with(kind=999) + bytes(8), "unknown message type 999"),
        (header_with(meta=MAX_META + 1), "limits 65536 and 67108864"),
        (header_with(flags=BODY, payload=MAX_BODY + 1), "limits 65536 and 67108864"),
        (header_with(payload=1), "a payload that no flag announces"),
        (header_with(number=2) + bytes(8), "frame number 2 where 1 was due"),
        (header_with(meta=9) + bytes(9), "Fetch: 1 bytes too many"),
        (control(77, b"", 1), "unknown control frame 77"),
        (control(REGION, REGION_IS.pack(0, 10), 1), "unknown control frame 2"),
        (frame(VALUES, 1, BODY, 44), "Values has a payload of 44 bytes, the schema says 40"),
        (header_with(flags=REFERENCE, payload=1), "a payload that no flag announces"),
        (frame(VALUES, 1, REFERENCE) + REFERENCE_AT.pack(0, 0, 40), "region 0, out of bounds"),
    ],
)
def test_a_wrong_frame_ends_the_connection_with_its_reason(raw, reason):
    with server() as (sock, resident, connection):
        sock.sendall(raw)
        assert reason in resident.end()
        assert reason in said(sock)
        assert connection.received == 0
        assert resident.got.empty()


def test_a_frame_of_an_older_generation_is_fenced():
    with server(generation=5) as (sock, resident, _):
        sock.sendall(
            frame(Fetch(1), 1, generation=5) + frame(Fetch(2), 2, generation=7) + frame(Fetch(3), 3, generation=4)
        )
        assert [resident.next().round for _ in range(2)] == [1, 2]
        assert resident.end() == "FENCED: a frame of generation 4, we are in 5"
        assert "FENCED" in said(sock)


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_every_changed_byte_of_a_header_is_noticed(position, flip):
    raw = bytearray(header_with())
    raw[position] ^= flip
    with pytest.raises(ProtocolError):
        Header.unpack(bytes(raw))


STREAM = frame(Fetch(7), 1) + frame(VALUES, 2, BODY, 40) + PAYLOAD + frame(Fail("x" * 9000), 3) + frame(Drained(), 4)


@given(st.lists(st.integers(1, 5000), max_size=20))
@settings(max_examples=examples(30))
def test_it_does_not_matter_how_the_stream_is_cut(sizes):
    with server() as (sock, resident, connection):
        rest = STREAM
        for size in sizes:
            sock.sendall(rest[:size])
            rest = rest[size:]
        sock.sendall(rest)
        assert resident.next() == Fetch(7)
        got = resident.next()
        assert got == VALUES
        assert got.body.tolist() == list(range(10))
        assert resident.next() == Fail("x" * 9000)
        assert resident.next() == Drained()
    assert connection.received == len(STREAM)


@given(st.one_of(st.binary(max_size=3000), st.tuples(st.integers(0, len(STREAM) - 1), st.integers(1, 255))))
@settings(max_examples=examples(150))
def test_random_and_damaged_streams_end_the_connection_or_pass(noise):
    raw = noise
    if isinstance(noise, tuple):
        damaged = bytearray(STREAM)
        damaged[noise[0]] ^= noise[1]
        raw = bytes(damaged)
    with server(ProcessMemory(), placing=bounded) as (sock, resident, connection):
        sock.sendall(raw)
        sock.shutdown(socket.SHUT_WR)
        resident.end()
        assert connection.join(20)


class Counting(socket.socket):
    """Counts how often something was received."""

    calls = 0

    def recv_into(self, *args):
        self.calls += 1
        return super().recv_into(*args)


def test_a_payload_is_received_in_one_call_right_where_it_stays():
    """However it comes: the kernel's copy is the only one, and the interpreter is asked for once, not per packet."""
    a, b = socket.socketpair()
    sock = Counting(fileno=b.detach())
    target = torch.zeros(1 << 20)
    resident = Recorder(lambda message, viewable: target)
    connection = Connection(sock, SERVER, WORKER, resident, 0)
    connection.start()
    raw = torch.arange(float(1 << 20)).numpy().tobytes()
    a.sendall(frame(VALUES, 1, BODY, len(raw)))
    for at in range(0, len(raw), 100_000):
        a.sendall(raw[at : at + 100_000])
    assert resident.next().body is target
    assert target.equal(torch.arange(float(1 << 20)))
    assert sock.calls <= 4  # header and what came with it, the payload, and the wait for the next frame
    a.close()
    assert connection.join(20)


def bounded(message: Message, viewable: bool) -> torch.Tensor:
    if not 0 <= getattr(message, "bucket", 0) <= 1000:
        raise ProtocolError("no such bucket")
    return place_new(message, viewable)


def test_no_length_of_a_header_reaches_an_allocator():
    with server() as (sock, resident, _):
        sock.sendall(frame(Fetch(1), 1))
        resident.next()
        tracemalloc.start()
        sock.sendall(frame(VALUES, 2, BODY, MAX_BODY))
        resident.end()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20
    with server() as (sock, resident, _):
        raw = bytearray(header_with())
        raw[8:12] = struct.pack("<I", 2**32 - 1)
        raw[-4:] = struct.pack("<I", zlib.crc32(raw[:-4]))
        sock.sendall(raw)
        assert "limits" in resident.end()


# --- references to shared memory ---------------------------------------------------------------------------------


def region_frame(region, number: int, nbytes: int | None = None) -> tuple[list[bytes], list]:
    raw = control(REGION, REGION_IS.pack(region.id, nbytes or region.nbytes), number)
    return [raw], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [region.fd]))]


@pytest.mark.parametrize(
    ("region", "offset", "size"),
    [
        (0, 0, 1 << 21),
        (0, 0, 2**64 - 1),
        (0, (1 << 20) - 39, 40),
        (0, 1 << 20, 40),
        (0, 2**64 - 1, 40),
        (1, 0, 40),
        (2**64 - 1, 0, 40),
    ],
)
def test_a_reference_out_of_bounds_ends_the_connection(region, offset, size):
    memory = ProcessMemory()
    ours, _ = memory.find(memory.allocate(10, torch.float32))
    assert ours.nbytes == 1 << 20
    with server(ProcessMemory(), placing=place_view) as (sock, resident, _):
        sock.sendmsg(*region_frame(ours, 1))
        sock.sendall(frame(VALUES, 2, REFERENCE) + REFERENCE_AT.pack(region, offset, size))
        assert "out of bounds" in resident.end()
        assert "out of bounds" in said(sock)


def test_regions_that_are_not_what_they_claim():
    memory = ProcessMemory()
    ours, _ = memory.find(memory.allocate(10, torch.float32))
    before = len(os.listdir("/proc/self/fd"))
    for messages, reason in (
        ([region_frame(ours, 1, nbytes=1 << 30)], "is 1048576 bytes"),
        ([([region_frame(ours, 1)[0][0]], [])], "came without its memory"),
        ([region_frame(ours, 1), region_frame(ours, 2)], "named twice"),
        ([([frame(Fetch(i), i)], region_frame(ours, 0)[1]) for i in range(1, 12)], "more file descriptors"),
    ):
        with server(ProcessMemory()) as (sock, resident, _):
            for message in messages:
                try:
                    sock.sendmsg(*message)
                except BrokenPipeError:
                    break
            assert reason in resident.end()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_region_is_sent_once_and_a_reference_is_small():
    memory = ProcessMemory()
    body = memory.allocate(1 << 20, torch.float32)
    a, b = socket.socketpair()
    connection = Connection(b, SERVER, WORKER, Recorder(), 0, memory)
    connection.start()
    connection.send(Values(0, 1 << 20, 0, body=body))
    connection.send(Values(0, 5, 0, body=body[7:12]))
    raw, extra, _, _ = a.recvmsg(4096, 100)
    assert len(extra) == 1
    fd = array("i", extra[0][2])[0]
    assert os.fstat(fd).st_ino == os.fstat(memory.find(body)[0].fd).st_ino
    os.close(fd)
    while len(raw) < 3 * HEADER_BYTES + 16 + 2 * (FIELDS + 24):
        more, extra, _, _ = a.recvmsg(4096, 100)
        assert not extra
        raw += more
    assert len(raw) == 3 * HEADER_BYTES + 16 + 2 * (FIELDS + 24)
    assert connection.sent == 2 * (HEADER_BYTES + FIELDS) + body.nbytes + 20
    a.close()
    assert connection.join(20)


@pytest.mark.parametrize("viewed", [True, False])
def test_a_reference_may_show_more_than_a_payload_can_hold(viewed):
    memory, size = ProcessMemory(), MAX_BODY + 4096
    resident = Recorder(lambda message, viewable: None if viewed else torch.empty(size, dtype=torch.uint8))
    a, b = socket.socketpair()
    sender = Connection(a, WORKER, SERVER, Recorder(), 0, memory)
    receiver = Connection(b, SERVER, WORKER, resident, 0, ProcessMemory())
    sender.start()
    receiver.start()
    body = memory.allocate(size + 100, torch.uint8)[5 : 5 + size]
    body[-1] = 9
    sender.send(Values(0, 0, 0, body=body))
    got = resident.next().body
    assert (got.nbytes, got[0], got[-1]) == (size, 0, 9)
    body[0] = 7
    assert got[0] == (7 if viewed else 0)
    assert receiver.received == sender.sent == HEADER_BYTES + FIELDS + size
    sender.shut()
    assert sender.join(20)
    assert receiver.join(20)


# --- sending -----------------------------------------------------------------------------------------------------


def test_a_body_is_not_copied_before_the_kernel_takes_it():
    body = torch.zeros(4 << 20)
    tracemalloc.start()
    with server() as (sock, _, connection):
        for _ in range(3):
            connection.send(Values(0, 4 << 20, 0, body=body))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        body.fill_(7)  # what is queued is the sender's own memory
        raw = bytearray()
        while len(raw) < 3 * (16 << 20):
            raw += sock.recv(1 << 20)
        assert peak < 1 << 20
        assert struct.unpack("<f", raw[-200:-196])[0] == 7


def test_the_greeting_comes_first_whichever_peer_sends_meanwhile():
    for early in (0, 3):
        a, b = socket.socketpair()
        resident = Recorder()
        connection = Connection(b, SERVER, WORKER, resident, 0, greeting=b"welcome")
        for i in range(early):
            connection.send(Fetch(i))
        connection.start()
        connection.send(Fetch(99))
        connection.shut()
        raw = b""
        while part := a.recv(4096):
            raw += part
        assert raw[:7] == b"welcome"
        numbers = [Header.unpack(raw[at : at + HEADER_BYTES]).number for at in starts(raw, 7)]
        assert numbers == list(range(1, early + 3))
        a.close()
        assert connection.join(20)
        assert resident.end() == "closed on this side"


def starts(raw: bytes, at: int) -> list[int]:
    found = []
    while at < len(raw):
        found.append(at)
        at += HEADER_BYTES + Header.unpack(raw[at : at + HEADER_BYTES]).meta
    return found


@pytest.mark.parametrize(
    "body", [torch.zeros(2, 2), torch.zeros(10)[::2], torch.empty(MAX_BODY + 1, dtype=torch.uint8)]
)
def test_a_body_that_cannot_travel_is_refused_where_it_is_sent(body):
    with server() as (_, _, connection):
        with pytest.raises(ValueError, match=r"a body must be 1-D, contiguous|must be at most 67108864"):
            connection.send(Values(0, 0, 0, body=body))
        connection.send(Fetch(1))
