"""Units measure the links to the units that serve them, and agree on the slowest one."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from topotrain.comm.link_speed import LIMIT_S
from topotrain.comm.request_reply import RequestChannel
from topotrain.comm.store import Store, open_store
from topotrain.config.job import Cluster, Compression, Link, TransportChoice
from topotrain.config.slice_size import FAST_BYTES, SENT_BYTES, SLOW_BYTES, SLOW_MBIT, slice_bytes
from topotrain.config.topology import layout
from topotrain.launch.multinode import link_measurement
from topotrain.launch.multinode.link_measurement import LinkMeasurement, links
from topotrain.launch.multinode.node_info import HostMap, rejoined
from topotrain.launch.multinode.node_rendezvous import NodeRendezvous

SECRET, OTHER = b"s" * 32, b"o" * 32
TWO_WORKERS = Cluster(nworkers_per_group=2, nservers_per_group=1, server_worker_separate=True)
TCP = replace(TWO_WORKERS, transport=TransportChoice.kTcp)
APART, TOGETHER = (0, 1, 2), (0, 0, 0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for."""
    monkeypatch.setattr(link_measurement, "_COME_S", 0.1)
    monkeypatch.setattr(link_measurement, "_ALL_S", 0.3)


class SlowUnit(LinkMeasurement):
    """A unit that takes a second for each 100 kB."""

    def serve_client(self, channel: RequestChannel) -> None:
        while (frame := channel.receive(10.0, 10.0)) is not None:
            time.sleep(len(frame.payload) / 1e5)
            if frame.kind == 2:
                channel.send(10.0, 2)


def agreed(store: Store, kinds: Sequence[type[LinkMeasurement]], secrets: Sequence[bytes], cluster: Cluster) -> float:
    """What all units of a job agree on, where they are units of these classes."""
    topology = layout(cluster, APART)
    units = [
        kind(store, rank, topology, "127.0.0.1", secret)
        for rank, (kind, secret) in enumerate(zip(kinds, secrets, strict=True))
    ]
    over = threading.Event()

    def take_part(unit: LinkMeasurement) -> None:
        with unit.taking_part():
            assert over.wait(60)

    with ThreadPoolExecutor(len(units)) as pool:
        others = [pool.submit(take_part, unit) for unit in units[1:]]
        try:
            with units[0].taking_part():
                return units[0].agreed()
        finally:
            over.set()
            for other in others:
                other.result()


def test_a_unit_measures_the_links_to_those_that_serve_it() -> None:
    assert links(layout(TWO_WORKERS, APART)) == {0: (2,), 1: (2,)}
    assert links(layout(TWO_WORKERS, (0, 1, 0))) == {1: (2,)}
    assert links(layout(TWO_WORKERS, TOGETHER)) == {}
    assert links(layout(TCP, TOGETHER)) == {0: (2,), 1: (2,)}
    downpour = Cluster(nworker_groups=2, nservers_per_group=5, server_worker_separate=True)
    found = links(layout(downpour, tuple(range(7))))
    assert found == {0: (2, 3, 4), 1: (3, 4, 5)}


@pytest.mark.parametrize(
    "changed",
    [
        {"compression": Compression.kInt8},
        {"slice_bytes": 1 << 18},
        {"link": Link(bandwidth=100.0)},
    ],
)
def test_what_does_not_follow_the_link_is_not_measured(changed: dict[str, object]) -> None:
    assert links(layout(replace(TCP, **changed), APART)) == {}  # type: ignore[arg-type]


def test_all_links_are_fast(store: Store) -> None:
    found = agreed(store, [LinkMeasurement] * 3, [SECRET] * 3, TCP)
    assert found > 20  # this machine may be busy
    assert slice_bytes(layout(TCP, APART, found)) in (SLOW_BYTES, SENT_BYTES, FAST_BYTES)


def test_the_slowest_link_decides(store: Store) -> None:
    found = agreed(store, [LinkMeasurement, LinkMeasurement, SlowUnit], [SECRET] * 3, TCP)
    assert 0 < found < SLOW_MBIT
    assert slice_bytes(layout(TCP, APART, found)) == SLOW_BYTES


class SilentUnit(LinkMeasurement):
    """A unit that accepts connections and answers nothing."""

    def serve_client(self, channel: RequestChannel) -> None:
        channel.receive(LIMIT_S * 10, LIMIT_S * 10)
        time.sleep(LIMIT_S * 3)


class AbsentUnit(LinkMeasurement):
    """A unit that is late."""

    def _listen(self) -> None:
        return None


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", [SilentUnit, AbsentUnit])
def test_a_unit_that_cannot_be_measured_costs_a_moment(kind: type[LinkMeasurement], store: Store) -> None:
    found = agreed(store, [LinkMeasurement, LinkMeasurement, kind], [SECRET] * 3, TCP)
    assert found == 0.0
    assert slice_bytes(layout(TCP, APART, found)) == SENT_BYTES


@pytest.mark.usefixtures("quick")
def test_a_stranger_is_not_measured(store: Store) -> None:
    assert agreed(store, [LinkMeasurement] * 3, [SECRET, SECRET, OTHER], TCP) == 0.0


@pytest.mark.usefixtures("quick")
def test_numbers_in_the_store_are_checked(store: Store) -> None:
    for written in (b"nan", b"inf", b"-3", b"fast"):
        unit = AbsentUnit(store, 2, layout(TCP, APART), "127.0.0.1", SECRET)
        store.set("speed/0", written)
        store.set("speed/1", b"50.0")
        assert unit.agreed() == 50.0


def test_units_that_replace_others_use_the_same_speed(store: Store) -> None:
    first = NodeRendezvous(store, "j", 0, 1, SECRET)
    first.enter(first.introduce("", "file:///s"))
    hosts = first.publish(replace(first.gather("", False), link_mbit=812.5))
    assert HostMap.loaded(hosts.dumped()).link_mbit == 812.5
    assert rejoined(hosts, {0: hosts.units[0]}).link_mbit == 812.5
    first.close()
