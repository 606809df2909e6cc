"""The work of P2 without topotrain: two workers, one server, plain sockets and the same kernels.

Rank 0 receives the gradients of all others, adds them up, divides, looks for values that are not finite, updates, and
sends the new values to all. It has one thread per worker, blocking calls on the final buffers, and slices of 4 MB. It
keeps no order of decisions, names no message, survives no loss, and checks nothing: what it takes is the price of the
bytes and of the kernels on this machine.
"""

import argparse
import os
import socket
import struct
import threading
from collections.abc import Callable

import torch

from benchmarks.programs.bare import connected, receive
from benchmarks.programs.pusher import ELEMENTS, MOMENTUM, RATE, SLOPE, TENSORS, take_orders
from benchmarks.programs.stepper import Line
from topotrain.comm.transport.connection import byte_view
from topotrain.comm.transport.tcp_socket import prepare

COUNT = TENSORS * ELEMENTS
SLICE = 1 << 20  # elements
PORT = int(os.environ.get("MASTER_PORT", "0"))
SLICES = [(at, min(at + SLICE, COUNT)) for at in range(0, COUNT, SLICE)]


class Worker:
    """Pushes a constant gradient and pulls the values, slice by slice, at the same time."""

    def __init__(self) -> None:
        self._gradient, self.values = torch.full((COUNT,), SLOPE), torch.zeros(COUNT)
        self._sock = connected(PORT)
        prepare(self._sock)
        self._sock.sendall(struct.pack("<i", int(os.environ["RANK"])))

    def step(self) -> None:
        sender = threading.Thread(target=self._sock.sendall, args=(byte_view(self._gradient),))
        sender.start()
        receive(self._sock, byte_view(self.values))
        sender.join()

    def value(self) -> float:
        return float(self.values.double().mean())


class Server:
    """Adds up, updates and replies."""

    def __init__(self, workers: int) -> None:
        self._parts = [torch.zeros(COUNT) for _ in range(workers)]
        self.values, self._momentum, self._mean = torch.zeros(COUNT), torch.zeros(COUNT), torch.zeros(SLICE)
        self._steps = 0
        self._new = [threading.Semaphore(0) for _ in range(workers)]
        with socket.create_server(("127.0.0.1", PORT)) as listener:
            self._socks: dict[int, socket.socket] = {}
            while len(self._socks) < workers:
                sock, _ = listener.accept()
                prepare(sock)
                (rank,) = struct.unpack("<i", sock.recv(4, socket.MSG_WAITALL))
                self._socks[rank - 1] = sock

    def step(self) -> None:
        readers = [threading.Thread(target=self._read, args=(number,)) for number in self._socks]
        writers = [threading.Thread(target=self._write, args=(number,)) for number in self._socks]
        for thread in (*readers, *writers):
            thread.start()
        for thread in readers:
            thread.join()
        for lo, hi in SLICES:
            self._update(lo, hi)
            for new in self._new:
                new.release()
        for thread in writers:
            thread.join()
        self._steps += 1

    def _read(self, number: int) -> None:
        payload = byte_view(self._parts[number])
        for lo, hi in SLICES:
            receive(self._socks[number], payload[4 * lo : 4 * hi])

    def _update(self, lo: int, hi: int) -> None:
        first, *others = [part[lo:hi] for part in self._parts]
        mean = self._mean[: hi - lo]
        torch.add(first, others[0], out=mean) if others else mean.copy_(first)
        for part in others[1:]:
            mean.add_(part)
        mean.mul_(1 / len(self._parts))
        if not torch.isfinite(torch.dot(mean, mean)):
            raise ValueError("a gradient is not finite")
        torch._fused_sgd_(
            [self.values[lo:hi]],
            [mean],
            [self._momentum[lo:hi]],
            weight_decay=0.0,
            momentum=MOMENTUM,
            lr=RATE,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=not self._steps,
        )

    def _write(self, number: int) -> None:
        payload = byte_view(self.values)
        for lo, hi in SLICES:
            self._new[number].acquire()
            self._socks[number].sendall(payload[4 * lo : 4 * hi])

    def value(self) -> float:
        return float(self.values.double().mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--way", required=True, choices=["plain"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    line = Line(options.socket)
    work: Server | Worker = Worker() if int(os.environ["RANK"]) else Server(int(os.environ["WORLD_SIZE"]) - 1)
    step: Callable[[], None] = work.step
    step()
    line.say(pid=os.getpid())
    take_orders(line, step, work.value, done=1)


if __name__ == "__main__":
    main()
