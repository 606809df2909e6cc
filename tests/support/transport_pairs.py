"""Endpoints and transports for the tests of transports: an endpoint that records all messages, and pairs of them."""

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Queue
from tempfile import mkdtemp
from typing import Any

import torch

from topotrain.comm.security.handshake import Identity
from topotrain.comm.transport import Transport
from topotrain.comm.transport.inprocess import InProcessTransport
from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.comm.transport.tcp import TcpTransport
from topotrain.comm.transport.unix_transport import SharedMemoryTransport
from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Init, Message, Push, Values

TOKEN = bytes(range(32))
WORKER, SERVER = Address(Role.WORKER, 0, 1), Address(Role.SERVER, 0, 0)
WAIT = 20.0  # seconds after which a test gives up; nothing here takes long

Place = Callable[[Message, bool], torch.Tensor | None]


def identity(**changes: object) -> Identity:
    fields = {"job_id": "job", "token": TOKEN, "incarnation": 1, "generation": 0, "digest": "d" * 64}
    return Identity(**fields | changes)


def numel_of(message: Message) -> int:
    """The tests' schema: the bucket's number is its size in elements."""
    assert isinstance(message, Push | Values | Init)
    return message.bucket


def place_new(message: Message, viewable: bool) -> torch.Tensor | None:
    return torch.empty(numel_of(message), dtype=torch.float32)


def place_view(message: Message, viewable: bool) -> torch.Tensor | None:
    return None if viewable else place_new(message, viewable)


@dataclass
class Recorder:
    """A resident. `got` holds (sender, message), `ends` (peer, reason)."""

    placing: Place = place_new
    got: "Queue[tuple[Address, Message]]" = field(default_factory=Queue)
    ends: "Queue[tuple[Address, str]]" = field(default_factory=Queue)
    on_handle: Callable[[Address, Message], None] = lambda sender, message: None

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        return self.placing(message, viewable)

    def handle(self, sender: Address, message: Message) -> None:
        self.on_handle(sender, message)
        self.got.put((sender, message))

    def lost(self, peer: Address, reason: str) -> None:
        self.ends.put((peer, reason))

    def next(self) -> Message:
        return self.got.get(timeout=WAIT)[1]

    def end(self) -> str:
        return self.ends.get(timeout=WAIT)[1]


@dataclass
class TransportGroup:
    """Transports of one kind, as several processes would have them; close() ends them all."""

    kind: str
    directory: str = ""
    wires: list[Transport] = field(default_factory=list)
    memories: dict[int, ProcessMemory] = field(default_factory=dict)

    def wire(self, **changes: object) -> Transport:
        if self.kind == "local":
            self.wires = self.wires or [InProcessTransport()]
            return self.wires[0]
        patience = changes.pop("patience", 10.0)
        if self.kind in ("tcp", "tls"):
            wire = TcpTransport(identity(**changes), patience=patience, tls=self.kind == "tls")
        else:
            self.directory = self.directory or mkdtemp(prefix="tt-")
            wire = SharedMemoryTransport(identity(**changes), self.directory, ProcessMemory(), patience)
        self.wires.append(wire)
        return wire

    def tensor(self, wire: Transport, numel: int) -> torch.Tensor:
        """Zeros that this transport can show to a peer without a copy, if it can do that at all."""
        if isinstance(wire, SharedMemoryTransport):
            return wire.memory.allocate(numel, torch.float32)
        return torch.zeros(numel)

    def die(self, wire: Transport, me: Address) -> None:
        """End the way of one resident as the system does when its process is killed: without a word."""
        if isinstance(wire, InProcessTransport):
            wire.detach(me)
        else:
            for connection in list(wire._connections):
                connection._out.shutdown(2)

    def close(self) -> None:
        threads = [threading.Thread(target=wire.close) for wire in self.wires]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@dataclass
class Pair:
    """A worker that is connected to a server, each with a transport of its own (in-process: one for both)."""

    transports: TransportGroup
    worker: Recorder = field(default_factory=Recorder)
    server: Recorder = field(default_factory=Recorder)

    def __post_init__(self) -> None:
        self.worker_wire, self.server_wire = self.transports.wire(), self.transports.wire()
        self.url = self.server_wire.attach(SERVER, self.server)
        self.worker_wire.attach(WORKER, self.worker)
        self.worker_wire.connect(WORKER, SERVER, self.url)

    def to_server(self, message: Message) -> None:
        self.worker_wire.send(WORKER, SERVER, message)

    def to_worker(self, message: Message) -> None:
        self.server_wire.send(SERVER, WORKER, message)


def send_parts(channel: Any, raw: bytes, sizes: Sequence[tuple[int, bool]], buffers: int) -> None:
    """As an outbox does: without waiting first, then with it, and the same bytes again when they were not taken.

    sizes: of the parts, and whether it waits from the first on. buffers: of which a part consists.
    """
    rest = memoryview(raw)
    for size, wait in sizes:
        part, rest = rest[:size], rest[size:]
        step = -(-len(part) // buffers) or 1
        views = [part[at : at + step] for at in range(0, len(part), step)]
        flags = 0 if wait else socket.MSG_DONTWAIT
        while views:
            try:
                count = channel.sendmsg(views, (), flags)
            except BlockingIOError:
                count, flags = channel.sendmsg(views), 0
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if views:
                views[0] = views[0][count:]


class Tap:
    """A socket that keeps what goes through it, and can change it on its way out; `said` has each thing sent."""

    def __init__(self, sock: socket.socket, change: Callable[[bytes], bytes] = lambda raw: raw) -> None:
        self._sock, self._change, self.said, self.got = sock, change, [b""], b""

    def settimeout(self, seconds: float | None) -> None:
        self._sock.settimeout(seconds)

    def sendall(self, raw: bytes, flags: int = 0) -> None:
        self.said.append(raw)
        self._sock.sendall(self._change(raw))

    def send(self, raw: bytes, flags: int = 0) -> int:
        return self._sock.send(raw, flags)

    def recv(self, size: int, flags: int = 0) -> bytes:
        raw = self._sock.recv(size)
        self.got += raw
        return raw
