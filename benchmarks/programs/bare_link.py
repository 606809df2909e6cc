"""The link between two hosts alone: in each step both send as many bytes as a model has, over one plain connection.

No step of two hosts that exchanges float32 gradients and waits for the values takes less, whatever computes it.
"""

import argparse
import os
import socket
import threading
import time
from collections.abc import Callable

from benchmarks.models import build, parameters
from benchmarks.programs.stepper import Line


def connected(rank: int, address: tuple[str, int]) -> socket.socket:
    """Connect the two. Raises OSError."""
    if rank == 0:
        with socket.create_server(address) as listener:
            return listener.accept()[0]
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(0.05)  # the other has not begun to listen; the side's patience ends this


def exchange(connection: socket.socket, size: int) -> Callable[[], None]:
    """What a step does: send `size` bytes and receive as many."""
    here, there = bytearray(size), memoryview(bytearray(size))

    def receive() -> None:
        got = 0
        while got < size:
            got += connection.recv_into(there[got:])

    def step() -> None:
        receiver = threading.Thread(target=receive)
        receiver.start()
        connection.sendall(here)
        receiver.join()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--peer")
    options = parser.parse_args()
    rank, line = int(os.environ["RANK"]), Line(options.socket)
    work = build(options.model, rank)
    connection = connected(rank, (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    step = exchange(connection, 4 * parameters(work.model))
    step()
    line.say(rank=rank, pid=os.getpid(), samples=work.samples, first=time.time())
    for order in line.orders():
        if "steps" not in order:
            break
        for _ in range(order["steps"]):
            step()
        line.say(loss=0.0)


if __name__ == "__main__":
    main()
