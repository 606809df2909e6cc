"""Who is out of reach: the rule, and real connections over a network that is cut."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch
from transport_pairs import SERVER, WAIT, WORKER, Recorder, identity
from two_hosts import VirtualNetwork, created_network

from topotrain.comm.transport.peer_keepalive import KernelSignals, SilenceTimer
from topotrain.comm.transport.tcp import TcpTransport
from topotrain.core.protocol import Fetch, Push


def silent(since: float, now: float, **asked: int) -> tuple[float, KernelSignals]:
    return now, KernelSignals(now - since, **asked)


HEARD = KernelSignals(0.1, again=40, tries=7)
STOPPED = (silent(0.4, 0.5, again=5, tries=5), silent(0.4, 100.0, again=5, tries=5))
MEANWHILE = (STOPPED[0], (100.0, KernelSignals(60.0, again=5)))
LOOKS = {
    "silence for the lease, after two questions": (
        [silent(0.4, now, again=int(2 * now), tries=int(2 * now)) for now in (0.5, 1.0, 1.5, 2.0, 2.5)],
        "....x",
    ),
    "one question in vain": ([silent(0.0, now / 2, again=1, tries=1) for now in range(1, 20)], "." * 19),
    # The peer does not read: the kernel asks at growing intervals, and each question was answered.
    "a closed window": ([silent(1.0, now / 2) for now in range(2, 200)], "." * 198),
    "a closed window, and two questions in vain": (
        [silent(1.0, now, probes=2) for now in (1.5, 2.0, 2.5, 3.0)],
        "...x",
    ),
    "questions before the last answer": (
        [(0.5, HEARD), *((0.5 + now / 2, replace(HEARD, silent_s=0.1 + now / 2)) for now in range(1, 20))],
        "." * 20,
    ),
    # A process that was stopped gives the others time.
    "silence after a stop": ([*STOPPED, *(silent(0.4, now, again=9, tries=9) for now in (100.5, 101.0))], "...x"),
    "an answer after a stop": ([*STOPPED, (100.5, KernelSignals(0.3))], "..."),
    "silence during a stop": (
        [*MEANWHILE, *((now, KernelSignals(now - 40.0, again=9)) for now in (100.5, 101.0, 101.5))],
        "...xx",
    ),
}


@pytest.mark.parametrize("name", LOOKS)
def test_who_is_silent_for_the_lease_and_has_left_two_questions_unanswered_is_gone(name: str) -> None:
    looks, expected = LOOKS[name]
    lease = SilenceTimer(2.0, 0.0)
    assert ["x" if lease.update(signs, now) else "." for now, signs in looks] == [*expected]


# --- real connections ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network() -> Iterator[VirtualNetwork]:
    with created_network("lease") as created:
        yield created


@dataclass
class Ends:
    """A worker on host 1 that is connected to a server on host 0."""

    network: VirtualNetwork
    worker: Recorder = field(default_factory=Recorder)
    server: Recorder = field(default_factory=Recorder)

    def __post_init__(self) -> None:
        self.there = self.network.run_on(0, lambda: self._wire(0))
        self.here = self.network.run_on(1, lambda: self._wire(1))
        url = self.network.run_on(0, lambda: self.there.attach(SERVER, self.server))
        self.network.run_on(1, lambda: self.here.attach(WORKER, self.worker))
        self.network.run_on(1, lambda: self.here.connect(WORKER, SERVER, url))
        self.check(1)

    def _wire(self, number: int) -> TcpTransport:
        return TcpTransport(identity(), host=self.network.addresses[number], lease_s=1.0)

    def check(self, round: int) -> None:
        """Both directions are open."""
        self.here.send(WORKER, SERVER, Fetch(round))
        assert self.server.next() == Fetch(round)
        self.there.send(SERVER, WORKER, Fetch(round))
        assert self.worker.next() == Fetch(round)

    def close(self) -> None:
        for wire in (self.here, self.there):
            wire.close()


@pytest.fixture
def ends(network: VirtualNetwork) -> Iterator[Ends]:
    made = Ends(network)
    yield made
    network.restore()
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "lease"]


def much() -> Push:
    return Push(0, 0, 1 << 22, 1.0, b"", body=torch.zeros(1 << 22))


def both_hear(ends: Ends, began: float) -> None:
    for resident in (ends.worker, ends.server):
        assert "has not answered for" in resident.end()
    assert 0.9 < time.monotonic() - began < 5  # 1.0 to 1.5, where nothing else runs


def test_a_plug_that_is_pulled_is_noticed_by_both(ends, network):
    began = time.monotonic()
    network.set_link(1, "down")
    both_hear(ends, began)


def test_a_cut_of_one_direction_is_noticed_by_both(ends, network):
    began = time.monotonic()
    network.block(1)
    reasons = [resident.end() for resident in (ends.server, ends.worker)]
    # Whoever is still heard tells the other one, unless that has noticed itself.
    assert any("has not answered for" in reason for reason in reasons), reasons
    assert time.monotonic() - began < 5


def test_a_flap_shorter_than_the_lease_is_not_noticed(ends, network):
    for number in (0, 1):
        network.block(number)
        time.sleep(0.4)
        network.unblock(number)
        ends.check(2)
    assert ends.worker.ends.empty() and ends.server.ends.empty()


def test_who_does_not_read_for_long_is_not_gone(ends):
    """Far more than the kernel's buffers hold; nobody takes it for three leases."""
    reads = threading.Event()
    ends.server.on_handle = lambda *_: reads.wait(WAIT)
    for _ in range(8):
        ends.here.send(WORKER, SERVER, much())
    assert not reads.wait(3.0)
    reads.set()
    for _ in range(8):
        assert isinstance(ends.server.next(), Push)
    ends.server.on_handle = lambda *_: None
    ends.check(3)
    assert ends.worker.ends.empty() and ends.server.ends.empty()
