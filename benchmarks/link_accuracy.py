"""How true a pretended link is: `python -m benchmarks.link_accuracy`.

A process per host, each with sockets shaped as the TCP transport has them. Three patterns, for
which the time follows from the bandwidth B and from the bytes alone:

    flow    one host to one other, M bytes: M / B, and the delay once
    ring    all-reduce of M bytes over 4 hosts, in chunks: each sends and receives 2 (n-1)/n M bytes, so 1.5 M / B;
            the sums are computed, and checked
    incast  4 hosts to one, M bytes each: the receiver's link is the bottleneck, 4 M / B

A figure is how far the measured time is from that arithmetic, above or below: the median of the rounds.
"""

import argparse
import multiprocessing
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness import Figure, Row, row
from benchmarks.record import run_table, say
from topotrain.comm.emulation.link import EmulatedNetwork
from topotrain.comm.transport.tcp import prepare
from topotrain.config.job import Cluster, Link
from topotrain.config.topology import Address, Role, layout

HOSTS = 4
PLACES = layout(Cluster(nworkers_per_group=HOSTS + 1, link=Link()))  # each worker on a host of its own
RING_BYTES = 4_500_000
FLOW_BYTES = INCAST_BYTES = 1_500_000
CHUNK = 1 << 14  # elements: 64 KiB
FORK = multiprocessing.get_context("fork")

ProcessBody = Callable[[int, Sequence[socket.socket], EmulatedNetwork], Callable[[], None]]


def ring(rank: int, listeners: Sequence[socket.socket], network: EmulatedNetwork) -> Callable[[], None]:
    """Host `rank` of the all-reduce; what it returns does one of them."""
    out = _dial(listeners, network, rank, (rank + 1) % HOSTS)
    back = _answer(listeners[rank])
    grads = torch.empty(RING_BYTES // 4)
    parts = grads.tensor_split(HOSTS)
    work: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    def write() -> None:
        while True:
            out.sendall(work.get().numpy().data.cast("B"))

    threading.Thread(target=write, daemon=True).start()
    scratch = torch.empty(CHUNK)

    def once() -> None:
        grads.fill_(rank + 1.0)
        for chunk in parts[rank].split(CHUNK):
            work.put(chunk)
        for step in range(2 * (HOSTS - 1)):
            for chunk in parts[(rank - step - 1) % HOSTS].split(CHUNK):
                summing = step < HOSTS - 1
                target = scratch[: chunk.numel()] if summing else chunk
                _fill(back, target)
                if summing:
                    chunk.add_(target)
                if step < 2 * (HOSTS - 1) - 1:
                    work.put(chunk)
        assert bool((grads == HOSTS * (HOSTS + 1) / 2).all()), "wrong sums"

    return once


def incast(
    rank: int, listeners: Sequence[socket.socket], network: EmulatedNetwork, senders: int = HOSTS
) -> Callable[[], None]:
    """Host 0 receives from the hosts 1 to `senders`."""
    body = torch.full((INCAST_BYTES // 4,), float(rank))
    if rank:
        out = _dial(listeners, network, rank, 0)
        return lambda: out.sendall(body.numpy().data.cast("B"))
    sources = [(_answer(listeners[0]), torch.empty(INCAST_BYTES // 4)) for _ in range(senders)]

    def once() -> None:
        readers = [threading.Thread(target=_fill, args=source) for source in sources]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert sorted(float(got[0]) for _, got in sources) == [1.0 + n for n in range(senders)], "wrong bytes"

    return once


def flow(rank: int, listeners: Sequence[socket.socket], network: EmulatedNetwork) -> Callable[[], None]:
    """Host 1 sends to host 0."""
    return incast(rank, listeners, network, senders=1)


def _fill(sock: socket.socket, target: torch.Tensor) -> None:
    view = target.numpy().data.cast("B")
    while view:
        count = sock.recv_into(view, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the other host hung up")
        view = view[count:]


def _dial(listeners: Sequence[socket.socket], network: EmulatedNetwork, me: int, peer: int) -> socket.socket:
    sock = socket.create_connection(listeners[peer].getsockname())
    prepare(sock)
    return network.shape(sock, Address(Role.WORKER, 0, me), Address(Role.WORKER, 0, peer))


def _answer(listener: socket.socket) -> socket.socket:
    sock, _ = listener.accept()
    prepare(sock)
    return sock


def _live(
    body: ProcessBody, rank: int, listeners: Sequence[socket.socket], link: Link, folder: str, start: Any, tell: Pipe
) -> None:
    """A host's process: every round begins for all at once; tells when each one ended."""
    torch.set_num_threads(1)
    once = body(rank, listeners, EmulatedNetwork(link, Path(folder), "bench", PLACES))
    while tell.recv():
        start.wait()
        began = time.monotonic()
        once()
        tell.send((began, time.monotonic()))


def times(body: ProcessBody, hosts: int, link: Link, rounds: int) -> list[float]:
    """Seconds of each round, from the first host's start to the last one's end; one round before does not count."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(hosts)]
    start = FORK.Barrier(hosts)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(hosts):
            mine, theirs = FORK.Pipe()
            process = FORK.Process(target=_live, args=(body, rank, listeners, link, folder, start, theirs), daemon=True)
            process.start()
            pipes.append(mine)
            processes.append(process)
        found = []
        for _ in range(rounds + 1):
            for pipe in pipes:
                pipe.send(True)
            marks = [_mark(pipe, process) for pipe, process in zip(pipes, processes, strict=True)]
            found.append(max(end for _, end in marks) - min(began for began, _ in marks))
        for process in processes:
            process.kill()
            process.join()
    for listener in listeners:
        listener.close()
    return found[1:]


def _mark(pipe: Pipe, process: BaseProcess) -> tuple[float, float]:
    """When a host began and ended its round. Raises RuntimeError if its process is gone."""
    wait([pipe, process.sentinel])
    if not pipe.poll():
        raise RuntimeError(f"a host's process ended with exit code {process.exitcode}")
    began, ended = pipe.recv()
    return began, ended


def measure(options: argparse.Namespace) -> list[Row]:
    """All patterns at all links."""
    slow = [Link(bandwidth=100.0), Link(bandwidth=50.0), Link(bandwidth=1000.0)]
    far = Link(bandwidth=100.0, delay=20.0)
    plan: list[tuple[str, ProcessBody, int, float, Link]] = [
        *(("ring of 4, 4.5 MB", ring, HOSTS, 2 * (HOSTS - 1) / HOSTS * RING_BYTES, link) for link in slow),
        *(("4 hosts to one, 1.5 MB each", incast, HOSTS + 1, HOSTS * INCAST_BYTES, link) for link in slow),
        *(("one host to one, 1.5 MB", flow, 2, FLOW_BYTES, link) for link in (*slow, far)),
    ]
    rows = []
    for what, body, hosts, nbytes, link in plan:
        assert link.bandwidth is not None
        due = nbytes * 8 / (link.bandwidth * 1e6) + link.delay / 1000
        seconds = times(body, hosts, link, options.rounds)
        middle = median(seconds)
        name = f"{what}, {link.bandwidth:.0f} Mbit/s" + (f", {link.delay:.0f} ms" if link.delay else "")
        say(f"{name}: {middle * 1e3:.1f} ms, arithmetic {due * 1e3:.1f} ms")
        off = [abs(second / due - 1) * 100 for second in seconds]
        bound = "<= 3" if link.bandwidth <= 100 else ""
        note = f"{middle * 1e3:.1f} ms, arithmetic {due * 1e3:.1f} ms"
        rows.append(row("", name, Figure(median(off), min(off), max(off)), "% off", bound, note))
    return rows


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds that the median is taken of")


if __name__ == "__main__":
    run_table("link_accuracy", "How true the pretended links are", measure, _options)
