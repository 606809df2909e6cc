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


def looked(lease_s: float, *looks: tuple[float, KernelSignals]) -> list[bool]:
    lease = SilenceTimer(lease_s, 0.0)
    return [lease.update(signs, now) for now, signs in looks]


def silent(since: float, now: float, **asked: int) -> tuple[float, KernelSignals]:
    return now, KernelSignals(now - since, **asked)


def test_silence_for_the_lease_after_two_questions_is_the_end():
    looks = [silent(0.4, now, again=int(2 * now), tries=int(2 * now)) for now in (0.5, 1.0, 1.5, 2.0, 2.5)]
    assert looked(2.0, *looks) == [False, False, False, False, True]


def test_one_question_in_vain_is_not_enough():
    assert not any(looked(2.0, *(silent(0.0, now / 2, again=1, tries=1) for now in range(1, 20))))


def test_a_closed_window_is_asked_after_seldom_and_that_is_no_silence():
    """The peer does not read: the kernel asks at growing intervals, and each question was answered."""
    assert not any(looked(2.0, *(silent(1.0, now / 2) for now in range(2, 200))))
    assert looked(2.0, *(silent(1.0, now, probes=2) for now in (1.5, 2.0, 2.5, 3.0))) == [False, False, False, True]


def test_what_was_asked_before_the_last_answer_does_not_count():
    heard = KernelSignals(0.1, again=40, tries=7)
    later = [(0.5 + now / 2, replace(heard, silent_s=0.1 + now / 2)) for now in range(1, 20)]
    assert not any(looked(2.0, (0.5, heard), *later))


def test_whoever_was_stopped_gives_the_others_time():
    before, after = silent(0.4, 0.5, again=5, tries=5), silent(0.4, 100.0, again=5, tries=5)
    later = [silent(0.4, now, again=9, tries=9) for now in (100.5, 101.0)]
    assert looked(2.0, before, after, *later) == [False, False, False, True]
    assert looked(2.0, before, after, (100.5, KernelSignals(0.3))) == [False, False, False]
    meanwhile = [
        (100.0, KernelSignals(60.0, again=5)),
        (100.5, KernelSignals(60.5, again=9)),
        (101.0, KernelSignals(61.0, again=9)),
    ]
    assert looked(2.0, before, *meanwhile, (101.5, KernelSignals(61.5, again=9)))[1:] == [False, False, True, True]


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
