"""What every transport promises: one test, run for each of them."""

import gc
import os
import shutil
import socket
import threading
from contextlib import closing, suppress

import pytest
import torch
from transport_pairs import SERVER, WAIT, WORKER, Pair, Recorder, TransportGroup, identity, place_view

from topotrain.comm.transport import Refused, TransportError
from topotrain.comm.transport.frame import HEADER_BYTES
from topotrain.comm.transport.listener import Listener
from topotrain.comm.transport.shared_memory import ARENA, ProcessMemory, unsized_memfd
from topotrain.comm.transport.tcp import TcpTransport
from topotrain.comm.transport.unix_transport import SharedMemoryTransport
from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Drained, Fetch, Init, Message, ProtocolError, Push, Values

SOCKETS = ("shm", "tcp", "tls")
TRANSPORTS = ("local", *SOCKETS)
MEGABYTE = 1 << 18  # elements of float32
SIZES = (0, 1, 77, MEGABYTE, 3 * MEGABYTE + 5)


@pytest.fixture(params=TRANSPORTS)
def transports(request):
    transports = TransportGroup(request.param)
    yield transports
    transports.close()
    if transports.directory:
        assert os.listdir(transports.directory) == []
        shutil.rmtree(transports.directory)


sockets = pytest.mark.parametrize("transports", SOCKETS, indirect=True)
viewing = pytest.mark.parametrize("transports", ["local", "shm"], indirect=True)


def values(body: torch.Tensor, version: int = 0) -> Values:
    return Values(round=0, bucket=body.numel(), version=version, body=body)


def test_messages_arrive_in_order_in_both_directions(transports):
    pair = Pair(transports)
    for i in range(300):
        pair.to_server(Fetch(round=i))
        pair.to_worker(Fetch(round=-i))
    assert [pair.server.got.get(timeout=WAIT) for _ in range(300)] == [(WORKER, Fetch(round=i)) for i in range(300)]
    assert [pair.worker.got.get(timeout=WAIT) for _ in range(300)] == [(SERVER, Fetch(round=-i)) for i in range(300)]
    pair.to_server(Drained())
    assert pair.server.next() == Drained()


@pytest.mark.parametrize("shared", [False, True])
def test_a_body_is_received_where_its_receiver_wants_it(transports, shared):
    pair = Pair(transports)
    targets = {numel: torch.empty(numel) for numel in SIZES}
    pair.server.placing = lambda message, viewable: targets[message.bucket]
    for numel in SIZES:
        body = transports.tensor(pair.worker_wire, numel) if shared else torch.empty(numel)
        body.copy_(torch.arange(numel))
        pair.to_server(values(body, numel))
        got = pair.server.next()
        assert got == values(body, numel)
        assert got.body is targets[numel]
        assert torch.equal(got.body, body)


@viewing
def test_a_body_can_be_shown_instead(transports):
    pair = Pair(transports, server=Recorder(place_view))
    for numel in SIZES[1:]:
        whole = transports.tensor(pair.worker_wire, numel + 64)
        body = whole[64:]
        body.copy_(torch.arange(numel))
        pair.to_server(values(body))
        seen = pair.server.next().body
        assert (seen.ndim, seen.dtype) == (1, torch.uint8)
        assert torch.equal(seen.view(torch.float32), body)
        body[-1] = 0.5  # the sender's own memory, not a copy
        assert seen.view(torch.float32)[-1] == 0.5
        seen.view(torch.float32)[0] = -3.0
        assert body[0] == -3.0


def test_every_type_of_body(transports):
    pair = Pair(transports)
    pair.to_server(values(torch.ones(10, requires_grad=True)[3:7]))
    assert torch.equal(pair.server.next().body, torch.ones(4))
    for dtype in (torch.bfloat16, torch.bool, torch.float64, torch.int64):
        body = (torch.arange(9) % 2).to(dtype)
        pair.server.placing = lambda message, viewable, dtype=dtype: torch.empty(9, dtype=dtype)
        pair.to_server(values(body))
        assert torch.equal(pair.server.next().body, body)


def bad_size(message, viewable):
    return torch.empty(message.bucket + 1)


def no_place(message, viewable):
    raise ProtocolError("bucket 5 does not live here")


def broken(message, viewable):
    raise ZeroDivisionError("a fault of the resident's own")


@pytest.mark.parametrize(
    ("placing", "reason", "shared"),
    [
        (bad_size, "Values has a payload of 20 bytes, the schema says 24", False),
        (bad_size, "Values has a payload of 20 bytes, the schema says 24", True),
        (lambda message, viewable: torch.empty(message.bucket, 1), "must be 1-D", False),
        (no_place, "bucket 5 does not live here", True),
        (broken, "internal error: ZeroDivisionError: a fault", False),
    ],
)
def test_a_payload_without_its_place_ends_the_connection(transports, placing, reason, shared):
    pair = Pair(transports, server=Recorder(placing))
    pair.to_server(values(transports.tensor(pair.worker_wire, 5) if shared else torch.zeros(5)))
    assert reason in pair.server.end()
    assert reason in pair.worker.end()
    for send in (pair.to_server, pair.to_worker):
        with pytest.raises(TransportError, match="no connection from"):
            send(Fetch(round=1))
    pair.worker_wire.connect(WORKER, SERVER, pair.url)  # the transport itself goes on
    pair.to_server(Fetch(round=2))
    assert pair.server.next() == Fetch(round=2)
    assert pair.server.ends.empty()


@sockets
def test_a_payload_that_cannot_be_shown_needs_a_place(transports):
    pair = Pair(transports, server=Recorder(lambda message, viewable: None))
    pair.to_server(values(torch.zeros(5)))
    assert "no place here" in pair.server.end()
    assert "no place here" in pair.worker.end()


def test_the_death_of_a_peer_is_seen_once(transports):
    pair = Pair(transports)
    pair.to_worker(Fetch(round=1))
    pair.worker.next()
    assert pair.worker_wire.connected(WORKER, SERVER) and pair.server_wire.connected(SERVER, WORKER)
    transports.die(pair.worker_wire, WORKER)
    assert pair.server.ends.get(timeout=WAIT)[0] == WORKER
    with pytest.raises(TransportError, match="no connection from server 0/0 to worker 0/1"):
        pair.to_worker(Fetch(round=2))
    transports.close()
    assert not pair.worker_wire.connected(WORKER, SERVER) and not pair.server_wire.connected(SERVER, WORKER)
    assert pair.server.ends.empty()


def test_closing_sends_what_is_queued_and_tells_each_end_once(transports):
    pair = Pair(transports)
    body = torch.arange(float(MEGABYTE))
    for i in range(20):
        pair.to_server(values(body, i))
    pair.worker_wire.close()
    assert [pair.server.next().version for _ in range(20)] == list(range(20))
    assert "closed" in pair.server.end()
    assert pair.worker.end() == "closed on this side"
    transports.close()
    assert pair.server.ends.empty() and pair.worker.ends.empty()
    with pytest.raises(TransportError):
        pair.to_server(Fetch(round=1))
    with pytest.raises(TransportError, match="closed"):
        pair.worker_wire.attach(Address(Role.WORKER, 5, 5), Recorder())


def test_a_resident_may_close_the_transport_from_its_own_thread(transports):
    pair = Pair(transports)
    pair.server.on_handle = lambda sender, message: pair.server_wire.close()
    pair.to_server(Fetch(round=1))
    pair.server.next()
    assert "closed" in pair.worker.end()
    assert "closed" in pair.server.end()


def test_many_threads_may_send(transports):
    pair = Pair(transports)

    def work(thread: int) -> None:
        for i in range(50):
            pair.to_server(Push(thread, i, 100, 1.0, b"", body=torch.full((100,), 1000.0 * thread + i)))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    last = dict.fromkeys(range(6), -1)
    for _ in range(300):
        got = pair.server.next()
        assert got.ordinal == last[got.step] + 1
        last[got.step] = got.ordinal
        assert torch.equal(got.body, torch.full((100,), 1000.0 * got.step + got.ordinal))
    for thread in threads:
        thread.join()


def test_residents_of_one_process_are_told_apart(transports):
    here, there = transports.wire(), transports.wire()
    servers = {Address(Role.SERVER, 0, i): Recorder() for i in range(3)}
    workers = {Address(Role.WORKER, 1, i): Recorder() for i in range(2)}
    urls = {address: there.attach(address, server) for address, server in servers.items()}
    for me, worker in workers.items():
        here.attach(me, worker)
        for peer, url in urls.items():
            here.connect(me, peer, url)
            here.connect(me, peer, url)  # a way that is there already stays
            here.send(me, peer, Fetch(round=10 * me.index + peer.index))
    for address, server in servers.items():
        got = {server.got.get(timeout=WAIT) for _ in workers}
        assert got == {(me, Fetch(round=10 * me.index + address.index)) for me in workers}
        for me in workers:
            there.send(address, me, Fetch(round=address.index))
    for worker in workers.values():
        assert {worker.got.get(timeout=WAIT) for _ in servers} == {(a, Fetch(round=a.index)) for a in servers}
        assert worker.ends.empty()


@sockets
def test_a_peer_that_dials_in_the_first_moment_finds_every_endpoint(transports, monkeypatch):
    """The URL may be known in advance, as that of a server that was started by hand."""
    near, far = transports.wire(), transports.wire()
    servers = {Address(Role.SERVER, 0, i): Recorder() for i in range(2)}
    near.attach(WORKER, Recorder())
    listen, begin, known = far._listen, Listener.start, []

    def noted() -> tuple[socket.socket, str]:
        sock, url = listen()
        known.append(url)
        return sock, url

    def dialed_at_once(listener: Listener) -> None:
        begin(listener)
        for server in servers:
            near.connect(WORKER, server, known[0])

    monkeypatch.setattr(far, "_listen", noted)
    monkeypatch.setattr(Listener, "start", dialed_at_once)
    far.attach_together(servers)
    for server, recorder in servers.items():
        near.send(WORKER, server, Fetch(round=1))
        assert recorder.next() == Fetch(round=1)


def test_a_peer_that_does_not_live_there(transports):
    pair = Pair(transports)
    stranger = Address(Role.SERVER, 7, 7)
    with pytest.raises(TransportError, match="server 7/7"):
        pair.worker_wire.connect(WORKER, stranger, pair.url)
    with pytest.raises(TransportError, match="not attached here"):
        pair.worker_wire.connect(stranger, SERVER, pair.url)
    with pytest.raises(TransportError, match="attached already"):
        pair.worker_wire.attach(WORKER, Recorder())
    with pytest.raises(TransportError, match="no connection from worker 0/1 to server 7/7"):
        pair.worker_wire.send(WORKER, stranger, Fetch(round=1))


def test_traffic_counts_every_byte_of_a_payload(transports):
    pair = Pair(transports)
    pair.to_server(values(transports.tensor(pair.worker_wire, 1000)))
    pair.to_server(values(torch.zeros(1000)))
    for _ in range(2):
        pair.server.next()
    out, _ = pair.worker_wire.traffic()
    _, into = pair.server_wire.traffic()
    assert out == into
    assert 0 <= out - 2 * (4000 + HEADER_BYTES) < 100
    if pair.worker_wire is not pair.server_wire:  # inside a process there are no sockets
        assert pair.worker_wire.sent() == {(WORKER, SERVER): out}
    transports.close()
    assert pair.worker_wire.traffic()[0] == out
    if pair.worker_wire is not pair.server_wire:
        assert pair.worker_wire.sent() == {(WORKER, SERVER): out}


def test_nothing_is_left_after_closing(request):
    def open_files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    gc.freeze()  # what is here already is looked at no more, which would take seconds
    request.addfinalizer(gc.unfreeze)
    for kind in TRANSPORTS:
        before = open_files(), threading.active_count()
        transports = TransportGroup(kind)
        pair = Pair(transports, server=Recorder(place_view))
        for numel in (100, 3 * MEGABYTE):
            pair.to_server(values(transports.tensor(pair.worker_wire, numel)))
            pair.server.next()
        with pytest.raises(TransportError):
            pair.worker_wire.connect(WORKER, Address(Role.SERVER, 7, 7), pair.url)
        transports.close()
        shutil.rmtree(transports.directory, ignore_errors=True)
        del pair, transports
        after = open_files(), threading.active_count()
        assert after[0] <= before[0] and after[1] <= before[1], (kind, before, after)


# --- transports of sockets ---------------------------------------------------------------------------------------


@sockets
def test_a_restarted_peer_replaces_its_older_self_and_never_the_other_way_round(transports):
    """Nothing leaves on the newer connection before the end of the older one is handled."""
    sent = []

    class Answering(Recorder):
        def lost(self, peer, reason):
            for _ in range(2):  # as another thread would that sends while the older connection ends
                with suppress(TransportError):
                    pair.to_worker(Fetch(round=7))
                    sent.append(peer)
            super().lost(peer, reason)

    pair = Pair(transports, server=Answering())
    again, after = transports.wire(incarnation=2), Recorder()
    again.attach(WORKER, after)
    again.connect(WORKER, SERVER, pair.url)
    assert "replaced" in pair.server.end()
    assert not sent
    again.send(WORKER, SERVER, Fetch(round=1))
    assert pair.server.next() == Fetch(round=1)
    pair.to_worker(Fetch(round=2))
    assert after.next() == Fetch(round=2)
    pair.worker.end()
    with pytest.raises(Refused, match="was replaced by 2") as refused:
        pair.worker_wire.connect(WORKER, SERVER, pair.url)
    assert refused.value.code == "FENCED"


@sockets
def test_addresses_of_another_transport_are_refused(transports):
    pair = Pair(transports)
    with pytest.raises(TransportError, match="this transport takes"):
        pair.worker_wire.connect(WORKER, Address(Role.SERVER, 1, 1), "http://127.0.0.1:80")


def test_plain_tcp_stays_on_this_machine():
    wire = TcpTransport(identity())
    wire.attach(WORKER, Recorder())
    for url, text in (
        ("tcp://10.0.0.1:5", "loopback"),
        ("tcp://127.0.0.1", "ADDRESS:PORT"),
        ("tcp://127.0.0.1:x", "x"),
    ):
        with pytest.raises(TransportError, match=text):
            wire.connect(WORKER, SERVER, url)
    wire.close()


def test_tcp_ports_are_searched_upward():
    first = TcpTransport(identity())
    port = int(first.attach(WORKER, Recorder()).rpartition(":")[2])
    second = TcpTransport(identity(), start_port=port)
    assert port < int(second.attach(WORKER, Recorder()).rpartition(":")[2])
    for wire in (first, second):
        wire.close()
    with pytest.raises(TransportError, match="start_port = 70000"):
        TcpTransport(identity(), start_port=70000)
    third = TcpTransport(identity())
    third.attach(WORKER, Recorder())
    with pytest.raises(TransportError, match="cannot reach"):
        third.connect(WORKER, SERVER, f"tcp://127.0.0.1:{port}")
    third.close()


def test_the_directory_of_sockets_is_closed_to_others_and_short(tmp_path, monkeypatch):
    wire = SharedMemoryTransport(identity(), str(tmp_path), ProcessMemory())
    user, (here, there) = os.geteuid(), socket.socketpair()
    with closing(wire), here, there, monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(TransportError, match=f"belongs to user {user}"):
            wire._inspect(here)
    tmp_path.chmod(0o755)
    with pytest.raises(TransportError, match="0700"):
        SharedMemoryTransport(identity(), str(tmp_path), ProcessMemory())
    with pytest.raises(TransportError, match="too long for a Unix socket"):
        SharedMemoryTransport(identity(), str(tmp_path / ("x" * 90)), ProcessMemory())


# --- shared memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [1, 63, 1000, ARENA // 4, ARENA])
def test_memory_is_zero_aligned_and_found(numel):
    memory = ProcessMemory()
    tensors = [memory.allocate(numel, torch.float32) for _ in range(3)]
    places = set()
    for i, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.any()
        tensor.fill_(i)
        region, offset = memory.find(tensor)
        places.add((region.id, offset))
        assert memory.find(tensor[numel // 2 :]) == (region, offset + numel // 2 * 4)
    assert [tensor.mean().item() for tensor in tensors] == [0, 1, 2]
    assert len(places) == 3
    assert memory.find(torch.zeros(10)) is None
    assert memory.find(memory.allocate(0, torch.float32)) is None


def test_adopted_memory_is_one_for_all_and_has_one_size():
    fd = unsized_memfd()
    first, second = ProcessMemory(), ProcessMemory()
    a, b = first.adopt(fd, 4096), second.adopt(fd, 4096)
    a.tensor(64, 3, torch.float32).copy_(torch.arange(3.0))
    assert b.tensor(64, 3, torch.float32).tolist() == [0, 1, 2]
    assert b.tensor(64, 3, torch.float32).untyped_storage().nbytes() == 12
    with pytest.raises(TransportError, match="4096 bytes, this process needs 8192"):
        ProcessMemory().adopt(fd, 8192)
    os.close(fd)
    assert second.find(b.tensor(64, 3, torch.float32)) == (b, 64)


def test_regions_of_a_peer_must_be_sealed_and_of_their_size(tmp_path):
    with open(tmp_path / "file", "w+b") as file:
        file.truncate(4096)
        with pytest.raises(ProtocolError, match=r"cannot be mapped|not sealed"):
            ProcessMemory().map(os.dup(file.fileno()), 4096)
    fd = unsized_memfd()
    os.ftruncate(fd, 4096)
    with pytest.raises(ProtocolError, match="not sealed"):
        ProcessMemory().map(os.dup(fd), 4096)
    ProcessMemory().adopt(fd, 4096)
    with pytest.raises(ProtocolError, match="is 4096 bytes"):
        ProcessMemory().map(os.dup(fd), 8192)
    assert ProcessMemory().map(fd, 4096).numel() == 4096


@pytest.mark.parametrize("transports", ["shm"], indirect=True)
def test_a_view_outlives_the_connection_and_its_sender(transports):
    pair = Pair(transports, server=Recorder(place_view))
    body = pair.worker_wire.memory.allocate(MEGABYTE, torch.float32).fill_(7)
    pair.to_server(Init(bucket=MEGABYTE, body=body))
    seen: Message = pair.server.next()
    transports.close()
    del body, pair
    gc.collect()
    assert seen.body.view(torch.float32).mean() == 7


@sockets
def test_a_peer_that_is_gone_when_its_connection_is_accepted_can_come_again(transports, monkeypatch):
    worker, server, resident = transports.wire(), transports.wire(), Recorder()
    url = server.attach(SERVER, resident)
    worker.attach(WORKER, Recorder())
    gone = iter([OSError("not connected")])

    def watch(connection, channels):
        for error in gone:
            raise error

    monkeypatch.setattr(server, "_watch_over", watch)
    with suppress(TransportError):
        worker.connect(WORKER, SERVER, url)
    worker.connect(WORKER, SERVER, url)
    worker.send(WORKER, SERVER, Fetch(round=1))
    assert resident.next() == Fetch(round=1)
    assert next(gone, None) is None
