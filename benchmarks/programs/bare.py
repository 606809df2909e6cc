"""The least that an exchange can cost: bytes over sockets, and sums in shared memory, without any of topotrain's code.

Started by the benchmarks as a side of two or more processes, with the variables of torch.distributed.

    sockets   two processes send each other twice 40 MB at once, over one TCP connection
    reduce    every rank adds its share of all gradients, divides, and writes the mean for every rank; none waits
"""

import argparse
import os
import socket
import threading
import time
from pathlib import Path

import torch

from benchmarks.programs.pusher import ELEMENTS, TENSORS, take_orders
from benchmarks.programs.stepper import Line
from topotrain.comm.transport.tcp_socket import prepare
from topotrain.core.server.gradients.backward_means import IN_CACHE

COUNT = TENSORS * ELEMENTS
SLICE = 4 << 20
WAIT_S = 60.0
TWICE = 2


class Sockets:
    """One of two processes that send each other twice 40 MB."""

    def __init__(self, rank: int, port: int) -> None:
        self._socket = _listening(port) if rank == 0 else connected(port)
        prepare(self._socket)
        self._own, self._into = torch.ones(COUNT), torch.zeros(COUNT)

    def step(self) -> None:
        """Send and receive at once."""
        sender = threading.Thread(target=self._send)
        sender.start()
        data = self._into.view(torch.uint8).numpy().data
        for _ in range(TWICE):
            for at in range(0, len(data), SLICE):
                receive(self._socket, data[at : at + SLICE])
        sender.join()

    def _send(self) -> None:
        data = self._own.view(torch.uint8).numpy().data
        for _ in range(TWICE):
            for at in range(0, len(data), SLICE):
                self._socket.sendall(data[at : at + SLICE])

    def value(self) -> float:
        """1 if everything has come."""
        return float(self._into.double().mean())


def receive(sock: socket.socket, target: memoryview) -> None:
    """Receive exactly `target`."""
    while target:
        count = sock.recv_into(target, 0, socket.MSG_WAITALL)
        if not count:
            raise EOFError("the other process has ended")
        target = target[count:]


def _listening(port: int) -> socket.socket:
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(WAIT_S)
        found, _ = listener.accept()
    found.settimeout(WAIT_S)
    return found


def connected(port: int) -> socket.socket:
    """Return a connection to another process of the side, which may listen a moment later."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), WAIT_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class Reduction:
    """One rank of an all-reduce in memory that all ranks share."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self._rank, self._size = rank, size
        self._gradients = [_mapped(folder / f"gradient-{one}") for one in range(size)]
        self._means = [_mapped(folder / f"mean-{one}") for one in range(size)]
        self._gradients[rank].fill_(1.0)
        self._means[rank].fill_(0.0)  # the pages are there from now on

    def step(self) -> None:
        """Reduce the share of this rank."""
        first, last = (COUNT * share // self._size for share in (self._rank, self._rank + 1))
        for low in range(first, last, IN_CACHE):
            here = slice(low, min(low + IN_CACHE, last))
            out = self._means[0][here]
            torch.add(self._gradients[0][here], self._gradients[1][here], out=out)
            for other in self._gradients[2:]:
                out.add_(other[here])
            if self._size & (self._size - 1):
                out.div_(self._size)
            else:
                out.mul_(1 / self._size)  # the same bits, and faster
            for mean in self._means[1:]:
                mean[here].copy_(out)

    def value(self) -> float:
        """1 if the share of this rank is the mean."""
        first, last = (COUNT * share // self._size for share in (self._rank, self._rank + 1))
        return float(self._means[-1][first:last].double().mean())


def _mapped(file: Path) -> torch.Tensor:
    return torch.from_file(str(file), shared=True, size=COUNT, dtype=torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--way", required=True, help="sockets, or reduce:FOLDER")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    way, _, folder = options.way.partition(":")
    work: Sockets | Reduction
    work = Sockets(rank, int(os.environ["MASTER_PORT"])) if way == "sockets" else Reduction(rank, size, Path(folder))
    line = Line(options.socket)
    line.say(pid=os.getpid())
    take_orders(line, work.step, work.value, done=0)


if __name__ == "__main__":
    main()
