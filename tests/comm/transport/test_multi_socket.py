"""Several sockets as one stream: the same bytes in the same order, whatever each of them does."""

import gc
import os
import socket
from contextlib import suppress

import pytest
import torch
from transport_pairs import SERVER, WAIT, WORKER, Pair, Recorder, TransportGroup, identity

from topotrain.comm.security.handshake import SocketNumber, dial
from topotrain.comm.transport import Refused, TransportError
from topotrain.comm.transport.multi_socket import STRIPE, MultiSocketChannel, PendingSockets
from topotrain.comm.transport.tcp import TcpTransport
from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Fetch, Values


def bundles(lanes: int, ahead: int = 0) -> tuple[MultiSocketChannel, MultiSocketChannel, list[socket.socket]]:
    pairs = [socket.socketpair() for _ in range(lanes)]
    ends = [[pair[side] for pair in pairs] for side in (0, 1)]
    return MultiSocketChannel(ends[0], ahead), MultiSocketChannel(ends[1]), [s for pair in pairs for s in pair]


def close(*bundles: MultiSocketChannel) -> None:
    for bundle in bundles:
        bundle.close()


RAW = torch.arange(STRIPE * 2, dtype=torch.int32).numpy().tobytes()  # 8 stripes


def test_sending_without_waiting_takes_what_all_lanes_take():
    here, there, _ = bundles(3)
    sent = 0
    with suppress(BlockingIOError):
        while True:
            sent += here.sendmsg([memoryview(RAW)], (), socket.MSG_DONTWAIT)
    assert sent > 2 * STRIPE
    got = bytearray(sent)
    assert there.recv_into(got, 0, socket.MSG_WAITALL) == sent
    close(here, there)


# --- the transport ----------------------------------------------------------------------------------------------------


@pytest.fixture
def transports():
    transports = TransportGroup("tcp")
    transports.wire = lambda **changes: lanes_of(transports, 2, **changes)
    yield transports
    transports.close()


def lanes_of(transports: TransportGroup, lanes: int, **changes) -> TcpTransport:
    wire = TcpTransport(identity(**changes), lanes=lanes)
    transports.wires.append(wire)
    return wire


def test_a_dead_lane_is_a_dead_connection(transports):
    pair = Pair(transports)
    pair.to_server(Fetch(1))
    pair.server.next()
    (connection,) = pair.worker_wire._connections
    connection._sock._lanes[1].shutdown(socket.SHUT_RDWR)
    pair.to_server(Values(0, 1 << 20, 0, body=torch.zeros(1 << 20)))  # more than a stripe: it needs that lane
    assert pair.worker.end()
    assert pair.server.end()
    with pytest.raises(TransportError):
        pair.to_server(Fetch(1))


def test_both_ends_must_have_as_many(transports):
    pair = Pair(transports)
    stranger, me = lanes_of(transports, 3), Address(Role.WORKER, 5, 5)
    stranger.attach(me, Recorder())
    with pytest.raises(Refused, match="a connection of 3 sockets") as refused:
        stranger.connect(me, SERVER, pair.url)
    assert refused.value.code == "CONFIG"


def test_a_second_try_drops_the_lanes_of_the_first(transports):
    pair = Pair(transports)
    me = Address(Role.WORKER, 5, 5)
    host, port = pair.url.removeprefix("tcp://").split(":")
    lanes = pair.server_wire._lanes
    first = socket.create_connection((host, int(port)))
    dial(first, identity(), me, SERVER, WAIT, SocketNumber(lanes - 1, lanes, b"a" * 16))
    lone = socket.create_connection((host, int(port)))
    with pytest.raises(TransportError):  # its other lanes are not there
        dial(lone, identity(), me, SERVER, WAIT, SocketNumber(0, lanes, b"b" * 16))
    assert first.recv(1) == b""
    wire = transports.wire()
    wire.attach(me, Recorder())
    wire.connect(me, SERVER, pair.url)
    wire.send(me, SERVER, Fetch(3))
    assert pair.server.next() == Fetch(3)
    first.close()
    lone.close()


def test_parked_lanes_are_closed_with_the_transport():
    before = len(os.listdir("/proc/self/fd"))
    parking, pairs = PendingSockets(), [socket.socketpair() for _ in range(3)]
    way = (SERVER, WORKER)
    parking.put(way, b"a", 1, pairs[0][0])
    with pytest.raises(TransportError, match="lane 1 came twice"):
        parking.put(way, b"a", 1, pairs[1][0])
    parking.put(way, b"b", 1, pairs[1][0])
    assert pairs[0][1].recv(1) == b""
    parking.close()
    assert pairs[1][1].recv(1) == b""
    with pytest.raises(TransportError, match="closed"):
        parking.put(way, b"b", 2, pairs[2][0])
    for pair in pairs:
        for sock in pair:
            sock.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before  # connections of tests before this one may end meanwhile


def test_lanes_of_a_dialer_that_has_died_are_closed_after_a_while():
    parking, (ours, theirs) = PendingSockets(patience=0.01), socket.socketpair()
    theirs.settimeout(20)
    parking.put((SERVER, WORKER), b"a", 1, ours)
    assert theirs.recv(1) == b""
    with pytest.raises(TransportError, match="1 lanes of 2 came"):
        parking.claim((SERVER, WORKER), b"a", 2)
    theirs.close()


@pytest.mark.parametrize("lanes", [0, 17])
def test_the_number_of_lanes_is_bounded(lanes):
    with pytest.raises(TransportError, match=f"lanes = {lanes}: must be 1 to 16"):
        TcpTransport(identity(), lanes=lanes)
