"""How near the transports come to what the kernel can do: `python -m benchmarks.transports [--rounds N]`.

Two processes on this machine, one thread each for PyTorch. All ways are opened once and measured in turn (A B A B ...),
so that a slow minute of the machine is everybody's; figures are medians, and ratios are taken round by round. Bodies
are received into buffers that were there before, and the last round's values are compared.

    one way        40 MB in bodies of 1 MB, until the receiver's word that all is there
    there and back the same, and the receiver sends each body's own 1 MB back as soon as it has it
    small          a message of about 64 bytes and its answer; and processor time per message, both sides together

The bare socket pair has the same congestion control and no frames: one `sendmsg` and one filling `recv_into` per MB.
"""

import argparse
import multiprocessing
import secrets
import shutil
import socket
import tempfile
import threading
import time
import timeit
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe

import torch

from benchmarks.harness import Row, Samples, row
from benchmarks.record import run_table
from topotrain.comm.security.handshake import Identity
from topotrain.comm.transport import Endpoint, Transport
from topotrain.comm.transport.frame import BODY, Header
from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.comm.transport.tcp import TcpTransport, prepare
from topotrain.comm.transport.unix_transport import SharedMemoryTransport
from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Fetch, Finish, Message, Push, Values, decode, encode

BUCKETS, BUCKET = 40, 1 << 18  # 40 bodies of 1 MiB of float32
SMALL = 300  # round trips of small messages in one round
STREAMED = 5000  # small messages in one direction
HERE, THERE = Address(Role.WORKER, 0, 0), Address(Role.SERVER, 0, 0)
WAYS = ("bare", "tcp", "shm")


def both_transports(token: bytes, directory: str) -> dict[str, Transport]:
    identity = Identity("bench", token, 1, 0, "")
    return {"tcp": TcpTransport(identity), "shm": SharedMemoryTransport(identity, directory, ProcessMemory())}


def buffers(wire: Transport | None) -> torch.Tensor:
    """BUCKETS rows of 1 MiB; on the shared-memory transport such as it can show."""
    flat = torch.zeros(BUCKETS * BUCKET)
    if isinstance(wire, SharedMemoryTransport):
        flat = wire.memory.allocate(BUCKETS * BUCKET, torch.float32)
    return flat.view(BUCKETS, BUCKET)


# --- the other process -------------------------------------------------------------------------------------------


class Answering:
    """Takes Values without a word, echoes Push with its own Values, and answers Fetch with Finish."""

    def __init__(self, wire: Transport) -> None:
        self._wire, self._into, self._own = wire, buffers(wire), buffers(wire)
        self._own += torch.arange(BUCKETS).view(-1, 1)

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        assert isinstance(message, Values | Push)
        return None if viewable else self._into[message.bucket]

    def handle(self, sender: Address, message: Message) -> None:
        if isinstance(message, Push):
            self._wire.send(THERE, HERE, Values(0, message.bucket, 0, body=self._own[message.bucket]))
        elif isinstance(message, Fetch):
            self._wire.send(THERE, HERE, Finish(time.process_time_ns()))

    def lost(self, peer: Address, reason: str) -> None:
        pass


def other(pipe: Pipe, token: bytes, directory: str, host: str, port: int) -> None:
    """The receiving process: one resident per transport, and a thread on the bare socket."""
    torch.set_num_threads(1)
    wires = both_transports(token, directory)
    pipe.send({name: wire.attach(THERE, Answering(wire)) for name, wire in wires.items()})
    sock = socket.create_connection((host, port))
    prepare(sock)
    threading.Thread(target=answer_bare, args=(sock,), daemon=True).start()
    pipe.recv()
    for wire in wires.values():
        wire.close()


def answer_bare(sock: socket.socket) -> None:
    """A byte says what comes: 'o' 40 bodies and then a byte back, 'b' each body is answered by one, 's' 64 bytes."""
    into, own = buffers(None), buffers(None)
    own += torch.arange(BUCKETS).view(-1, 1)
    targets, answers = [rows(t) for t in (into, own)]
    small = bytearray(64)
    while what := sock.recv(1):
        if what == b"s":
            fill(sock, memoryview(small))
            sock.sendall(small)
            continue
        for target, answer in zip(targets, answers, strict=True):
            fill(sock, target)
            if what == b"b":
                sock.sendall(answer)
        sock.sendall(b".")


def rows(tensor: torch.Tensor) -> list[memoryview]:
    return [row.view(torch.uint8).numpy().data for row in tensor]


def fill(sock: socket.socket, target: memoryview) -> None:
    at = 0
    while at < len(target):
        count = sock.recv_into(target[at:], 0, socket.MSG_WAITALL)
        if not count:
            raise EOFError
        at += count


# --- this process ------------------------------------------------------------------------------------------------


class Bare:
    """The socket pair without any of our code."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.mine, self.into = buffers(None), buffers(None)
        self._out, self._in = rows(self.mine), rows(self.into)

    def one_way(self) -> None:
        self._sock.sendall(b"o")
        for body in self._out:
            self._sock.sendall(body)
        self._sock.recv(1)

    def there_and_back(self) -> None:
        self._sock.sendall(b"b")
        writer = threading.Thread(target=lambda: [self._sock.sendall(body) for body in self._out])
        writer.start()
        for body in self._in:
            fill(self._sock, body)
        writer.join()
        self._sock.recv(1)

    def small(self) -> None:
        raw, back = b"s" + bytes(64), memoryview(bytearray(64))
        for _ in range(SMALL):
            self._sock.sendall(raw)
            fill(self._sock, back)


class Asking:
    """One of our transports, used by a thread that waits for its reader, as a script does."""

    def __init__(self, wire: Transport, url: str) -> None:
        self._wire = wire
        self.mine, self.into = buffers(wire), buffers(wire)
        self._came, self._left, self._lock = threading.Event(), 0, threading.Lock()
        self.others_ns = 0
        resident: Endpoint = self
        wire.attach(HERE, resident)
        wire.connect(HERE, THERE, url)

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        assert isinstance(message, Values)
        return None if viewable else self.into[message.bucket]

    def handle(self, sender: Address, message: Message) -> None:
        if isinstance(message, Finish):
            self.others_ns = message.steps
        elif message.body is not None and message.body.dtype == torch.uint8:
            assert isinstance(message, Values)
            self.into[message.bucket] = message.body.view(torch.float32)
        self._left -= 1
        if not self._left:
            self._came.set()

    def lost(self, peer: Address, reason: str) -> None:
        pass

    def _await(self, count: int) -> None:
        self._left = count
        self._came.clear()

    def _send(self, message: Message) -> None:
        self._wire.send(HERE, THERE, message)

    def one_way(self) -> None:
        self._await(1)
        for bucket in range(BUCKETS):
            self._send(Values(0, bucket, 0, body=self.mine[bucket]))
        self._send(Fetch(0))
        self._came.wait()

    def there_and_back(self) -> None:
        self._await(BUCKETS)
        for bucket in range(BUCKETS):
            self._send(Push(0, 0, bucket, 1.0, b"\1", body=self.mine[bucket]))
        self._came.wait()

    def small(self) -> None:
        for _ in range(SMALL):
            self._await(1)
            self._send(Fetch(0))
            self._came.wait()

    def cpu_us(self) -> float:
        """Microseconds of processor time per small message, sender and receiver together."""
        self._await(1)
        self._send(Fetch(0))
        self._came.wait()
        mine, others = time.process_time_ns(), self.others_ns
        self._await(1)
        for _ in range(STREAMED):
            self._send(Values(0, 0, 0))
        self._send(Fetch(0))
        self._came.wait()
        return (time.process_time_ns() - mine + self.others_ns - others) / STREAMED / 1e3


def pure_us() -> dict[str, float]:
    """Microseconds of the parts that need no socket, per message."""
    message = Push(7, 0, 3, 32.0, b"\1\2")
    kind, meta = encode(message)
    raw = Header(BODY, kind, len(meta), 1 << 20, 0, 1).pack()
    parts: dict[str, Callable[[], object]] = {
        "encode": lambda: encode(message),
        "decode": lambda: decode(kind, meta),
        "header out": lambda: Header(BODY, kind, len(meta), 1 << 20, 0, 1).pack(),
        "header in": lambda: Header.unpack(raw),
    }
    return {name: min(timeit.repeat(part, number=2000, repeat=5)) / 2000 * 1e6 for name, part in parts.items()}


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Work -> way -> seconds of each round ("cpu": microseconds per message)."""
    torch.set_num_threads(1)
    token, directory = secrets.token_bytes(32), tempfile.mkdtemp(prefix="tt-")
    listener = socket.create_server(("127.0.0.1", 0))
    pipe, far = multiprocessing.Pipe()
    arguments = (far, token, directory, *listener.getsockname())
    process = multiprocessing.get_context("spawn").Process(target=other, args=arguments)
    process.start()
    urls = pipe.recv()
    sock, _ = listener.accept()
    prepare(sock)
    wires = both_transports(token, directory)
    ways: dict[str, Bare | Asking] = {"bare": Bare(sock)}
    ways |= {name: Asking(wire, urls[name]) for name, wire in wires.items()}
    times: dict[str, dict[str, list[float]]] = {}
    for turn in range(-2, rounds):  # two rounds to warm up
        for name, way in ways.items():
            for work in (way.one_way, way.there_and_back, way.small):
                began = time.perf_counter()
                work()
                spent = time.perf_counter() - began
                if turn >= 0:
                    times.setdefault(work.__name__, {}).setdefault(name, []).append(spent)
            if isinstance(way, Asking) and turn >= 0:
                times.setdefault("cpu", {}).setdefault(name, []).append(way.cpu_us())
    for name, way in ways.items():
        expected = torch.arange(float(BUCKETS)).view(-1, 1)
        if not torch.equal(way.into, expected.expand(BUCKETS, BUCKET)):
            raise AssertionError(f"{name}: other values came back than were sent")
    pipe.send("end")
    for wire in wires.values():
        wire.close()
    process.join()
    shutil.rmtree(directory)
    return times


def compare(options: argparse.Namespace) -> list[Row]:
    """What our transports cost over bare sockets."""
    times = measure(options.rounds)
    made: list[Row] = []
    for work in ("one_way", "there_and_back"):
        bare = Samples(tuple(times[work]["bare"]))
        words = f"{BUCKETS * BUCKET * 4 / 1e6:.0f} MB {work.replace('_', ' ')}"
        made.append(row("", f"{words}: bare sockets", bare.figure.times(1e3), "ms"))
        for name in WAYS[1:]:
            own = Samples(tuple(times[work][name]))
            made.append(row("", f"{words}: {name}", own.over(bare), "x bare", note=f"{own.median * 1e3:.2f} ms"))
    for name in WAYS:
        small = Samples(tuple(times["small"][name]))
        made.append(row("", f"a small message there and back: {name}", small.figure.times(1e6 / SMALL), "us"))
    for name in WAYS[1:]:
        cpu = Samples(tuple(times["cpu"][name]))
        made.append(row("", f"processor per message, both sides: {name}", cpu.figure.times(1.0), "us"))
    made += [row("", f"pure: {name}", value, "us") for name, value in pure_us().items()]
    return made


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9)


if __name__ == "__main__":
    run_table("transports", "What a transport costs over bare sockets", compare, declare)
