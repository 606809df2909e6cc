"""How all-reduce grows with the processes: `python -m benchmarks.collectives [--processes 2 4 8] [--rounds N] ...`.

P processes on this machine, each with one `Relay` on our TCP transport and on shared memory, and one member of Gloo.
All ways are opened once per P and measured in turn (A B A B ...); a time is that from the first process's start to the
last one's having all results, the median of `--rounds` rounds after one to warm up. Every process compares every result
of every round with the sum it should be (kAuto and kNaive: bit for bit).

Bytes are the most that one process sent, payloads and frames; beside it the arithmetic, for the buckets as they are
dealt to the homes, and for even shares: 2(P-1)/P of the data, and (P-1) times the data at the naive master. On shared
memory they are what references stand for; only what a rank passes on of another rank's memory is really sent. Gloo's
own bytes cannot be read. Our TCP transport chooses its congestion control (reno on loopback), Gloo takes the system's
default (which a table's machine names): part of a difference is this alone.
"""

import argparse
import multiprocessing
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import product
from multiprocessing.connection import Connection as Pipe
from typing import NamedTuple

import torch

from benchmarks.harness import ROUNDS, Row, Samples, row
from benchmarks.record import run_table, say
from topotrain.comm.security.handshake import Identity
from topotrain.comm.transport import Transport
from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.comm.transport.tcp import TcpTransport
from topotrain.comm.transport.unix_transport import SharedMemoryTransport
from topotrain.config.job import Algorithm, Engine
from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Message
from topotrain.extensions.collectives.algorithms import (
    CollectiveResult,
    CompleteSum,
    Contribution,
    Out,
    Relay,
    SendPart,
    traffic,
)
from topotrain.extensions.collectives.collective_messages import CollectivePart
from topotrain.extensions.collectives.torch_backend import TorchCollective

WORDS = {
    Algorithm.kRing: "ring",
    Algorithm.kTree: "tree",
    Algorithm.kNaive: "naive",
    Algorithm.kAuto: "direct",
}
FLOAT = 4  # bytes
WAIT = 120.0  # seconds after which a round is given up
PEER = "gloo"


class Way(NamedTuple):
    """One way to add up `nbytes` of float32 over all processes, in buckets of `bucket` bytes."""

    transport: str
    algorithm: Algorithm
    nbytes: int
    bucket: int

    @property
    def name(self) -> str:
        return PEER if self.transport == PEER else f"{WORDS[self.algorithm]} {self.transport}"


class Round(NamedTuple):
    """What one process tells of one round; times by the clock that all processes share."""

    began: float
    ended: float
    sent: int


# --- one process -------------------------------------------------------------------------------------------------


def address(rank: int) -> Address:
    return Address(Role.SERVER, 0, rank)


def gradient(rank: int, count: int) -> torch.Tensor:
    """Values whose sum depends on its order, so that a wrong order shows."""
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


class Room:
    """The memory of one way: this rank's gradient, and every buffer that its relay asks for, made once."""

    def __init__(self, way: Way, size: int, rank: int, wire: Transport) -> None:
        self._wire, self._total, self._each = wire, way.nbytes // FLOAT, way.bucket // FLOAT
        self.count = -(-self._total // self._each)
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}
        self._flat: dict[str, torch.Tensor] = {}
        self.gradient = self._new(self._total).copy_(gradient(rank, self._total))

    def _new(self, count: int) -> torch.Tensor:
        if isinstance(self._wire, SharedMemoryTransport):
            return self._wire.memory.allocate(count, torch.float32)
        return torch.zeros(count)

    def part(self, flat: torch.Tensor, bucket: int) -> torch.Tensor:
        return flat[bucket * self._each : (bucket + 1) * self._each]

    def buffer(self, slot: str, bucket: int) -> torch.Tensor:
        found = self._buffers.get((slot, bucket))
        if found is None:
            # Made by the first round, which warms up: later ones touch no fresh memory.
            flat = self._flat[slot] = self._flat[slot] if slot in self._flat else self._new(self._total)
            found = self._buffers[slot, bucket] = self.part(flat, bucket)
        return found


class RoomRelay(Relay):
    """A relay with the memory of a room; the homes take turns."""

    def __init__(self, room: Room, algorithm: Algorithm, size: int, rank: int) -> None:
        super().__init__(algorithm, size, rank, [bucket % size for bucket in range(room.count)])
        self._room = room

    def buffer(self, slot: str, bucket: int) -> torch.Tensor:
        return self._room.buffer(slot, bucket)


class Member:
    """The resident of one process on one transport: hands Hops to the relay of the way that is measured."""

    def __init__(self, wire: Transport, size: int, rank: int) -> None:
        self._wire, self._size, self._rank = wire, size, rank
        self._lock, self._done = threading.Lock(), threading.Event()
        self._ways: dict[Way, tuple[Relay, Room]] = {}
        self.failed = ""

    def enter(self, way: Way, step: int) -> None:
        """Be ready for a round; everybody is before anybody starts."""
        if way not in self._ways:
            room = Room(way, self._size, self._rank, self._wire)
            relay = RoomRelay(room, way.algorithm, self._size, self._rank)
            self._ways[way] = relay, room
        self._relay, self._room = self._ways[way]
        self._results: dict[int, torch.Tensor] = {}
        self._step = step
        self._done.clear()

    def run(self, way: Way) -> Round:
        sent, _ = self._wire.traffic()
        began = time.monotonic()
        for bucket in range(self._room.count):
            part = Contribution.of([1.0], b"\1", self._room.part(self._room.gradient, bucket))
            with self._lock:
                outs = self._relay.local(self._step, 0, bucket, part)
            self._act(outs)
        if not self._done.wait(WAIT) or self.failed:
            raise RuntimeError(f"rank {self._rank}, {way}: {self.failed or 'no result in time'}")
        ended = time.monotonic()
        return Round(began, ended, self._wire.traffic()[0] - sent)

    def result(self) -> torch.Tensor:
        return torch.cat([self._results[bucket].view(torch.float32) for bucket in range(self._room.count)])

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        assert isinstance(message, CollectivePart)
        with self._lock:
            return self._relay.place(sender.index, message, viewable)

    def handle(self, sender: Address, message: Message) -> None:
        assert isinstance(message, CollectivePart)
        with self._lock:
            outs = self._relay.arrive(sender.index, message)
        self._act(outs)

    def lost(self, peer: Address, reason: str) -> None:
        self.failed = f"lost {peer}: {reason}"
        self._done.set()

    def _act(self, outs: list[Out]) -> None:
        for out in outs:
            match out:
                case SendPart(to=to, hop=hop):
                    self._wire.send(address(self._rank), address(to), hop)
                case CompleteSum(step=step, ordinal=ordinal, bucket=bucket, part=part):
                    with self._lock:
                        more = self._relay.result(step, ordinal, bucket, part.present, part.body)
                    self._act(more)
                    self._have(bucket, part.body)
                case CollectiveResult(hop=hop):
                    self._have(hop.bucket, hop.body)

    def _have(self, bucket: int, body: torch.Tensor | None) -> None:
        assert body is not None
        with self._lock:
            self._results[bucket] = body
            complete = len(self._results) == self._room.count
        if complete:
            self._done.set()


class Peer:
    """The same work for torch.distributed: one all_reduce of everything, in place."""

    def __init__(self, group: TorchCollective, rank: int) -> None:
        self._group, self._rank = group, rank
        self._tensors: dict[Way, tuple[torch.Tensor, torch.Tensor]] = {}

    def enter(self, way: Way, step: int) -> None:
        if way not in self._tensors:
            mine = gradient(self._rank, way.nbytes // FLOAT)
            self._tensors[way] = mine, mine.clone()
        mine, self._work = self._tensors[way]
        self._work.copy_(mine)

    def run(self, way: Way) -> Round:
        began = time.monotonic()
        self._group.all_reduce(self._work).wait()
        return Round(began, time.monotonic(), 0)

    def result(self) -> torch.Tensor:
        return self._work


def check(way: Way, result: torch.Tensor, expected: torch.Tensor) -> None:
    exact = way.transport != PEER and way.algorithm in (Algorithm.kAuto, Algorithm.kNaive)
    if not (torch.equal(result, expected) if exact else torch.allclose(result, expected, rtol=1e-5, atol=1e-5)):
        raise AssertionError(f"{way}: other values than the sum, by up to {(result - expected).abs().max():g}")


def process(pipe: Pipe, rank: int, size: int, token: bytes, directory: str) -> None:
    """Open all transports, then do what the pipe says: ("enter", way, step), ("run",), ("end",)."""
    torch.set_num_threads(1)
    identity = Identity("bench", token, 1, 0, "")
    wires: dict[str, Transport] = {
        "tcp": TcpTransport(identity),
        "shm": SharedMemoryTransport(identity, f"{directory}/transports", ProcessMemory()),
    }
    members: dict[str, Member | Peer] = {}
    urls = {}
    for name, wire in wires.items():
        member = members[name] = Member(wire, size, rank)
        urls[name] = wire.attach(address(rank), member)
    pipe.send(urls)
    for other, theirs in enumerate(pipe.recv()[:rank]):
        for name, wire in wires.items():
            wire.connect(address(rank), address(other), theirs[name])
    with closing(TorchCollective(Engine.kGloo, f"{directory}/store/gloo", rank, size)) as group:
        members[PEER] = Peer(group, rank)
        pipe.send("ready")
        serve(pipe, members, size)
    for wire in wires.values():
        wire.close()


def serve(pipe: Pipe, members: dict[str, Member | Peer], size: int) -> None:
    expected: dict[int, torch.Tensor] = {}
    while (order := pipe.recv())[0] != "end":
        _, way, step = order
        count = way.nbytes // FLOAT
        if count not in expected:
            total = gradient(0, count)
            for rank in range(1, size):
                total += gradient(rank, count)
            expected[count] = total
        member = members[way.transport]
        member.enter(way, step)
        pipe.send("entered")
        pipe.recv()
        done = member.run(way)
        pipe.send(done)
        pipe.recv()  # a view of a peer's memory is looked at while everybody still holds still
        check(way, member.result(), expected[count])
        pipe.send("right")


# --- the conductor -----------------------------------------------------------------------------------------------


@contextmanager
def orchestra(size: int) -> Iterator[list[Pipe]]:
    """`size` processes that are connected to one another on every transport, and a pipe to each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "topotrain.extensions.collectives.torch_backend",
            "topotrain.comm.transport.shared_memory",
            "topotrain.comm.transport.tcp",
        ]
    )
    token, directory = secrets.token_bytes(32), tempfile.mkdtemp(prefix="tt-")
    pipes, processes = [], []
    try:
        for rank in range(size):
            mine, theirs = context.Pipe()
            processes.append(context.Process(target=process, args=(theirs, rank, size, token, directory), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(mine)
        together(pipes, [hear(pipe) for pipe in pipes])
        yield pipes
        for pipe in pipes:
            pipe.send(("end",))
        for one in processes:
            one.join(WAIT)
    finally:
        for one in processes:
            one.kill()
            one.join()
        shutil.rmtree(directory)


def hear(pipe: Pipe) -> object:
    if not pipe.poll(WAIT):
        raise RuntimeError("a process of the benchmark says nothing any more")
    return pipe.recv()


def together(pipes: list[Pipe], order: object) -> list[object]:
    """Tell all, hear all."""
    for pipe in pipes:
        pipe.send(order)
    return [hear(pipe) for pipe in pipes]


def measure(size: int, ways: list[Way], rounds: int) -> dict[Way, list[tuple[float, list[int]]]]:
    """Way -> of each round: seconds, and bytes that each process sent."""
    found: dict[Way, list[tuple[float, list[int]]]] = {way: [] for way in ways}
    with orchestra(size) as pipes:
        for turn, way in product(range(rounds + 1), ways):
            together(pipes, ("enter", way, turn))
            told = [r for r in together(pipes, "run") if isinstance(r, Round)]
            together(pipes, "check")
            if turn:
                seconds = max(r.ended for r in told) - min(r.began for r in told)
                found[way].append((seconds, [r.sent for r in told]))
    return found


def even_shares(nbytes: int, size: int) -> list[int]:
    """The bytes of each home, spread evenly."""
    return [nbytes * (home + 1) // size - nbytes * home // size for home in range(size)]


def even(way: Way, size: int) -> int:
    """The most payload bytes that one process sends where every home has the same share."""
    return max(sent for sent, _ in traffic(way.algorithm, even_shares(way.nbytes, size)))


def dealt(way: Way, size: int) -> int:
    """The same for whole buckets, dealt to the homes in turn: a few big ones are no even shares."""
    per_home = [0] * size
    for number, start in enumerate(range(0, way.nbytes, way.bucket)):
        per_home[number % size] += min(way.bucket, way.nbytes - start)
    return max(sent for sent, _ in traffic(way.algorithm, per_home))


def all_ways(work: list[tuple[float, int]]) -> list[Way]:
    """For each (MB, KiB of a bucket): all ways of ours, and Gloo once per MB."""
    ways: list[Way] = []
    for megabytes, kib in work:
        nbytes = int(megabytes * 1e6) // FLOAT * FLOAT
        peer = Way(PEER, Algorithm.kAuto, nbytes, nbytes)
        own = [Way(transport, how, nbytes, kib * 1024) for transport in ("tcp", "shm") for how in WORDS]
        ways += own if peer in ways else [peer, *own]
    return ways


def megabytes_in_kib(text: str) -> tuple[float, int]:
    megabytes, _, kib = text.partition(":")
    return float(megabytes), int(kib)


def rows(size: int, found: dict[Way, list[tuple[float, list[int]]]]) -> list[Row]:
    """One row per way: its time against Gloo's, round by round, and its bytes beside the arithmetic."""
    made: list[Row] = []
    for way, rounds in found.items():
        times = Samples(tuple(seconds for seconds, _ in rounds))
        what = f"{size} processes, {way.nbytes / 1e6:g} MB"
        if way.transport == PEER:
            made.append(row(f"{what}: Gloo", times.figure.times(1e3), "ms"))
            continue
        peer = found[next(w for w in found if w.transport == PEER and w.nbytes == way.nbytes)]
        sent = max(max(sent) for _, sent in rounds) / 1e6
        note = f"{sent:.2f} MB sent; as dealt {dealt(way, size) / 1e6:.2f}, if even {even(way, size) / 1e6:.2f}"
        mode = f"buckets of {way.bucket // 1024} KB"
        against = times.over(Samples(tuple(seconds for seconds, _ in peer)))
        made.append(
            row(f"{what}: {way.name}", against, "x Gloo", note=f"{times.median * 1e3:.1f} ms, {note}", mode=mode)
        )
    return made


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    work = [(4.5, 1024), (40.0, 1024)]
    parser.add_argument("--work", type=megabytes_in_kib, nargs="+", default=work, metavar="MB:KIB", help="data:bucket")
    parser.add_argument("--rounds", type=int, default=ROUNDS)


def grow(options: argparse.Namespace) -> list[Row]:
    """All rows, from the fewest processes to the most."""
    made: list[Row] = []
    for size in options.processes:
        say(f"  {size} processes")
        made += rows(size, measure(size, all_ways(options.work), options.rounds))
    return made


if __name__ == "__main__":
    run_table("collectives", "All-reduce, from 2 to 8 processes", grow, declare)
