"""What TLS costs on the TCP transport: `python -m benchmarks.tls [--rounds N]`.

Rule: two processes on this machine, one thread each for PyTorch, and one transport twice: plain, as on loopback, and
under TLS 1.3, as on every other address. Both are open all the time and are measured in turn (A B A B ...).

    one way        40 MB in bodies of 1 MB, until the receiver's word that all is there
    there and back the same, and the receiver sends a body of 1 MB for each
    small          a message without a body and its answer
    sealing        AES-GCM alone, on one core, in `ssl`'s own memory: what no socket can exceed

A link to another machine is mostly slower than any of these: then TLS costs processor time and nothing else.
"""

import argparse
import multiprocessing
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from benchmarks.harness import ROUNDS, Row, interleave, row
from benchmarks.record import run_table
from topotrain.comm.security.handshake import TOKEN_BYTES, Identity
from topotrain.comm.security.tls import PIECE, Certificate, TlsChannel, client_side, server_side
from topotrain.comm.transport.tcp import TcpTransport
from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Fetch, Message, Values

NAME, TITLE, GOALS = "tls", "TLS on the TCP transport", ()
BODIES, NUMEL = 40, 1 << 18  # 1 MB each
SMALL = 200
SEALED = 1 << 28
WAYS = ("plain", "TLS")
HERE, THERE = Address(Role.WORKER, 0, 0), Address(Role.SERVER, 0, 0)
BACK = 1 << 30  # the bit of `version` that asks for a body in return


class End:
    """One side: takes bodies into memory that is there, answers, and counts what it waits for."""

    def __init__(self, wire: TcpTransport, me: Address, peer: Address) -> None:
        self._wire, self._me, self._peer = wire, me, peer
        self.mine = torch.full((NUMEL,), float(me.role) + 1)
        self.into = torch.zeros(BODIES, NUMEL)
        self._left, self._came = 0, threading.Event()

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        return self.into[message.bucket] if isinstance(message, Values) else None

    def handle(self, sender: Address, message: Message) -> None:
        if self._me == HERE:
            self._left -= 1
            if not self._left:
                self._came.set()
        elif isinstance(message, Fetch):
            self._wire.send(self._me, self._peer, message)
        elif isinstance(message, Values) and message.version == BACK:
            self._wire.send(self._me, self._peer, Values(0, message.bucket, 0, body=self.mine))

    def lost(self, peer: Address, reason: str) -> None:
        pass

    def _ask(self, answers: int, bodies: int, version: int, fetch: bool) -> float:
        self._left = answers
        self._came.clear()
        began = time.perf_counter()
        for bucket in range(bodies):
            self._wire.send(self._me, self._peer, Values(0, bucket, version, body=self.mine))
        if fetch:
            self._wire.send(self._me, self._peer, Fetch(0))
        self._came.wait()
        return time.perf_counter() - began

    def one_way(self) -> float:
        return self._ask(1, BODIES, 0, True)

    def there_and_back(self) -> float:
        return self._ask(BODIES, BODIES, BACK, False)

    def small(self) -> float:
        return sum(self._ask(1, 0, 0, True) for _ in range(SMALL)) / SMALL


def wires(token: bytes) -> dict[str, TcpTransport]:
    identity = Identity("bench", token, 1, 0, "")
    return {name: TcpTransport(identity, tls=name == "TLS") for name in WAYS}


def other(pipe: Connection, token: bytes) -> None:
    """The process at the far end."""
    torch.set_num_threads(1)
    transports = wires(token)
    pipe.send({name: wire.attach(THERE, End(wire, THERE, HERE)) for name, wire in transports.items()})
    pipe.recv()
    for wire in transports.values():
        wire.close()


def sealing() -> float:
    """Bytes per second that one core seals, as the transport does it, with nothing to send them to."""
    ends, certificate = socket.socketpair(), Certificate.make()
    found: list[TlsChannel] = []
    thread = threading.Thread(target=lambda: found.append(server_side(ends[0], certificate)[0]))
    thread.start()
    client, _ = client_side(ends[1])
    thread.join()
    piece = memoryview(bytearray(PIECE))
    began = time.perf_counter()
    for _ in range(SEALED // PIECE):
        client._seal([piece])
    spent = time.perf_counter() - began
    for channel in (client, *found):
        channel.close()
    return SEALED / spent


def measure(options: argparse.Namespace) -> Sequence[Row]:
    """All rows."""
    torch.set_num_threads(1)
    token = secrets.token_bytes(TOKEN_BYTES)
    pipe, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=other, args=(far, token))
    process.start()
    urls = pipe.recv()
    transports = wires(token)
    ends = {name: End(wire, HERE, THERE) for name, wire in transports.items()}
    for name, wire in transports.items():
        wire.attach(HERE, ends[name])
        wire.connect(HERE, THERE, urls[name])
    rows: list[Row] = []
    megabytes = BODIES * NUMEL * 4 / 1e6
    for work, sent in (("one_way", megabytes), ("there_and_back", 2 * megabytes), ("small", 0.0)):
        measured = interleave({name: getattr(end, work) for name, end in ends.items()}, options.rounds)
        plain, sealed = measured["plain"].median, measured["TLS"].median
        note = f"plain {sent / plain / 1e3:.2f}, TLS {sent / sealed / 1e3:.2f} GB/s"
        note = note if sent else f"plain {plain * 1e6:.0f}, TLS {sealed * 1e6:.0f} us"
        what = f"{work.replace('_', ' ')}, TLS over plain"
        rows.append(row("", what, measured["TLS"].over(measured["plain"]), "x", "", note))
    rows.append(row("", "sealing alone", interleave({"": sealing}, options.rounds)[""].figure.times(1e-9), "GB/s"))
    if not all(torch.equal(end.into, torch.full_like(end.into, float(THERE.role) + 1)) for end in ends.values()):
        raise AssertionError("other values came back than were sent")
    closing = [threading.Thread(target=wire.close) for wire in transports.values()]
    for thread in closing:  # each waits for the other's end
        thread.start()
    pipe.send("end")
    for thread in closing:
        thread.join()
    process.join()
    return rows


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, lambda parser: parser.add_argument("--rounds", type=int, default=ROUNDS))
