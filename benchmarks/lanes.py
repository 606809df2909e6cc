"""Several sockets between two processes: the field `connections`.

Bodies of 1 MB go one way over `TcpTransport` with 1, 2, 4 and 8 sockets: on loopback, where the processor is the limit,
and over emulated links of which some lose packets. The emulated link has no congestion control. So it shows one of two
effects: the bytes behind a lost packet wait on one socket only.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness import ROUNDS, Row, interleave, row
from benchmarks.record import run_table
from topotrain.comm.emulation.emulated_tcp import EmulatedTcpTransport
from topotrain.comm.emulation.link import EmulatedNetwork
from topotrain.comm.security.handshake import TOKEN_BYTES, Identity
from topotrain.comm.transport.tcp import TcpTransport
from topotrain.config.job import Cluster, Link
from topotrain.config.topology import Address, Role, layout
from topotrain.core.protocol import Fetch, Message, Values

NAME, TITLE, GOALS = "lanes", "Several connections between two processes", ()
LANES = (1, 2, 4, 8)
LINKS = {
    "loopback": (None, 40),
    "1 Gbit/s, 20 ms": (Link(bandwidth=1000.0, delay=20.0), 20),
    "1 Gbit/s, 20 ms, 0.1 % lost": (Link(bandwidth=1000.0, delay=20.0, loss=0.001), 20),
    "1 Gbit/s, 20 ms, 1 % lost": (Link(bandwidth=1000.0, delay=20.0, loss=0.01), 20),
    "100 Mbit/s, 20 ms, 1 % lost": (Link(bandwidth=100.0, delay=20.0, loss=0.01), 4),
}
APART = layout(Cluster(server_worker_separate=True, link=Link()))  # HERE and THERE are hosts of their own
HERE, THERE = Address(Role.WORKER, 0, 0), Address(Role.SERVER, 0, 0)


class Receiver:
    """Takes bodies into buffers that are there, and says when the Fetch behind them has come."""

    def __init__(self, count: int) -> None:
        self.into, self.all_here = torch.zeros(count, 1 << 18), threading.Event()

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        return self.into[message.bucket] if isinstance(message, Values) else None

    def handle(self, sender: Address, message: Message) -> None:
        if isinstance(message, Fetch):
            self.all_here.set()

    def lost(self, peer: Address, reason: str) -> None:
        pass


def seconds(link: Link | None, count: int, lanes: int, directory: Path) -> float:
    """The time of `count` bodies, from the first byte handed over until all are received; the second try counts."""
    key = str(time.monotonic_ns())  # links of this try only
    networks = [link and EmulatedNetwork(link, directory, key, APART) for _ in range(2)]
    identity = Identity("bench", bytes(TOKEN_BYTES), 1, 0, "")
    there, here = (
        EmulatedTcpTransport(network, identity, lanes=lanes) if network else TcpTransport(identity, lanes=lanes)
        for network in networks
    )
    receiver, body = Receiver(count), torch.ones(1 << 18)
    here.attach(HERE, Receiver(0))
    here.connect(HERE, THERE, there.attach(THERE, receiver))
    for _ in range(2):
        receiver.all_here.clear()
        began = time.perf_counter()
        for bucket in range(count):
            here.send(HERE, THERE, Values(0, bucket, 0, body=body))
        here.send(HERE, THERE, Fetch(0))
        receiver.all_here.wait()
        spent = time.perf_counter() - began
    if not torch.all(receiver.into == 1):
        raise AssertionError("other values came than were sent")
    closing = threading.Thread(target=there.close)  # each waits for the other's end
    closing.start()
    here.close()
    closing.join()
    return spent


def measure(options: argparse.Namespace) -> Sequence[Row]:
    """For each link one row of its time with one socket, and one with each number of sockets as a part of it."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tt-") as directory:
        for name, (link, count) in LINKS.items():
            sides = {str(lanes): partial(seconds, link, count, lanes, Path(directory)) for lanes in LANES}
            found = interleave(sides, options.rounds, spare=0)
            rows.append(row("", f"{name}, {count} MB, one socket", found["1"].figure.times(1e3), "ms"))
            ratios = ((lanes, found[str(lanes)].over(found["1"])) for lanes in LANES[1:])
            rows += [row("", f"{name}, {lanes} sockets", ratio, "× one socket") for lanes, ratio in ratios]
    return rows


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, lambda parser: parser.add_argument("--rounds", type=int, default=ROUNDS))
