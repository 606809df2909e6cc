"""Strangers: however many connect, and whatever they have overheard or stolen, none is accepted.

TOPOTRAIN_FUZZ_FRAMES divided by 20 is how many come (50 if it says nothing, 1,000 in `make soak`),
TOPOTRAIN_FUZZ_SEED which.
"""

import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress

import pytest
from random_frames import SEED, FrameGenerator, share
from transport_pairs import SERVER, TOKEN, WORKER, Tap, identity

from topotrain.comm.security import handshake
from topotrain.comm.security.handshake import Peer, answer, dial
from topotrain.comm.transport import Refused, TransportError
from topotrain.config.topology import Address, Role

OTHER = Address(Role.SERVER, 0, 1)
US = identity(generation=3, incarnation=5)


def accepted(connect_and_speak: Callable[[socket.socket], object]) -> Peer | TransportError:
    """Let a peer connect and hang up; return it as the acceptor knows it, or the reason why it is none."""
    a, b = socket.socketpair()
    heard: list[Peer | TransportError] = []

    def hear() -> None:
        with closing(b), suppress(OSError):  # the peer does not wait for its welcome
            try:
                peer, welcome = answer(b, US, {SERVER}, 5)
                heard.append(peer)
                b.sendall(welcome)
            except TransportError as error:
                heard.append(error)

    thread = threading.Thread(target=hear)
    thread.start()
    with closing(a):
        with suppress(TransportError, OSError):
            connect_and_speak(a)
        with suppress(OSError):
            a.shutdown(socket.SHUT_RDWR)
    thread.join(20)
    return heard[0]


def member(sock: socket.socket) -> None:
    dial(sock, US, WORKER, SERVER, 5)


# --- who comes -----------------------------------------------------------------------------------------------------


def token_of_a_stranger(rng: FrameGenerator) -> Callable[[socket.socket], object]:
    token = bytearray(TOKEN)
    match rng.random.randrange(3):
        case 0:
            token = bytearray(rng.random.randbytes(32))
        case 1:
            token[rng.random.randrange(32)] ^= 1 << rng.random.randrange(8)
        case _:
            token = bytearray(32)
    return lambda sock: dial(sock, identity(token=bytes(token), generation=3), WORKER, SERVER, 5)


def listener(rng: FrameGenerator) -> Callable[[socket.socket], object]:
    """Who has heard handshakes that went well says the same again, or parts of several."""
    first, second = rng.random.choice(TAPES), rng.random.choice(TAPES)

    def connect_and_speak(sock: socket.socket) -> None:
        sock.sendall(first[1])
        sock.settimeout(5)
        sock.recv(400)
        sock.sendall(second[2])

    return connect_and_speak


def worker_that_would_be_a_server(rng: FrameGenerator) -> Callable[[socket.socket], object]:
    """It has the key with which workers prove themselves, and no other."""
    return lambda sock: proven_with(sock, handshake._key(US, "dial", WORKER), Address(Role.SERVER, 0, 1))


def server_that_was_called(rng: FrameGenerator) -> Callable[[socket.socket], object]:
    """It has the keys of those who answer."""
    key = handshake._key(US, "answer", rng.random.choice((WORKER, SERVER)))
    return lambda sock: proven_with(sock, key, rng.random.choice((WORKER, OTHER)))


def proven_with(sock: socket.socket, key: bytes, me: Address) -> None:
    talk = handshake._Turns(sock, 5)
    hello = handshake._HELLO.pack(
        *handshake.VERSIONS, handshake._job_hash(US), *me, *SERVER, 5, 3, 0, 1, bytes(16), bytes(32)
    )
    talk.send(handshake._KIND_HELLO, hello)
    talk.receive(handshake._KIND_CHALLENGE, handshake._CHALLENGE.size, 32)
    talk.send_proven(handshake._KIND_PROOF, US.digest.encode().ljust(64, b"\0"), key)
    talk.receive(handshake._KIND_WELCOME, 0, 32)


def mirror(rng: FrameGenerator) -> Callable[[socket.socket], object]:
    """Sends our own proof back."""

    def connect_and_speak(sock: socket.socket) -> None:
        sock.sendall(rng.random.choice(TAPES)[1])
        sock.settimeout(5)
        challenge = sock.recv(400)
        sock.sendall(b"ttHS\x03" + struct.pack("<H", 96) + US.digest.encode() + challenge[-32:])
        sock.recv(400)

    return connect_and_speak


STRANGERS = (
    token_of_a_stranger,
    listener,
    worker_that_would_be_a_server,
    server_that_was_called,
    mirror,
)
TAPES: list[list[bytes]] = []


@pytest.fixture(autouse=True)
def tapes() -> None:
    """Handshakes of members, as somebody on the way has recorded them."""

    def recorded(sock: socket.socket) -> None:
        tap = Tap(sock)
        dial(tap, US, WORKER, SERVER, 5)
        TAPES.append(tap.said)

    for _ in range(5):
        assert isinstance(accepted(recorded), Peer)


def test_no_stranger_is_let_in() -> None:
    rng, turned_away = FrameGenerator(SEED), Counter[str]()
    count = share(0.05)
    for number in range(count):
        kind = STRANGERS[number % len(STRANGERS)]
        heard = accepted(kind(rng))
        assert not isinstance(heard, Peer), f"seed {SEED}: {kind.__name__} came in as {heard}"
        assert TOKEN.hex() not in str(heard)
        turned_away[heard.code if isinstance(heard, Refused) else "stranger"] += 1
        if number % 50 == 0:
            assert isinstance(accepted(member), Peer)
    print(f"seed {SEED}: {count} strangers, 0 admitted, {dict(turned_away)}")
    assert turned_away["AUTH"]
