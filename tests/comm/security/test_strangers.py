"""Strangers at the door: however many come, and whatever they have heard or stolen, none is let in.

TOPOTRAIN_FUZZ_FRAMES divided by 40 is how many come (500 if it says nothing), TOPOTRAIN_FUZZ_SEED which.
"""

import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from queue import Queue

import pytest
from random_frames import SEED, Dice, share
from transport_pairs import SERVER, TOKEN, WORKER, Recorder, Town, identity

from topotrain.comm.security import handshake
from topotrain.comm.security.handshake import Peer, answer, dial
from topotrain.comm.transport import Refused, TransportError
from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Fetch

OTHER = Address(Role.SERVER, 0, 1)
US = identity(generation=3, incarnation=5)
BINDING = b"the certificate that we have shown"


@dataclass
class Door:
    """Hears whoever comes, on a thread of its own; `heard` has a peer or the reason why it was none."""

    binding: bytes = b""
    queue: "Queue[socket.socket | None]" = field(default_factory=Queue)
    heard: "Queue[Peer | TransportError]" = field(default_factory=Queue)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._hear)
        self.thread.start()

    def _hear(self) -> None:
        while (sock := self.queue.get()) is not None:
            with closing(sock):
                try:
                    peer, welcome = answer(sock, US, {SERVER}, 5, self.binding)
                    sock.sendall(welcome)
                    self.heard.put(peer)
                except TransportError as error:
                    self.heard.put(error)
                except OSError:  # the peer does not wait for its welcome
                    self.heard.put(peer)

    def come(self, visit: Callable[[socket.socket], object]) -> Peer | TransportError:
        """Somebody comes, and hangs up; what the door says of it."""
        a, b = socket.socketpair()
        self.queue.put(b)
        with closing(a):
            with suppress(TransportError, OSError):
                visit(a)
            with suppress(OSError):
                a.shutdown(socket.SHUT_RDWR)
        return self.heard.get(timeout=20)

    def close(self) -> None:
        self.queue.put(None)
        self.thread.join()


@pytest.fixture
def door() -> Iterator[Door]:
    opened = Door()
    yield opened
    opened.close()


class Tape:
    """A socket that keeps what its owner says."""

    def __init__(self, sock: socket.socket, change: Callable[[bytes], bytes] = lambda raw: raw) -> None:
        self.sock, self.change, self.said = sock, change, [b""]

    def settimeout(self, seconds: float | None) -> None:
        self.sock.settimeout(seconds)

    def sendall(self, raw: bytes, flags: int = 0) -> None:
        raw = self.change(raw)
        self.said.append(raw)
        self.sock.sendall(raw)

    def send(self, raw: bytes, flags: int = 0) -> int:
        return self.sock.send(raw, flags)

    def recv(self, size: int, flags: int = 0) -> bytes:
        return self.sock.recv(size)


def member(sock: socket.socket) -> None:
    dial(sock, US, WORKER, SERVER, 5)


# --- who comes -----------------------------------------------------------------------------------------------------


def token_of_a_stranger(dice: Dice) -> Callable[[socket.socket], object]:
    token = bytearray(TOKEN)
    match dice.random.randrange(3):
        case 0:
            token = bytearray(dice.random.randbytes(32))
        case 1:
            token[dice.random.randrange(32)] ^= 1 << dice.random.randrange(8)
        case _:
            token = bytearray(32)
    return lambda sock: dial(sock, identity(token=bytes(token), generation=3), WORKER, SERVER, 5)


def member_of_something_else(dice: Dice) -> Callable[[socket.socket], object]:
    changes = dice.random.choice(
        [{"job_id": "x"}, {"digest": "e" * 64}, {"digest": ""}, {"generation": 2}, {"generation": 0}]
    )
    wanted = dice.random.choice((SERVER, SERVER, OTHER))
    return lambda sock: dial(sock, identity(**{"generation": 3, **changes}), WORKER, wanted, 5)


def listener(dice: Dice) -> Callable[[socket.socket], object]:
    """Who has heard handshakes that went well says the same again, or parts of several."""
    first, second = dice.random.choice(TAPES), dice.random.choice(TAPES)

    def visit(sock: socket.socket) -> None:
        sock.sendall(first[1])
        sock.settimeout(5)
        sock.recv(400)
        sock.sendall(second[2])

    return visit


def worker_that_would_be_a_server(dice: Dice) -> Callable[[socket.socket], object]:
    """It has the key with which workers prove themselves, and no other."""
    return lambda sock: proven_with(sock, handshake._key(US, "dial", WORKER), Address(Role.SERVER, 0, 1))


def server_that_was_called(dice: Dice) -> Callable[[socket.socket], object]:
    """It has the keys of those who answer."""
    key = handshake._key(US, "answer", dice.random.choice((WORKER, SERVER)))
    return lambda sock: proven_with(sock, key, dice.random.choice((WORKER, OTHER)))


def proven_with(sock: socket.socket, key: bytes, me: Address) -> None:
    talk = handshake._Turns(sock, 5)
    hello = handshake._HELLO.pack(
        *handshake.VERSIONS, handshake._job_hash(US), *me, *SERVER, 5, 3, 0, 1, bytes(16), bytes(32)
    )
    talk.send(handshake._KIND_HELLO, hello)
    talk.receive(handshake._KIND_CHALLENGE, handshake._CHALLENGE.size, 32)
    talk.send_proven(handshake._KIND_PROOF, US.digest.encode().ljust(64, b"\0"), key)
    talk.receive(handshake._KIND_WELCOME, 0, 32)


def mirror(dice: Dice) -> Callable[[socket.socket], object]:
    """Sends our own proof back."""

    def visit(sock: socket.socket) -> None:
        sock.sendall(dice.random.choice(TAPES)[1])
        sock.settimeout(5)
        challenge = sock.recv(400)
        sock.sendall(b"ttHS\x03" + struct.pack("<H", 96) + US.digest.encode() + challenge[-32:])
        sock.recv(400)

    return visit


def relay_that_changes_a_word(dice: Dice) -> Callable[[socket.socket], object]:
    """A member means somebody else, or says who it is, and what stands between the two changes it."""

    def change(raw: bytes) -> bytes:
        damaged = bytearray(raw)
        damaged[dice.random.randrange(7, len(raw))] ^= 1 << dice.random.randrange(8)
        return bytes(damaged)

    return lambda sock: dial(Tape(sock, change), US, WORKER, SERVER, 5)


def no_handshake(dice: Dice) -> Callable[[socket.socket], object]:
    raw = dice.random.choice((b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", b"", dice.random.randbytes(300)))
    return lambda sock: sock.sendall(raw)


STRANGERS = (
    token_of_a_stranger,
    member_of_something_else,
    listener,
    worker_that_would_be_a_server,
    server_that_was_called,
    mirror,
    relay_that_changes_a_word,
    no_handshake,
)
TAPES: list[list[bytes]] = []


def recorded(sock: socket.socket, tapes: list[Tape]) -> None:
    tapes.append(Tape(sock))
    dial(tapes[0], US, WORKER, SERVER, 5)


@pytest.fixture(autouse=True)
def tapes(door: Door) -> None:
    """Handshakes of members, as somebody on the way has recorded them."""
    for _ in range(5):
        tapes: list[Tape] = []
        assert isinstance(door.come(lambda sock, tapes=tapes: recorded(sock, tapes)), Peer)
        TAPES.append(tapes[0].said)


def test_no_stranger_is_let_in(door: Door) -> None:
    dice, turned_away = Dice(SEED), Counter[str]()
    count = share(0.025)
    for number in range(count):
        kind = STRANGERS[number % len(STRANGERS)]
        heard = door.come(kind(dice))
        assert not isinstance(heard, Peer), f"seed {SEED}: {kind.__name__} came in as {heard}"
        assert TOKEN.hex() not in str(heard)
        turned_away[heard.code if isinstance(heard, Refused) else "stranger"] += 1
        if number % 50 == 0:
            assert isinstance(door.come(member), Peer)
    print(f"seed {SEED}: {count} strangers, 0 admitted, {dict(turned_away)}")
    assert {"AUTH", "JOB", "CONFIG", "FENCED", "stranger"} <= turned_away.keys()


def test_nobody_in_between_is_let_in_over_tls() -> None:
    """What a member says to somebody who has shown another certificate proves nothing to us."""
    dice, door = Dice(SEED + 1), Door(BINDING)
    try:
        for _ in range(share(0.005)):
            seen = dice.random.choice((b"", BINDING[::-1], dice.random.randbytes(32), BINDING + b"\0"))
            heard = door.come(lambda sock, seen=seen: believing(sock, seen))
            assert isinstance(heard, Refused) and heard.code == "AUTH"
        assert isinstance(door.come(lambda sock: dial(sock, US, WORKER, SERVER, 5, binding=BINDING)), Peer)
    finally:
        door.close()


def believing(sock: socket.socket, seen: bytes) -> None:
    """A member that has the secret, has seen another certificate and looks at nobody's proof."""
    talk = handshake._Turns(sock, 5, seen)
    hello = handshake._HELLO.pack(
        *handshake.VERSIONS, handshake._job_hash(US), *WORKER, *SERVER, 5, 3, 0, 1, bytes(16), bytes(32)
    )
    talk.send(handshake._KIND_HELLO, hello)
    talk.receive(handshake._KIND_CHALLENGE, handshake._CHALLENGE.size, 32)
    talk.send_proven(handshake._KIND_PROOF, US.digest.encode().ljust(64, b"\0"), handshake._key(US, "dial", WORKER))
    talk.receive(handshake._KIND_WELCOME, 0, 32)


@pytest.mark.parametrize("kind", ["tcp", "tls", "shm"])
def test_nobody_is_let_in_on_a_real_transport(kind: str) -> None:
    town, residents = Town(kind), (Recorder(), Recorder())
    try:
        server = town.wire(incarnation=2, patience=0.0)
        url = server.attach(SERVER, residents[0])
        true = town.wire(incarnation=2, patience=0.0)
        true.attach(WORKER, residents[1])
        true.connect(WORKER, SERVER, url)
        for number, changes in enumerate(
            [{"token": bytes(32)}, {"token": TOKEN[::-1]}, {"job_id": "x"}, {"digest": "x"}, {"incarnation": 1}] * 3
        ):
            wire = town.wire(**{"incarnation": 2, "patience": 0.0, **changes})
            wire.attach(WORKER, Recorder())
            with pytest.raises(Refused):
                wire.connect(WORKER, SERVER, url)
            assert len(server._connections) == 1, number  # type: ignore[attr-defined]
        true.send(WORKER, SERVER, Fetch(7))
        assert residents[0].next() == Fetch(7)
        assert residents[0].got.empty()
    finally:
        town.close()
