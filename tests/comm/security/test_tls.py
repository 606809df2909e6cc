"""TLS where other machines can reach: the same bytes for us, nothing for anybody else, and no way around it."""

import os
import socket
import ssl
import sys
import threading
from contextlib import closing, contextmanager, suppress
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples
from transport_pairs import SERVER, TOKEN, WAIT, WORKER, Pair, Recorder, TransportGroup, identity

from topotrain.comm.security import handshake, tls
from topotrain.comm.security.handshake import HandshakeTimeout, NotOurProtocol
from topotrain.comm.security.tls import BUDGET, Certificate, TlsChannel, client_side, server_side
from topotrain.comm.transport import Refused, TransportError, socket_transport, tcp
from topotrain.comm.transport.tcp import ListenAddress, TcpTransport, local_address
from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Fetch, Push, Values

CERTIFICATE = Certificate.make()


def over(function, *arguments):
    """Run it on a thread; the answer's `result()` waits for what it returned or raised."""
    outcome = []

    def work():
        try:
            outcome.append(function(*arguments))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()

    def result():
        thread.join(WAIT)
        assert not thread.is_alive()
        return outcome[0]

    return result


@contextmanager
def channels(trusted=True, **options):
    """Both ends of a connection; options: of their sockets."""
    ends = socket.socketpair()
    for end in ends:
        for name, value in options.items():
            end.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    listening = over(server_side, ends[0], CERTIFICATE, WAIT)
    client, seen = client_side(ends[1], WAIT)
    server, shown = listening()
    assert seen == shown == CERTIFICATE.binding
    if trusted:
        server.trust()
        client.trust()
    with server, client:
        yield server, client


# --- the channel -------------------------------------------------------------------------------------------------


def test_the_own_end_wakes_a_reader():
    with channels() as (server, client):
        waiting = over(client.recv, 10)
        client.shutdown(socket.SHUT_RDWR)
        assert waiting() == b""
        assert server.recv(10) == b""


class Dripping:
    """A socket on which a byte of a record comes every half second, of a clock that only this turns."""

    def __init__(self, monkeypatch):
        self.now, self._record = 0.0, iter(b"\x17\x03\x03\x01\x00" + bytes(256))
        monkeypatch.setattr(tls.time, "monotonic", lambda: self.now)

    def gettimeout(self):
        return None

    def settimeout(self, seconds):
        assert seconds is None or 0 < seconds <= 2

    def sendall(self, raw):
        pass

    def recv_into(self, buffer, nbytes=0, flags=0):
        self.now += 0.5
        buffer[0] = next(self._record)
        return 1

    def close(self):
        pass


class SlowLink:
    """A socket on which a packet is there at each call, or with MSG_WAITALL all that is asked for."""

    def __init__(self):
        self.sealed, self.reads = bytearray(), 0

    def sendmsg(self, buffers, ancdata=(), flags=0):
        before = len(self.sealed)
        for buffer in buffers:
            self.sealed += buffer
        return len(self.sealed) - before

    def recv_into(self, buffer, nbytes=0, flags=0):
        self.reads += 1
        count = min(len(self.sealed), nbytes or len(buffer), len(buffer) if flags & socket.MSG_WAITALL else 1448)
        buffer[:count], self.sealed = self.sealed[:count], self.sealed[count:]
        return count

    def close(self):
        pass


def test_a_large_body_takes_few_reads_on_a_slow_link():
    sizes = (1 << 20, 40, 300_000, 7)
    with channels() as (server, client), server._sock, client._sock:
        link = SlowLink()
        server.relay(link)
        client.relay(link)
        for size in sizes:
            client.sendall(bytes(size))
        for size in sizes:
            assert server.recv_into(bytearray(size), 0, socket.MSG_WAITALL) == size
    assert link.reads < 30 * len(sizes)  # of a megabyte there are 730 packets


def test_a_timeout_holds_for_the_whole_call_not_for_each_part(monkeypatch):
    with channels() as (server, _):
        raw = server._sock
        server.relay(Dripping(monkeypatch))
        server.settimeout(2.0)
        with pytest.raises(TimeoutError):
            server.recv(1)
        raw.close()
    drips = Dripping(monkeypatch)
    with pytest.raises(HandshakeTimeout):
        server_side(drips, CERTIFICATE, 2.0)
    assert drips.now <= 2.0


def test_who_is_not_trusted_cannot_fill_the_memory():
    with channels(trusted=False) as (server, client):
        sent = over(lambda: [client.sendall(b"x") for _ in range(2 * BUDGET // 23)])
        with pytest.raises(NotOurProtocol, match=f"more than {BUDGET} bytes"):
            server.recv_into(bytearray(BUDGET // 20), 0, socket.MSG_WAITALL)
        server.close()
        sent()


def test_every_certificate_is_another_and_its_key_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert Certificate.make().binding != CERTIFICATE.binding
    assert os.listdir(tmp_path) == []
    assert "context" not in repr(CERTIFICATE)
    assert CERTIFICATE.context.num_tickets == 0


def shake_and_close(channel):
    with channel:
        channel.shake_hands(WAIT)


def old_context(side):
    """Of a peer that speaks TLS 1.2 at most, and would go on with it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if side == "client" else Certificate.make().context
    if side == "client":
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


@pytest.mark.parametrize("old", ["client", "server"])
def test_older_versions_are_refused(old):
    here, there = socket.socketpair()
    with closing(here), closing(there):
        side = "server" if old == "server" else "client"
        other = over(shake_and_close, TlsChannel(there, old_context(side), side == "server"))
        with pytest.raises(NotOurProtocol, match="TLS"):
            server_side(here, CERTIFICATE, WAIT) if old == "client" else client_side(here, WAIT)
        here.close()
        assert isinstance(other(), NotOurProtocol)


# --- the proof is bound to the certificate -----------------------------------------------------------------------


@pytest.fixture
def transports():
    transports = TransportGroup("tls")
    yield transports
    transports.close()


def port_of(url):
    return int(url.rpartition(":")[2])


@contextmanager
def in_between(url, certificate):
    """Somebody on the way: passes everything on. With a certificate of its own it reads all of it, too."""
    seen = bytearray()
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def pump(source, target):
            with suppress(OSError, TransportError):
                while raw := source.recv(4096):
                    seen.extend(raw)
                    target.sendall(raw)
            with suppress(OSError):
                target.shutdown(socket.SHUT_WR)

        def meddle():
            with listener.accept()[0] as near, socket.create_connection(("127.0.0.1", port_of(url))) as far:
                ends = near, far
                if certificate is not None:
                    ends = server_side(near, certificate, WAIT)[0], client_side(far, WAIT)[0]
                back = over(pump, ends[1], ends[0])
                pump(*ends)
                back()

        done = over(meddle)
        yield f"tls://127.0.0.1:{listener.getsockname()[1]}", seen
        done()


def test_somebody_in_between_is_found_out(transports):
    server = transports.wire()
    residents = Recorder(), Recorder()
    url = server.attach(SERVER, residents[0])
    for certificate in (Certificate.make(), None):
        wire = TcpTransport(identity(), tls=True)
        wire.attach(WORKER, residents[1])
        with in_between(url, certificate) as (fake, seen):
            if certificate is None:  # who only passes the sealed bytes on is a wire like any other
                wire.connect(WORKER, SERVER, fake)
                wire.send(WORKER, SERVER, Fetch(round=3))
                assert residents[0].next() == Fetch(round=3)
            else:
                with pytest.raises(Refused, match="could not prove") as refused:
                    wire.connect(WORKER, SERVER, fake)
                assert refused.value.code == "AUTH"
                assert bytes(seen).startswith(handshake.MAGIC)  # it did read what was said, and it was of no use
            assert TOKEN not in seen
            wire.close()
    assert residents[0].got.empty()


# --- the transport ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "first"), [("tcp", "both"), ("tls", "server"), ("tls", "both"), ("tls", "leave")])
def test_whoever_closes_first_all_arrives_and_both_end(kind, first):
    for count in (0, 3):
        transports = TransportGroup(kind)
        pair = Pair(transports)
        closing_ = {
            "server": [pair.server_wire.close],
            "both": [pair.worker_wire.close, pair.server_wire.close],
            "leave": [lambda pair=pair: pair.worker_wire.leave(WORKER)],
        }
        for number in range(count):
            pair.to_server(Push(0, 0, 100_000, float(number), b"\1", body=torch.full((100_000,), float(number))))
            pair.to_worker(Values(number, 100_000, 0, body=torch.full((100_000,), float(number))))
        for waiting in [over(close) for close in closing_[first]]:
            assert waiting() is None
        ends = {pair.server.end(), pair.worker.end()}
        assert ends <= {"closed on this side", "closed by the peer"}
        for heard in (pair.server, pair.worker):
            assert [heard.next().body[0].item() for _ in range(count)] == list(range(count))
        transports.close()


@given(st.binary(max_size=300))
@settings(max_examples=examples(100), deadline=None)
def test_random_bytes_are_strangers(raw):
    for speak in (partial(server_side, certificate=CERTIFICATE, seconds=WAIT), partial(client_side, seconds=WAIT)):
        a, b = socket.socketpair()
        with closing(b):
            with closing(a):
                a.sendall(raw)
                a.shutdown(socket.SHUT_WR)
            with pytest.raises(TransportError):
                speak(b)


def test_silence_has_a_deadline_on_both_sides(monkeypatch):
    for speak in (partial(server_side, certificate=CERTIFICATE), client_side):
        a, b = socket.socketpair()
        with closing(a), closing(b), pytest.raises(HandshakeTimeout, match="too slow"):
            speak(b, seconds=0.02)
    monkeypatch.setattr(socket_transport, "_HEARING", 0.02)
    transports = TransportGroup("tls")
    wire = transports.wire()
    with closing(socket.create_connection(("127.0.0.1", port_of(wire.attach(WORKER, Recorder()))), WAIT)) as silent:
        assert silent.recv(1) == b""
    transports.close()
    assert wire.refusals()["STRANGER"] == 1


def test_neither_side_speaks_plain_where_the_other_wants_tls(transports):
    pair = Pair(transports)
    plain, sealed = TcpTransport(identity(), patience=0.0), transports.wire(patience=0.0)
    me = Address(Role.WORKER, 5, 5)
    sealed.attach(WORKER, Recorder())
    port = port_of(plain.attach(me, Recorder()))
    with pytest.raises(NotOurProtocol, match=r"closed the connection|reset"):
        plain.connect(me, SERVER, f"tcp://127.0.0.1:{port_of(pair.url)}")
    with pytest.raises(NotOurProtocol, match=r"closed the connection|reset"):
        sealed.connect(WORKER, me, f"tls://127.0.0.1:{port}")
    plain.close()
    assert pair.server.ends.empty()


# --- which addresses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0", "::ffff:0.0.0.0"])
def test_nobody_listens_on_every_interface(host):
    with pytest.raises(TransportError, match="stands for every interface; must be the address of one"):
        TcpTransport(identity(), host=host)


@pytest.mark.parametrize("host", ["", "192.0.2.7", "224.0.0.1", "2001:db8::1", "no name", "x" * 300])
def test_an_address_must_be_one_of_this_machine(host):
    with pytest.raises(TransportError, match=r"host = .*: must be an address"):
        local_address(host)


def test_a_name_is_what_it_stands_for_here(monkeypatch):
    known = [("192.0.2.7", 0), ("fe80::1%lo", 0, 0, 1), ("127.0.0.3", 0)]
    monkeypatch.setattr(tcp.socket, "getaddrinfo", lambda *a, **b: [(0, 0, 0, "", address) for address in known])
    assert local_address("machine") == ListenAddress(socket.AF_INET, "127.0.0.3", True)
    assert local_address("localhost").loopback
    del known[2]
    with pytest.raises(TransportError, match="must be an address of this machine"):
        local_address("machine")


def test_no_other_machine_reaches_us_without_a_secret_or_tls(monkeypatch):
    monkeypatch.setattr(tcp, "local_address", lambda host: ListenAddress(socket.AF_INET, host, host.startswith("127.")))
    with pytest.raises(TransportError, match="needs a secret"):
        TcpTransport(identity(token=bytes(32)), host="10.9.8.7")
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(TransportError, match=r"pip install 'topotrain\[tls\]'"):
        TcpTransport(identity(), host="10.9.8.7")
    TcpTransport(identity(token=bytes(32)), host="127.0.0.1")
