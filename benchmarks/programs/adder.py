"""A script that adds up gradients over all processes by order: with our collectives, or with Gloo's."""

import argparse
import os
import secrets
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.programs.stepper import Line
from topotrain.comm.security.handshake import Identity
from topotrain.comm.transport import Transport
from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.comm.transport.tcp import TcpTransport
from topotrain.comm.transport.unix_transport import SharedMemoryTransport
from topotrain.config.job import Algorithm
from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Message
from topotrain.extensions.collectives.algorithms import (
    CollectiveResult,
    CompleteSum,
    Contribution,
    Out,
    Relay,
    SendPart,
)
from topotrain.extensions.collectives.collective_messages import CollectivePart

GLOO = "Gloo"
NAMES = {"ring": Algorithm.kRing, "tree": Algorithm.kTree, "naive": Algorithm.kNaive, "direct": Algorithm.kAuto}
WAYS = tuple(f"{name} {transport}" for transport in ("tcp", "shm") for name in NAMES)
EXACT = (Algorithm.kAuto, Algorithm.kNaive)
BUCKET = 1 << 20
EACH = BUCKET // 4
WAIT_S = 120.0


def gradient(rank: int, count: int) -> torch.Tensor:
    """Values whose sum depends on its order, so that a wrong order shows."""
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


class BenchRelay(Relay):
    """A relay whose memory is made by the first all-reduce, which warms up; the homes take turns."""

    def __init__(self, algorithm: Algorithm, wire: Transport, rank: int, size: int, count: int) -> None:
        self.buckets = -(-count // EACH)
        super().__init__(algorithm, size, rank, [bucket % size for bucket in range(self.buckets)])
        self._wire, self._count = wire, count
        self._flats: dict[str, tuple[torch.Tensor, ...]] = {}

    def buffer(self, slot: str, bucket: int) -> torch.Tensor:
        if slot not in self._flats:
            self._flats[slot] = self.new().split(EACH)
        return self._flats[slot][bucket]

    def new(self) -> torch.Tensor:
        """Memory for all buckets, which others see where the transport shares it."""
        if isinstance(self._wire, SharedMemoryTransport):
            return self._wire.memory.allocate(self._count, torch.float32)
        return torch.zeros(self._count)


class Member:
    """One process's part in one way: it sends what the relay says, over a transport, and keeps the results."""

    def __init__(self, way: str, wire: Transport, rank: int, size: int, count: int) -> None:
        self.algorithm, self._group, self._wire, self._me = NAMES[way.split()[0]], WAYS.index(way), wire, rank
        self._relay = BenchRelay(self.algorithm, wire, rank, size, count)
        self._gradient = self._relay.new().copy_(gradient(rank, count))
        self._results: dict[int, torch.Tensor] = {}
        self._lock, self._done = threading.Lock(), threading.Event()
        self._step, self._left, self._failed = 0, self._relay.buckets, ""

    def address(self, rank: int) -> Address:
        """The address of a member of this way."""
        return Address(Role.SERVER, self._group, rank)

    def add_up(self) -> None:
        """Make one all-reduce, until this process has all results."""
        self._step += 1
        for bucket, body in enumerate(self._gradient.split(EACH)):
            with self._lock:
                outs = self._relay.local(self._step, 0, bucket, Contribution.of([1.0], b"\1", body))
            self._act(outs)
        if not self._done.wait(WAIT_S) or self._failed:
            raise RuntimeError(self._failed or "no result in time")
        # No process begins another one before all have answered.
        self._left = self._relay.buckets
        self._done.clear()

    def result(self) -> torch.Tensor:
        """The last sum."""
        return torch.cat([self._results[bucket].view(torch.float32) for bucket in range(self._relay.buckets)])

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
        self._failed = f"lost {peer}: {reason}"
        self._done.set()

    def _act(self, outs: list[Out]) -> None:
        for out in outs:
            match out:
                case SendPart(to=to, hop=hop):
                    self._wire.send(self.address(self._me), self.address(to), hop)
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
            self._left -= 1
            complete = not self._left
        if complete:
            self._done.set()


def connected(folder: str, rank: int, size: int, count: int) -> dict[str, Member]:
    """The members of this process, connected to those of all others."""
    token = [secrets.token_bytes(32)]
    dist.broadcast_object_list(token)
    identity = Identity("bench", token[0], 1, 0, "")
    wires = {"tcp": TcpTransport(identity), "shm": SharedMemoryTransport(identity, folder, ProcessMemory())}
    members = {way: Member(way, wires[way.split()[1]], rank, size, count) for way in WAYS}
    mine = {way: wires[way.split()[1]].attach(member.address(rank), member) for way, member in members.items()}
    urls: list[dict[str, str]] = [{}] * size
    dist.all_gather_object(urls, mine)
    for other, theirs in enumerate(urls[:rank]):
        for way, member in members.items():
            wires[way.split()[1]].connect(member.address(rank), member.address(other), theirs[way])
    dist.barrier()
    return members


def check(members: Mapping[str, Member], rank: int, size: int, count: int) -> None:
    """Compare each way's last sum with the right one."""
    expected = sum((gradient(other, count) for other in range(1, size)), gradient(0, count))
    for way, member in members.items():
        found = member.result()
        equal = torch.equal if member.algorithm in EXACT else partial(torch.allclose, rtol=1e-5, atol=1e-5)
        if not equal(found, expected):
            raise AssertionError(f"{way}: other values than the sum, by up to {(found - expected).abs().max():g}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--model", type=float, required=True, help="MB of gradients")
    parser.add_argument("--peer", choices=("gloo",))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, size, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(options.model * 1e6) // 4
    line = Line(options.socket)
    dist.init_process_group("gloo")
    members = connected(f"{Path(options.socket).parent}/t", rank, size, count)
    work = gradient(rank, count)
    line.say(rank=rank)
    for order in line.orders():
        if "check" in order:
            check(members, rank, size, count)
        elif order.get("way") == GLOO:
            dist.all_reduce(work)
        elif "way" in order:
            members[order["way"]].add_up()
        else:
            break
        line.say(done=True)
    os._exit(0)  # taking Gloo's group apart hangs at times


if __name__ == "__main__":
    main()
