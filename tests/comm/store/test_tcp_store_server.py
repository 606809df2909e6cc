"""Our own store server: strangers, clients that stop or vanish, servers that come back, and who serves where."""

import errno
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from free_ports import free_port

from topotrain.comm import request_reply
from topotrain.comm.request_reply import CLIENT, SERVER, RequestChannel, service_identity
from topotrain.comm.security import tls
from topotrain.comm.security.handshake import dial
from topotrain.comm.store import (
    StoreError,
    host_store,
    open_store,
    serve_store,
    tcp_store,
)
from topotrain.comm.store.discovery import environment
from topotrain.comm.store.tcp_store import AccessDenied, TcpStore
from topotrain.comm.store.tcp_store_protocol import _FIELDS, Op, StoreRequest, receive_reply, send_request
from topotrain.comm.store.tcp_store_server import TcpServer
from topotrain.comm.transport import Refused, tcp_socket
from topotrain.comm.transport.frame import BODY, Header

SECRET, OTHER = bytes(range(32)), bytes(32)


@pytest.fixture
def server():
    server = TcpServer("127.0.0.1", 0, SECRET)
    yield server
    server.close()
    for thread in threading.enumerate():
        if thread.name.startswith("store "):
            thread.join(30)  # it has let go of its connection and is just ending
            assert not thread.is_alive()


@pytest.fixture
def port(server):
    return int(server.url.rpartition(":")[2])


@pytest.fixture
def store(port):
    store = TcpStore("127.0.0.1", port, SECRET)
    yield store
    store.close()


def connect(port, proven=True):
    sock = socket.create_connection(("127.0.0.1", port), 30)
    if proven:
        dial(sock, service_identity("store", SECRET), CLIENT, SERVER)
        sock.settimeout(30)
    return sock


def hung_up_on(sock):
    with sock:
        sock.settimeout(30)
        try:
            while sock.recv(4096):
                pass
        except ConnectionResetError:
            pass
    return True


# ---- strangers -------------------------------------------------------------------------------------------------------


def test_a_wrong_secret_is_refused_at_once_on_both_sides(port):
    with pytest.raises(AccessDenied, match=f"store tcp://127.0.0.1:{port} has another secret than this process"):
        TcpStore("127.0.0.1", port, OTHER, patience=1000).get("k")


# ---- clients ---------------------------------------------------------------------------------------------------------


def head(op=1, flags=0, life=0, wait=0.0, key=b"k", known=0, size=0, payload=b"", **header):
    meta = _FIELDS.pack(flags, bytes(16), life, wait, known) + key
    fields = {"flags": BODY if size else 0, "kind": op, "meta": len(meta), "payload": size}
    return Header(**{**fields, "generation": 0, "number": 1, **header}).pack() + meta + payload


MIB = 1 << 20


@pytest.mark.parametrize(
    "words",
    [
        head(op=99),
        head(flags=2),
        head(known=MIB + 1, size=MIB + 1, payload=bytes(MIB + 1)),
        head(size=MIB + 1, payload=bytes(MIB + 1)),
        head(wait=float("nan")),
        head(wait=1e300),
        head() + head(),
    ],
)
def test_frames_that_are_none_are_hung_up_on(port, store, words):
    client = connect(port)
    client.sendall(words)
    assert hung_up_on(client)
    store.set("k", b"1")


def test_a_request_during_a_watch_ends_the_connection(server, port):
    """Whether it came together with the watch or later."""
    watch = sent(StoreRequest(Op.WATCH, "k", seconds=3600.0))
    both = sent(StoreRequest(Op.WATCH, "k", seconds=3600.0), StoreRequest(Op.GET, "k"))
    together, later = connect(port), connect(port)
    together.sendall(both)
    assert hung_up_on(together)
    later.sendall(both[: len(watch)])
    while not server._table._watchers:
        threading.Event().wait(0.01)
    later.sendall(both[len(watch) :])
    assert hung_up_on(later)


def sent(*requests):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = RequestChannel(ours)
        for request in requests:
            send_request(channel, request)
        return theirs.recv(1000)


def test_a_key_that_is_none_is_refused_by_the_server_too(port):
    with connect(port) as client:
        channel = RequestChannel(client)
        for op, key in ((Op.GET, "../x"), (Op.SET, ""), (Op.KEYS, "*"), (Op.WATCH, "A")):
            send_request(channel, StoreRequest(op, key))
            reply = receive_reply(channel, 30)
            assert reply.status == 4 and b"must be" in reply.body


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\nServer: none of ours\r\n", "these bytes are not a frame"),
        (Header(BODY, 1, 0, (64 << 20) + 1, 0, 1).pack(), "a frame of 0 .* bytes"),
        (Header(0, 1, 2, 0, 0, 1).pack() + b"xx", "not a reply"),
        (Header(0, 1, 0, 0, 0, 1).pack()[:9], "ended in the middle of a frame"),
        (b"", "the store closed the connection"),
    ],
)
def test_a_server_that_answers_nonsense_is_told(store, monkeypatch, words, reason):
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(words)
        theirs.shutdown(socket.SHUT_WR)
        monkeypatch.setattr(tcp_store, "connect", lambda *_: RequestChannel(ours))
        store._patience = 0.0
        with pytest.raises(StoreError, match=f"cannot be reached: .*{reason}"):
            store.get("k")


def test_a_client_that_does_not_read_holds_up_no_other(port, store):
    whole = os.urandom(1 << 20)
    clients = [RequestChannel(connect(port)) for _ in range(3)]
    for client in clients:
        send_request(client, StoreRequest(Op.WATCH, "k", seconds=60.0))
    for _ in range(5):
        store.set("k", whole)
        for client in clients:
            send_request(client, StoreRequest(Op.GET, "k"))
    assert store.get("k") == whole
    for client in clients:
        assert receive_reply(client, 30).body == whole
        client.close()


def test_a_watcher_that_leaves_is_forgotten(server, port, store):
    client = RequestChannel(connect(port))
    send_request(client, StoreRequest(Op.WATCH, "k", seconds=3600.0))
    while not server._table._watchers:
        threading.Event().wait(0.01)
    client.close()
    while server._table._watchers:
        threading.Event().wait(0.01)
    store.set("k", b"1")


# ---- servers that go and come ----------------------------------------------------------------------------------------


def test_a_server_that_comes_back_is_found_again(server, port, store):
    store.set("k", b"1")
    server.close()
    with ThreadPoolExecutor(2) as pool:
        watch, get = pool.submit(store.watch, "k", 30), pool.submit(store.get, "k")
        again = TcpServer("127.0.0.1", port, SECRET)
        assert get.result() is None  # values live in memory
        store.set("k", b"2")
        assert watch.result() == b"2"
    again.close()


def test_a_server_that_stays_away_is_an_error_at_the_deadline(server, port):
    server.close()
    with pytest.raises(StoreError, match=f"store tcp://127.0.0.1:{port} cannot be reached: .*refused"):
        TcpStore("127.0.0.1", port, SECRET, patience=0.1).get("k")
    with pytest.raises(StoreError, match="cannot be reached"):
        TcpStore("127.0.0.1", port, SECRET, patience=1000).watch("k", 0.1)
    with pytest.raises(StoreError, match="no-such-host"):
        TcpStore("no-such-host.invalid", port, SECRET, patience=0.0).get("k")


def test_a_lost_answer_does_not_count_twice(store, monkeypatch):
    heard = []

    def losing(channel, seconds):
        heard.append(receive_reply(channel, seconds))
        if len(heard) % 2:
            raise ConnectionResetError("lost")
        return heard[-1]

    monkeypatch.setattr(tcp_store, "receive_reply", losing)
    assert store.compare_and_set("k", None, b"1")
    assert store.compare_and_set("k", b"1", b"2")
    assert store.get("k") == b"2" and len(heard) == 6


# ---- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def far(monkeypatch):
    """As if 127.0.0.1 could be reached by other machines."""
    pytest.importorskip("cryptography")
    monkeypatch.setattr(request_reply, "is_loopback", lambda address: False)


def test_over_tls_everything_works_as_without(far, monkeypatch):
    server = serve_store("127.0.0.1", 0, SECRET)
    port = int(server.url.rpartition(":")[2])
    store, other = TcpStore("127.0.0.1", port, SECRET), TcpStore("127.0.0.1", port, SECRET)
    whole = os.urandom(1 << 20)
    with ThreadPoolExecutor(1) as pool:
        watch = pool.submit(store.watch, "k", 30)
        assert other.compare_and_set("k", None, whole)
        assert watch.result() == whole == store.get("k")
    with pytest.raises(TimeoutError):
        store.watch("k", 0.01, whole)
    with pytest.raises(AccessDenied, match="has another secret"):
        TcpStore("127.0.0.1", port, OTHER).get("k")
    with connect(port, proven=False) as sock:
        channel, _ = tls.client_side(sock)
        with pytest.raises(Refused, match="AUTH"):  # as if somebody in between had shown another certificate
            dial(
                channel,
                service_identity("store", SECRET),
                CLIENT,
                SERVER,
                binding=bytes(32),
            )
    stranger = connect(port, proven=False)
    stranger.sendall(b"ttHS" + bytes(300))  # no TLS
    assert hung_up_on(stranger)
    store.close()
    other.close()
    server.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0", "224.0.0.1"])
def test_all_addresses_at_once_are_refused(host):
    with pytest.raises(StoreError, match=r"store tcp://.*:0: name one address"):
        serve_store(host, 0, SECRET)


def test_no_other_machine_reaches_a_store_without_a_secret(monkeypatch):
    monkeypatch.setattr(request_reply, "is_loopback", lambda address: False)
    with pytest.raises(StoreError, match=r"store tcp://127\.0\.0\.1:0: other machines reach it, so it needs a secret"):
        serve_store("127.0.0.1", 0, bytes(32))


# ---- who serves ------------------------------------------------------------------------------------------------------


def test_host_store_serves_once_and_only_here():
    url = f"tcp://127.0.0.1:{free_port()}"
    served = host_store(url + "?job=x", SECRET)
    assert served is not None and served.url == url
    assert host_store(url, SECRET) is None  # a store of ours is there
    with pytest.raises(StoreError, match=r"what listens there is not a topotrain store: .*another secret"):
        host_store(url, OTHER)
    served.close()
    assert host_store("file:///tmp/x", SECRET) is None
    assert host_store("redis://127.0.0.1", SECRET) is None


def test_an_address_of_another_machine_is_not_served_here(monkeypatch):
    class Elsewhere(socket.socket):
        def bind(self, address):
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(tcp_socket.socket, "socket", Elsewhere)
    assert host_store("tcp://127.0.0.1:29400", SECRET) is None
    with pytest.raises(StoreError, match=r"store tcp://127\.0\.0\.1:29400: Cannot assign requested address"):
        serve_store("127.0.0.1", 29400, SECRET)


def test_a_port_that_another_process_has_is_reported():
    with socket.socket() as somebody:
        somebody.bind(("127.0.0.1", 0))
        somebody.listen()
        port = somebody.getsockname()[1]
        with pytest.raises(StoreError, match=f"store tcp://127.0.0.1:{port}: Address already in use"):
            serve_store("127.0.0.1", port, SECRET)
        with pytest.raises(StoreError, match=r"what listens there is not a topotrain store: .*too slow"):
            host_store(f"tcp://127.0.0.1:{port}", SECRET)


def test_the_environment_names_the_store(tmp_path):
    named = {"TOPOTRAIN_RENDEZVOUS": (tmp_path / "s").as_uri(), "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    store = open_store("env://?job=x", environ=named)
    store.set("k", b"1")
    assert (tmp_path / "s" / "jobs+x+k").exists()
    assert host_store("env://", environ=named) is None

    port = free_port()
    plain = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TOPOTRAIN_TOKEN": SECRET.hex()}
    served = host_store("env://", environ=plain)
    store = open_store("env://", environ=plain)
    store.set("k", b"2")
    assert store.get("k") == b"2" and host_store("env://", environ=plain) is None
    store.close()
    served.close()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "set TOPOTRAIN_RENDEZVOUS to a URL, or both MASTER_ADDR and MASTER_PORT"),
        ({"MASTER_ADDR": "h"}, "both MASTER_ADDR and MASTER_PORT"),
        ({"MASTER_ADDR": "h", "MASTER_PORT": "70000"}, "must be 1 to 65535"),
        ({"TOPOTRAIN_RENDEZVOUS": "env://"}, "leads back to itself: must be file:///"),
        ({"TOPOTRAIN_RENDEZVOUS": "what://"}, "unknown kind 'what'"),
    ],
)
def test_an_environment_that_names_none(environ, expected):
    for ask in (open_store, host_store):
        with pytest.raises(StoreError, match=expected):
            ask("env://", SECRET, environ=environ)


def test_beside_torchs_own_store_units_find_ours():
    """As torchrun sets it up: torch's store has MASTER_PORT, and holds the URL of an attempt that is over."""
    import torch.distributed as dist

    agent = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    agent.set("topotrain/store/1", f"tcp://127.0.0.1:{free_port()}")
    environ = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(agent.port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TOPOTRAIN_TOKEN": SECRET.hex(),
    }
    said = []
    meeting = environment.Meeting(0.1, said.append)
    for restart, problem in (("0", "it has not said where"), ("1", "store tcp://127.0.0.1:.* cannot be reached")):
        again = {**environ, "TORCHELASTIC_RESTART_COUNT": restart}
        with pytest.raises(StoreError, match=f"the unit of rank 0 has served no store within 0.1 s: {problem}"):
            open_store("env://", environ=again, meeting=meeting)
    assert said == ["the store of unit 0"]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(open_store, "env://?job=j", environ=environ)  # comes first, and finds the old URL
        served = host_store("env://", environ=environ)
        store = open_store("env://?job=j", environ=environ)
        store.set("k", b"1")
        assert other.result().watch("k", 60) == b"1"
    wrong = {**environ, "TOPOTRAIN_TOKEN": OTHER.hex()}
    with pytest.raises(AccessDenied, match="another secret"):
        open_store("env://", environ=wrong)
    store.close()
    other.result().close()
    served.close()


def test_a_torch_store_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(environment, "RENDEZVOUS_S", 0.1)
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for ask in (open_store, host_store):
        with pytest.raises(StoreError, match=r"torch's store at tcp://127.0.0.1:1 does not answer"):
            ask("env://", SECRET, environ=environ)


def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "rendezvous.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/rendezvous.md", "exec"), {})
    assert (tmp_path / "meeting" / "jobs+night-1+host+0").exists()
