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
import time
from collections.abc import Callable

import torch

from benchmarks.programs.pusher import ELEMENTS, MOMENTUM, RATE, SLOPE, TENSORS
from benchmarks.programs.stepper import Line

COUNT = TENSORS * ELEMENTS
SLICE = 1 << 20  # elements
ADDRESS = ("127.0.0.1", int(os.environ.get("MASTER_PORT", "0")))
SLICES = [(at, min(at + SLICE, COUNT)) for at in range(0, COUNT, SLICE)]


def prepare(sock: socket.socket) -> socket.socket:
    """As topotrain has its sockets on loopback."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    return sock


def receive(sock: socket.socket, target: memoryview) -> None:
    """Receive exactly `target`."""
    while target:
        count = sock.recv_into(target, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the other side has ended")
        target = target[count:]


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor."""
    view: memoryview = tensor.numpy().data.cast("B")
    return view


class Worker:
    """Pushes a constant gradient and pulls the values, slice by slice, at the same time."""

    def __init__(self) -> None:
        self._gradient, self.values = torch.full((COUNT,), SLOPE), torch.zeros(COUNT)
        self._sock = prepare(_dialed())
        self._sock.sendall(struct.pack("<i", int(os.environ["RANK"])))

    def step(self) -> None:
        sender = threading.Thread(target=self._sock.sendall, args=(memory(self._gradient),))
        sender.start()
        receive(self._sock, memory(self.values))
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
        with socket.create_server(ADDRESS) as listener:
            self._socks: dict[int, socket.socket] = {}
            while len(self._socks) < workers:
                sock = prepare(listener.accept()[0])
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
        payload = memory(self._parts[number])
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
        payload = memory(self.values)
        for lo, hi in SLICES:
            self._new[number].acquire()
            self._socks[number].sendall(payload[4 * lo : 4 * hi])

    def value(self) -> float:
        return float(self.values.double().mean())


def _dialed() -> socket.socket:
    deadline = time.monotonic() + 60.0
    while True:
        try:
            return socket.create_connection(ADDRESS)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


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
    done = 1
    for order in line.orders():
        if "steps" in order:
            began = time.perf_counter()
            for _ in range(order["steps"]):
                step()
            done += order["steps"]
            line.say(seconds=time.perf_counter() - began)
        elif "check" in order:
            line.say(value=work.value(), steps=done)
        else:
            break


if __name__ == "__main__":
    main()
