"""Silent connections of strangers at a listener, and the members that come after them."""

import socket
from collections import Counter
from contextlib import ExitStack, closing, contextmanager

import pytest
from transport_pairs import Recorder, identity

from topotrain.comm.security.handshake import HandshakeAborted, HandshakeTimeout
from topotrain.comm.store.tcp_store import TcpStore
from topotrain.comm.store.tcp_store_server import TcpServer
from topotrain.comm.transport import PeerUnreachable, Refused
from topotrain.comm.transport.listener import MAX_UNPROVEN, Newcomers
from topotrain.comm.transport.socket_transport import passes
from topotrain.comm.transport.tcp import TcpTransport
from topotrain.config.topology import Address, Role

SECRET = bytes(range(32))
SERVER, WORKER = Address(Role.SERVER, 0, 0), Address(Role.WORKER, 0, 0)


@contextmanager
def silent(port, count=2 * MAX_UNPROVEN):
    """Connections that send nothing. More than there are places, so each newcomer needs one."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
        yield


def test_a_member_comes_in_while_silent_connections_have_all_places():
    with closing(TcpServer("127.0.0.1", 0, SECRET)) as server:
        port = int(server.url.rpartition(":")[2])
        with silent(port), closing(TcpStore("127.0.0.1", port, SECRET, 0.0)) as store:
            store.set("a", b"1")  # at the first try
            assert len(server._server._listener._unproven) <= MAX_UNPROVEN


def test_a_worker_comes_in_while_silent_connections_have_all_places():
    server, worker = TcpTransport(identity()), TcpTransport(identity(), patience=20.0)
    url = server.attach(SERVER, Recorder())
    with silent(int(url.rpartition(":")[2])):
        worker.attach_together({WORKER: Recorder()}, listens=False)
        worker.connect(WORKER, SERVER, url)
        assert worker.connected(WORKER, SERVER)
    worker.close()
    server.close()


@pytest.fixture
def make():
    with ExitStack() as stack:

        def sockets(count):
            return [stack.enter_context(socket.socket()) for _ in range(count)]

        yield sockets


def test_the_address_with_most_connections_loses_one(make):
    newcomers, kept = Newcomers(), Counter()
    # The last one alone has the addresses of a whole network.
    crowd = ["10.0.0.1", *(f"2001:db8:0:1::{k:x}" for k in range(MAX_UNPROVEN - 1))]
    for sock, host in zip(make(MAX_UNPROVEN), crowd):
        assert newcomers.add(sock, (host, 1, 0, 0)) is None
        kept[host] += 1
    lone = next(iter(newcomers._known))
    for sock in make(MAX_UNPROVEN - 2):
        assert newcomers.add(sock, ("10.0.0.2", 1)) not in (None, lone)
        assert len(newcomers) == MAX_UNPROVEN
    assert lone in newcomers


def test_a_closed_connection_takes_no_place(make):
    newcomers = Newcomers()
    for sock in make(MAX_UNPROVEN):
        newcomers.add(sock, ("10.0.0.1", 1))
        sock.close()
    assert newcomers.add(make(1)[0], ("10.0.0.1", 2)) is None and len(newcomers) == 1


def test_only_refusals_that_pass_are_tried_again():
    assert all(passes(error) for error in (Refused("FULL", ""), HandshakeAborted(""), HandshakeTimeout("")))
    assert not any(passes(error) for error in (Refused("AUTH", ""), Refused("CONFIG", ""), PeerUnreachable("")))
