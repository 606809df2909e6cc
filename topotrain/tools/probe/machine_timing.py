"""Time a machine: the work of servers, and messages between two processes.

Updates, sums, copies and small operations run on one thread, as in a server, and with the product's own code.

Of two processes one asks, as a worker does, and one answers, as a server does. The cost of a message to each of them is
in seconds of a core. It is that of the whole process, with its reader threads. Bodies go as in a step: a few at once,
and each is answered by one of its size as soon as it is there. In a long stream in one direction the reader never
sleeps, and a byte would take about half the time. The median burst counts. Of small messages the shortest round counts,
because other processes only ever add to it.
"""

import json
import multiprocessing
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

from topotrain.comm.security.handshake import Identity
from topotrain.comm.transport import Transport
from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.comm.transport.tcp import TcpTransport
from topotrain.comm.transport.unix_transport import SharedMemoryTransport
from topotrain.config.job import Cluster, Slicing
from topotrain.config.topology import Address, Role, layout
from topotrain.core.model.schema import slice_map_for, torch_dtype
from topotrain.core.optim.adapter import WHOLE, OptimizerSpec, SliceUpdate, describe_all, hyper
from topotrain.core.protocol import Fetch, Finish, Message, Push
from topotrain.core.server.ordered_sum import OrderedMean
from topotrain.parallel.api.dry_run import PreparedArguments
from topotrain.tools.probe.probe_file import ProbedKernels, ProbedOptimizer, ProbedTransport
from topotrain.training.parameters.flat_parameters import ModelParts

_MOST_ELEMENTS = 1 << 24
"""Of a model that is updated. More say nothing new, and need memory."""
_BUCKET = 1 << 18
"""Elements of a bucket, and of a body: 1 MiB, as most messages of a job have."""
_BUCKETS = 24
"""Buckets that a sum goes through, so that no cache has them all."""
_SMALL = 64
_CALLS = 200
_ROUNDS = 5
_BODIES = 16
_BURST = 4
"""Bodies that are sent at once."""
_BURSTS = 24
_MESSAGES = 200
"""Small messages of a round."""
_PATIENCE_S = 10.0
_WORKER, _SERVER = Address(Role.WORKER, 0, 0), Address(Role.SERVER, 0, 0)

Segment = tuple[int, int, torch.Tensor]
"""What a server updates: its key, the number of the parameter, and the value."""


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)


def _seconds(work: Callable[[], object], calls: int = 1) -> float:
    """Return the seconds of a call.

    The shortest round counts, because other processes only add to it.
    """
    work()
    found = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for _ in range(calls):
            work()
        found.append((time.perf_counter() - began) / calls)
    return min(found)


def time_kernels() -> ProbedKernels:
    with _one_thread():
        first, second, out = (torch.randn(_BUCKETS, _BUCKET) for _ in range(3))
        mean = OrderedMean([[0, 1]])

        def sums() -> None:
            for number in range(_BUCKETS):
                mean.write({0: (1.0, first[number]), 1: (1.0, second[number])}, out[number])

        def copies() -> None:
            for number in range(_BUCKETS):
                out[number].copy_(first[number])

        small = torch.zeros(_SMALL)
        operation_s = _seconds(lambda: torch.add(small, small, out=small), _CALLS)
        nbytes = first.nbytes
        # The mean of two reads both and writes one, and then reads and writes that one.
        byte_s = max(0.0, _seconds(sums) - 2 * _BUCKETS * operation_s) / (5 * nbytes)
        copy_byte_s = max(0.0, _seconds(copies) - _BUCKETS * operation_s) / nbytes
    return ProbedKernels(operation_s, byte_s, copy_byte_s)


def time_optimizer(made: PreparedArguments) -> ProbedOptimizer:
    """Time the update of the script's optimizers on a server.

    Raises:
        ConfigError: servers cannot run an optimizer.
    """
    parts, names = made.parts(), made.optimizer_names(None)
    whole = any(name in WHOLE for name in names)
    spec = describe_all(made.optimizers, parts.tensors, Slicing.kTensor if whole else Slicing.kElement, "", parts.aside)
    settings = hyper(*made.optimizers)
    trained = next((index for index, group in enumerate(spec.assignment) if group >= 0), 0)
    with _one_thread():
        buckets = [_tensors(parts)] if whole else _buckets(parts, trained)
        updates, counts = zip(*(_update(spec, settings, segments) for segments in buckets), strict=True)
        small, _ = _update(spec, settings, [(0, trained, torch.zeros((8, 8) if whole else _SMALL))])
        fixed_s = _seconds(small, _CALLS)
        all_s = _seconds(lambda: [update() for update in updates])
    element_s = max(0.0, all_s - len(updates) * fixed_s) / max(1, sum(counts))
    return ProbedOptimizer(" and ".join(names), made.state_factor(), fixed_s, element_s, made.momentum(None))


def _update(spec: OptimizerSpec, settings: bytes, segments: Sequence[Segment]) -> tuple[Callable[[], object], int]:
    """Return a server's update of some segments, and its number of elements."""
    update = SliceUpdate(spec, segments)
    # Small gradients: the values must stay finite for as long as this is timed.
    gradients = {key: torch.randn_like(value) * 1e-3 for key, _, value in segments if update.optimizes(key)}
    return partial(update.apply, settings, gradients), sum(each.numel() for each in gradients.values())


def _tensors(parts: ModelParts) -> list[Segment]:
    """Return the whole tensors, which a server has in the memory of its host."""
    return [(index, index, torch.zeros_like(each, device="cpu")) for index, each in enumerate(parts.tensors)]


def _buckets(parts: ModelParts, trained: int) -> Iterator[list[Segment]]:
    """Yield the buckets of the only server of a job with this model.

    trained: the number of a parameter that is trained.
    """
    if sum(tensor.numel() for tensor in parts.tensors) < _BUCKET:
        # Of so few elements the seconds of each cannot be told from those of the call.
        yield [(0, trained, torch.zeros(_BUCKET))]
        return
    slices = slice_map_for(parts.parameters, layout(Cluster(server_worker_separate=True)))
    left = _MOST_ELEMENTS
    for bucket in slices.buckets:
        if left > 0:
            left -= bucket.hi - bucket.lo
            flat = torch.zeros(bucket.hi - bucket.lo, dtype=torch_dtype(slices.spaces[bucket.space].dtype))
            yield [
                (each.segment, slices.segments[each.segment].parameter, flat[each.lo - bucket.lo : each.hi - bucket.lo])
                for each in bucket.pieces
            ]


# --- messages ----------------------------------------------------------------------------------------------------


def _buffer(transport: Transport) -> torch.Tensor:
    if isinstance(transport, SharedMemoryTransport):
        return transport.memory.allocate(_BODIES * _BUCKET, torch.float32).view(_BODIES, _BUCKET)
    return torch.zeros(_BODIES, _BUCKET)


def _body(bucket: int, buffer: torch.Tensor) -> Push:
    return Push(0, 0, bucket, 1.0, b"\1", body=buffer[bucket])


class _Process:
    """One of the two processes: it receives bodies, or sees them where they are."""

    def __init__(self, transport: Transport) -> None:
        self.transport, self.into = transport, _buffer(transport)

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        assert isinstance(message, Push)
        return None if viewable else self.into[message.bucket]

    def lost(self, peer: Address, reason: str) -> None:
        """The other process has ended."""


class Answering(_Process):
    """Answers bodies with bodies, and small messages with its processor time."""

    def handle(self, sender: Address, message: Message) -> None:
        if isinstance(message, Push):
            self.transport.send(_SERVER, _WORKER, _body(message.bucket, self.into))
        elif isinstance(message, Fetch):
            self.transport.send(_SERVER, _WORKER, Finish(time.process_time_ns()))


class Asking(_Process):
    """Sends, and waits for answers, as a script's thread does."""

    def __init__(self, transport: Transport, url: str) -> None:
        super().__init__(transport)
        self._bodies = _buffer(transport)
        self._came = threading.Event()
        self._missing = 0  # bodies that are not answered yet
        self._theirs_ns = 0
        transport.attach(_WORKER, self)
        transport.connect(_WORKER, _SERVER, url)

    def handle(self, sender: Address, message: Message) -> None:
        if isinstance(message, Push):
            self._missing -= 1
        elif isinstance(message, Finish):
            self._theirs_ns = message.steps
        if not self._missing:
            self._came.set()

    def _ask(self) -> int:
        """Send a small message and wait for its answer: the other's processor time."""
        self._came.clear()
        self.transport.send(_WORKER, _SERVER, Fetch(0))
        self._wait()
        return self._theirs_ns

    def _wait(self) -> None:
        if not self._came.wait(_PATIENCE_S):
            raise TimeoutError(f"no answer within {_PATIENCE_S:g} s")

    def measure(self) -> ProbedTransport:
        """Time small messages and bodies, each there and back."""
        for _ in range(_MESSAGES):
            self._ask()
        rounds = [self._spent(lambda: [self._ask() for _ in range(1, _MESSAGES)]) for _ in range(_ROUNDS)]
        wall, mine, theirs = (min(each) / _MESSAGES for each in zip(*rounds, strict=True))
        bursts = [sum(self._spent(partial(self._exchange, number))[1:]) for number in range(_BURSTS)]
        # Each side of a message and its answer sends one and receives one. Other work of a process meanwhile, such as
        # going back to sleep, delays nothing: all of it is no longer than the clock says.
        message_s = min(mine + theirs, wall) / 4
        byte_s = max(0.0, median(bursts) / 4 / _BURST - message_s) / (4 * _BUCKET)
        return ProbedTransport(message_s, byte_s, message_s, byte_s, wall / 2 - 2 * message_s)

    def _spent(self, work: Callable[[], object]) -> tuple[float, float, float]:
        """Return the seconds of small messages: by the clock, and of both cores."""
        theirs, mine, began = self._ask(), time.process_time_ns(), time.perf_counter()
        work()
        theirs = self._ask() - theirs
        return time.perf_counter() - began, (time.process_time_ns() - mine) / 1e9, theirs / 1e9

    def _exchange(self, burst: int) -> None:
        """Send the bodies of a burst, and wait until all are answered."""
        self._came.clear()
        self._missing = _BURST
        for number in range(burst * _BURST, (burst + 1) * _BURST):
            self.transport.send(_WORKER, _SERVER, _body(number % _BODIES, self._bodies))
        self._wait()


def _transports(folder: str, token: bytes) -> dict[str, Transport]:
    identity = Identity("probe", token, 1, 0, "")
    return {"shm": SharedMemoryTransport(identity, folder, ProcessMemory()), "tcp": TcpTransport(identity)}


def _answer(ours: Connection, theirs: Connection, folder: str, token: bytes) -> None:
    """Run the answering process until the other one is gone."""
    theirs.close()
    made = _transports(folder, token)
    ours.send({name: each.attach(_SERVER, Answering(each)) for name, each in made.items()})
    ours.poll(None)
    for each in made.values():
        each.close()


def run(spec: dict[str, Any], channel: socket.socket, fds: Sequence[int]) -> int:
    """Say that torch is loaded, and measure all transports."""
    channel.sendall(b"{}\n")
    # A fork, as this process is itself: it has no thread yet.
    forks, token = multiprocessing.get_context("fork"), secrets.token_bytes(32)
    ours, theirs = forks.Pipe()
    forks.Process(target=_answer, args=(theirs, ours, spec["folder"], token), daemon=True).start()
    theirs.close()
    made, urls = _transports(spec["folder"], token), ours.recv()
    found = {name: asdict(Asking(each, urls[name]).measure()) for name, each in made.items()}
    channel.sendall(json.dumps(found).encode() + b"\n")
    for each in made.values():
        each.close()
    return 0
