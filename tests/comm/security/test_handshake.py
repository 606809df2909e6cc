"""The handshake: which peers are accepted, and that a stranger costs next to nothing."""

import shutil
import socket
import struct
import threading
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_targets import wait_for
from seeds import examples
from transport_pairs import SERVER, TOKEN, WAIT, WORKER, Pair, Tap, TransportGroup, identity

from topotrain.comm.security import handshake
from topotrain.comm.security.handshake import CODES, NotOurProtocol, Peer, answer, dial
from topotrain.comm.transport import Refused, TransportError, socket_transport
from topotrain.core.protocol import Fetch


def meet(dialer, answerer, change=lambda raw: raw, seconds=5.0):
    """Both outcomes of a handshake, and the dialer's tap."""
    a, b = socket.socketpair()
    heard = []

    def hear():
        try:
            peer, welcome = answer(b, answerer, {SERVER}, seconds=5)
            b.sendall(welcome)
            heard.append(peer)
        except TransportError as error:
            heard.append(error)
        b.close()

    thread = threading.Thread(target=hear)
    thread.start()
    with closing(a):
        tap = Tap(a, change)
        try:
            said = dial(tap, dialer, WORKER, SERVER, seconds=seconds)
        except TransportError as error:
            said = error
    thread.join()
    return said, heard[0], tap


def test_each_side_learns_the_others_identity():
    said, heard, tap = meet(identity(incarnation=3), identity(incarnation=4, generation=2))
    assert said == Peer(WORKER, SERVER, incarnation=4, generation=2) or said.code == "FENCED"
    said, heard, tap = meet(identity(incarnation=3, generation=5), identity(incarnation=4, generation=5))
    assert said == Peer(WORKER, SERVER, incarnation=4, generation=5)
    assert heard == Peer(SERVER, WORKER, incarnation=3, generation=5)
    for raw in (b"".join(tap.said), tap.got):
        assert len(raw) <= 512
        assert TOKEN not in raw


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"job_id": "x"}, "JOB"),
        ({"digest": "x"}, "CONFIG"),
        ({"token": bytes(32)}, "AUTH"),
        ({"generation": 1}, "FENCED"),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_each_mismatch_has_its_code(changes, code, turned):
    us = identity(generation=2)
    them = identity(**{"generation": 2} | changes)
    said, heard, tap = meet(*((us, them) if turned else (them, us)))
    assert isinstance(said, Refused) and said.code == code, said
    assert not isinstance(heard, Peer)
    assert len(tap.got) <= 512
    if code in ("JOB", "AUTH"):
        assert us.digest.encode() not in tap.got + b"".join(tap.said)  # a config is no business of strangers


def test_a_later_version_without_ours_is_refused(monkeypatch):
    def newer(raw):
        return raw.replace(b"ttHS\x01" + raw[5:7] + b"\x01\x01", b"ttHS\x01" + raw[5:7] + b"\x02\x07")

    said, heard, _ = meet(identity(), identity(), change=newer)
    assert said.code == heard.code == "VERSION"
    assert "versions 2 to 7" in said.text and "version 1" in said.text


@given(st.integers(0, 240), st.integers(1, 255))
@settings(max_examples=examples(150))
def test_every_changed_byte_is_noticed(position, flip):
    def change(raw, seen=[0]):  # noqa: B006  # one count for all messages of this handshake
        start, seen[0] = seen[0], seen[0] + len(raw)
        if not start <= position < start + len(raw):
            return raw
        at = position - start
        return raw[:at] + bytes([raw[at] ^ flip]) + raw[at + 1 :]

    said, heard, tap = meet(identity(), identity(), change=change, seconds=0.2)
    if position < sum(map(len, tap.said)):
        assert isinstance(said, TransportError) and isinstance(heard, TransportError)


@given(st.binary(max_size=600))
@settings(max_examples=examples(300))
def test_random_bytes_are_strangers(raw):
    for speak in (
        lambda s: answer(s, identity(), {SERVER}, 1),
        lambda s: dial(s, identity(), WORKER, SERVER, 1),
    ):
        a, b = socket.socketpair()
        with closing(b):
            with closing(a):
                a.sendall(raw)
                a.shutdown(socket.SHUT_WR)
            with pytest.raises(TransportError):
                speak(b)


def test_a_refusal_of_unknown_code_and_odd_text_is_harmless():
    for body, kind in ((bytes([99]) + b"x", NotOurProtocol), (bytes([CODES.index("FULL")]) + b"\x1b[31m\xff", Refused)):
        a, b = socket.socketpair()
        with closing(a), closing(b):
            a.sendall(b"ttHS\x05" + struct.pack("<H", len(body)) + body)
            with pytest.raises(kind) as refused:
                dial(b, identity(), WORKER, SERVER)
            assert "\x1b" not in str(refused.value)


def test_silence_has_a_deadline_also_drop_by_drop(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(handshake.time, "monotonic", lambda: now[0])

    class Dripping:
        def settimeout(self, seconds):
            assert 0 < seconds <= 2

        def recv(self, size):
            now[0] += 0.5
            return b"t"

    with pytest.raises(NotOurProtocol, match="too slow"):
        answer(Dripping(), identity(), {SERVER})
    assert now[0] == 2.0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"token": b"short"}, "token of 5 bytes: must have 32"),
        ({"job_id": ""}, "job_id"),
        ({"digest": "x" * 65}, "digest"),
        ({"digest": "é"}, "digest"),
        ({"generation": -1}, "generation = -1"),
        ({"incarnation": 1 << 63}, "incarnation"),
    ],
)
def test_an_identity_is_checked_and_keeps_its_secret(changes, text):
    with pytest.raises(ValueError, match=text):
        identity(**changes)
    assert "token" not in repr(identity())


# --- the handshake of a real transport --------------------------------------------------------------------------------


@pytest.fixture
def pair():
    transports = TransportGroup("tcp")
    yield Pair(transports)
    transports.close()


@pytest.mark.parametrize(("kind", "proven"), [("tcp", False), ("shm", True)])
def test_a_handshake_that_is_answered_too_late_is_tried_again(monkeypatch, kind, proven):
    """Also when all but the welcome was said in time: the attempt given up must not end the one that counts."""
    attempts, through = [], threading.Event()

    def slow_at_first(sock, *args):
        attempts.append(sock)
        if len(attempts) > 1:
            return answer(sock, *args)
        heard = answer(sock, *args) if proven else None
        assert through.wait(WAIT)
        return heard or answer(sock, *args)

    monkeypatch.setattr(socket_transport, "answer", slow_at_first)
    monkeypatch.setattr(socket_transport, "DEADLINE", 0.1)  # of who dials
    transports = TransportGroup(kind)
    pair = Pair(transports)
    through.set()
    wait_for(lambda: pair.server_wire.refusals().get("STRANGER"))
    assert len(attempts) > 1
    pair.to_server(Fetch(round=1))
    assert pair.server.next() == Fetch(round=1)
    assert pair.server.ends.empty() and pair.worker.ends.empty()
    transports.close()
    shutil.rmtree(transports.directory, ignore_errors=True)
