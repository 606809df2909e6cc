"""Back-pressure: what waits for a peer that reads slowly is bounded, and nobody stops anybody for ever."""

import socket
import threading
from contextlib import contextmanager

import pytest
import torch
from launch_targets import wait_for
from transport_pairs import SERVER, WAIT, WORKER, Pair, Recorder, TransportGroup, place_new

from topotrain.comm.transport import TransportError
from topotrain.comm.transport.connection import Connection
from topotrain.comm.transport.frame import HEADER_BYTES, Header
from topotrain.comm.transport.frame_writer import LIMIT, OVERHEAD
from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Fetch, Push, Values, encode

BODY = torch.zeros(1 << 22)  # 16 MiB
MANY = 3 * LIMIT // BODY.nbytes + 4  # more than queue, kernel and the reader of a test take together


def values(i: int) -> Values:
    return Values(i, BODY.numel(), 0, body=BODY)


@contextmanager
def idle_peer(me=WORKER, peer=SERVER, memory=None):
    """A connection whose other end is a raw socket that nobody reads."""
    a, b = socket.socketpair()
    resident = Recorder()
    connection = Connection(b, me, peer, resident, 0, memory)
    connection.start()
    try:
        yield a, resident, connection
    finally:
        a.close()
        connection.cut("the test is over")
        assert connection.join(WAIT)


class Sender:
    """A script's thread that sends and may wait; `sent` counts what `send` has returned from."""

    def __init__(self, connection: Connection, count: int = MANY, message=values) -> None:
        self.sent, self.error = 0, None
        self._connection, self._count, self._message = connection, count, message
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            for i in range(self._count):
                self._connection.send(self._message(i), wait=True)
                self.sent += 1
        except TransportError as error:
            self.error = error

    def waits(self) -> None:
        """Return when the thread waits for room."""
        wait_for(lambda: self._connection._out._room._waiters)

    def join(self) -> None:
        self.thread.join(WAIT)
        assert not self.thread.is_alive()


def test_a_script_waits_for_a_peer_that_does_not_read_and_goes_on_as_it_reads():
    with idle_peer() as (sock, _, connection):
        sender = Sender(connection)
        sender.waits()
        assert LIMIT - BODY.nbytes - 2 * OVERHEAD * MANY < connection.queued <= LIMIT
        assert sender.sent <= LIMIT // BODY.nbytes + 1  # one more is on its way into the kernel
        connection.send(Fetch(1), wait=True)  # what has no body never waits: a collected iterator may say it
        left = MANY * (HEADER_BYTES + 24 + BODY.nbytes) + HEADER_BYTES + 8
        while left:
            left -= len(sock.recv(min(left, 1 << 20)))
            assert connection.queued <= LIMIT + OVERHEAD + HEADER_BYTES + 8
        sender.join()
        assert (sender.sent, sender.error) == (MANY, None)
        wait_for(lambda: not connection.queued)


def test_what_travels_as_a_reference_takes_hardly_any_room():
    memory = ProcessMemory()
    body = memory.allocate(BODY.numel(), torch.float32)
    with idle_peer(memory=memory) as (_, _, connection):
        sender = Sender(connection, 5000, lambda i: Values(i, 1, 0, body=body))
        sender.join()  # 80 GB are shown, and nobody waits
        assert sender.error is None
        assert connection.queued < 5000 * (OVERHEAD + 200)


@pytest.mark.parametrize("end", ["cut", "shut", "peer"])
def test_whoever_waits_for_room_is_free_when_the_connection_ends(end):
    with idle_peer() as (sock, resident, connection):
        sender = Sender(connection)
        sender.waits()
        {"cut": lambda: connection.cut("enough"), "shut": connection.shut, "peer": sock.close}[end]()
        sender.join()
        if end == "peer":  # with an error, or by and by into nothing: until the reader knows, both may be
            resident.end()
            with pytest.raises(TransportError):
                connection.send(values(0), wait=True)
            assert not connection.queued
        else:
            assert ("enough" if end == "cut" else "closed on this side") in str(sender.error)


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_a_script_and_a_slow_server_that_answers_with_as_much(kind):
    """Both directions are full at once; each end's queue is bounded, and all of it arrives."""
    transports = TransportGroup(kind)
    pair = Pair(transports)
    pair.server.on_handle = lambda sender, message: pair.to_worker(values(message.step))
    (there,), (back,) = pair.worker_wire._connections, pair.server_wire._connections
    highest = [0, 0]

    def look(message, viewable):
        highest[0], highest[1] = max(highest[0], there.queued), max(highest[1], back.queued)
        return place_new(message, viewable)

    pair.server.placing = pair.worker.placing = look
    for step in range(MANY):
        pair.worker_wire.send(WORKER, SERVER, Push(step, 0, BODY.numel(), 1.0, b"", body=BODY), wait=True)
    assert [pair.worker.next().round for _ in range(MANY)] == list(range(MANY))
    assert highest[0] <= LIMIT
    assert highest[1] <= LIMIT + BODY.nbytes + OVERHEAD + 100
    transports.close()


def ask(number: int) -> bytes:
    kind, meta = encode(Fetch(number))
    return Header(0, kind, len(meta), 0, 0, number).pack() + meta


def test_a_server_takes_no_more_requests_from_a_worker_that_leaves_its_answers_lying():
    asked = 0

    def answer(sender, message) -> None:
        nonlocal asked
        asked += 1
        connection.send(values(message.round))

    with idle_peer(SERVER, WORKER) as (sock, resident, connection):
        resident.on_handle = answer
        sock.sendall(b"".join(map(ask, range(1, 1001))))  # 16 GB of answers
        wait_for(lambda: connection._out._room._waiters)
        assert asked <= LIMIT // BODY.nbytes + 2
        assert connection.queued <= LIMIT + BODY.nbytes + 2 * OVERHEAD
        before, left = asked, 3 * BODY.nbytes
        while left > 0:  # it reads some, and some more are taken
            left -= len(sock.recv(1 << 20))
        wait_for(lambda: asked > before)
        wait_for(lambda: connection._out._room._waiters)
        assert connection.queued <= LIMIT + BODY.nbytes + 2 * OVERHEAD
        sock.close()  # and its death is noticed although the server was not reading
        assert resident.end()


@pytest.mark.parametrize("kind", ["tcp", "local"])
def test_a_reader_never_waits_even_if_it_says_that_it_may(kind):
    """Each answers from inside `handle` with much more than LIMIT, as nobody should; nothing stops."""
    transports = TransportGroup(kind)
    here, there = transports.wire(), transports.wire()
    ends = {Address(Role.SERVER, 0, 0): (here, Recorder()), Address(Role.SERVER, 0, 1): (there, Recorder())}
    (left, right) = ends
    urls = {me: wire.attach(me, resident) for me, (wire, resident) in ends.items()}
    here.connect(left, right, urls[right])

    def burst(me: Address, to: Address):
        def answer(sender, message) -> None:
            if isinstance(message, Fetch):
                for i in range(MANY):
                    ends[me][0].send(me, to, values(i), wait=True)

        return answer

    for me, to in ((left, right), (right, left)):
        ends[me][1].on_handle = burst(me, to)
    here.send(left, right, Fetch(0))
    there.send(right, left, Fetch(0))
    for _, resident in ends.values():
        assert [resident.next().round for _ in range(MANY + 1)].count(0) == 2
    transports.close()
