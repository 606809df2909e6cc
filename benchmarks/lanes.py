"""What several sockets per connection bring: `python -m benchmarks.lanes [--rounds N]`.

Bodies of 1 MB go one way over `TcpTransport` with 1, 2, 4 and 8 sockets (`connections` in the conf): on loopback, where
the processor is the limit, and over pretended links of which some lose packets. The pretended link has no congestion
control, so it shows one of two effects: the bytes behind a lost packet wait on one socket only. All counts are measured
in turn, and medians are given.
"""

import argparse
import itertools
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch

from topotrain.comm.emulation.emulated_tcp import EmulatedTcpTransport
from topotrain.comm.emulation.link import EmulatedNetwork
from topotrain.comm.security.handshake import TOKEN_BYTES, Identity
from topotrain.comm.transport.tcp import TcpTransport
from topotrain.config.job import Cluster, Link
from topotrain.config.topology import Address, Role, layout
from topotrain.core.protocol import Fetch, Message, Values

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tt-") as directory:
        for name, (link, count) in LINKS.items():
            times: dict[int, list[float]] = {lanes: [] for lanes in LANES}
            for _, lanes in itertools.product(range(options.rounds), LANES):
                times[lanes].append(seconds(link, count, lanes, Path(directory)))
            middle = {lanes: statistics.median(values) for lanes, values in times.items()}
            shown = "   ".join(f"{n}: {s * 1e3:.1f} ms ({s / middle[1]:.2f} x)" for n, s in middle.items())
            print(f"{name:28} {count:3} MB   {shown}", flush=True)


if __name__ == "__main__":
    main()
