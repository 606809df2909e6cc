"""A pretended network: what a link costs is arithmetic and tested without a clock; bytes come through as they are."""

import random
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from in_process_job import adam, building, job_of, mlp, reference, run_hosted, usual_loop, vectors
from transport_pairs import SERVER, WAIT, WORKER, Recorder

from topotrain.comm.emulation import link as emulated
from topotrain.comm.emulation.link import (
    PACKET,
    REPAIR_S,
    EmulatedNetwork,
    EmulatedRoute,
    LinkMeter,
    ShapedSocket,
)
from topotrain.comm.router import Router, RouterConfig
from topotrain.comm.security.handshake import Identity
from topotrain.comm.store import open_store
from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.config.job import Cluster, ConfigError, Job, Link
from topotrain.config.topology import Address, Role, layout
from topotrain.tools import amounts
from topotrain.tools.cli import job_arguments

RATE = 1000.0  # bytes per second, where a number is looked at
FAST = Link(bandwidth=2000.0)
# Two workers and a server, on a host each.
APART = layout(Cluster(nworkers_per_group=2, server_worker_separate=True, link=Link()))
LINKS = [
    FAST,
    Link(delay=2.0),
    Link(bandwidth=1000.0, delay=3.0, jitter=2.0, loss=0.05),
    Link(bandwidth=200.0, jitter=1.0),
]


class FixedRandom:
    """Draws what it is told."""

    def __init__(self, *draws: float) -> None:
        self.draws = list(draws)

    def random(self) -> float:
        return self.draws.pop(0)

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self.draws.pop(0)


def route(tmp_path: Path, link: Link, up: int = 0, down: int = 1, rng: Any = None, rate: float = RATE) -> EmulatedRoute:
    meters = [LinkMeter(tmp_path / name, rate) for name in (f"{up}-up", f"{down}-down")]
    return EmulatedRoute(link, *meters, rng or random.Random(1))


# ---- the meter -------------------------------------------------------------------------------------------------------


def test_a_link_carries_one_thing_after_the_other(tmp_path: Path) -> None:
    meter = LinkMeter(tmp_path / "m", RATE)
    assert meter.book(5.0, 500) == 5.5
    assert meter.book(5.0, 1000) == 6.5
    assert meter.book(6.0, 100) == pytest.approx(6.6)
    assert meter.book(50.0, 1000) == 51.0, "time in which nothing is sent is lost"


# ---- the route -------------------------------------------------------------------------------------------------------


def send(way: EmulatedRoute, pieces: int, ready: float = 0.0, nbytes: int = 100) -> tuple[float, float]:
    """Pieces one after the other, by a sender that never oversleeps."""
    there = 0.0
    for _ in range(pieces):
        ready, there = way.book(ready, nbytes)
    return ready, there


def test_delay_takes_nothing_from_the_throughput(tmp_path: Path) -> None:
    go_on, there = send(route(tmp_path, Link(delay=300.0)), 20)
    assert (go_on, there) == pytest.approx((2.0, 2.3))


def test_many_to_one_wait_for_the_receivers_link(tmp_path: Path) -> None:
    ways = [route(tmp_path, Link(), up=n, down=9) for n in range(4)]
    ready, there = [0.0] * 4, [0.0] * 4
    for _ in range(40):
        turn = min(range(4), key=ready.__getitem__)
        ready[turn], there[turn] = ways[turn].book(ready[turn], 100)
    assert max(there) == pytest.approx(4.0)  # 40 pieces of 0.1 s over one link
    assert max(there) - min(there) == pytest.approx(0.3)  # in turn
    assert all(t - r < 0.5 for r, t in zip(ready, there, strict=True))  # and nobody is far ahead of what is through


def test_jitter_varies_the_delay_and_never_reorders(tmp_path: Path) -> None:
    way = route(tmp_path, Link(delay=10.0, jitter=30.0), rate=1e6)
    sent = [n / 100 for n in range(300)]
    arrivals = [way.book(ready, 100)[1] for ready in sent]
    assert all(a <= b for a, b in pairwise(arrivals))
    late = [there - ready for ready, there in zip(sent, arrivals, strict=True)]
    assert 0.0 <= min(late) < 0.01
    assert 0.03 < max(late) <= 0.0402


def test_a_lost_packet_is_sent_again_and_those_behind_it_wait(tmp_path: Path) -> None:
    link = Link(loss=0.5, delay=100.0)
    # Of 3 packets 2, then 1 are lost.
    way = route(tmp_path, link, rng=FixedRandom(0.9, 0.1, 0.1, 0.4, 0.9, 0.9, 0.9), rate=1e6)
    go_on, there = way.book(0.0, 2 * PACKET + 1)
    assert go_on == pytest.approx((2 * PACKET + 1 + 3 * PACKET) / 1e6)
    assert there == pytest.approx(go_on + 0.1 + 2 * (0.2 + REPAIR_S))
    assert way.book(go_on, 1)[1] == there  # in order


# ---- sockets ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tcp() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        out = socket.create_connection(listener.getsockname())
        back, _ = listener.accept()
    out.settimeout(WAIT)
    back.settimeout(WAIT)
    yield out, back
    out.close()
    back.close()


def shaped(link: Link, sock: socket.socket, directory: Path) -> ShapedSocket:
    made = EmulatedNetwork(link, directory, "k", APART).shape(sock, WORKER, SERVER)
    assert isinstance(made, ShapedSocket)
    return made


def read_all(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


@pytest.mark.parametrize("link", LINKS, ids=str)
def test_bytes_come_through_as_they_are(tcp: Any, tmp_path: Path, link: Link) -> None:
    out, back = shaped(link, tcp[0], tmp_path), tcp[1]
    data = random.Random(3).randbytes(700_001)
    writer = threading.Thread(target=lambda: (out.sendall(data), out.shutdown(socket.SHUT_WR)))
    writer.start()
    assert read_all(back) == data
    back.sendall(b"the other direction is open still")
    assert out.recv(100) == b"the other direction is open still"
    writer.join()
    out.close()
    assert out.fileno() == -1


@pytest.mark.parametrize("how", [socket.SHUT_WR, None])
def test_what_was_sent_arrives_after_the_end(tcp: Any, tmp_path: Path, how: int | None) -> None:
    out = shaped(Link(delay=50.0), tcp[0], tmp_path)
    out.sendall(b"goodbye")
    if how is not None:
        out.shutdown(how)
        with pytest.raises(BrokenPipeError):
            out.sendall(b"more")
    out.close()
    out.close()
    assert read_all(tcp[1]) == b"goodbye"


def test_a_sender_that_sleeps_is_woken_by_the_end(tcp: Any, tmp_path: Path) -> None:
    out = shaped(Link(bandwidth=1e-4), tcp[0], tmp_path)  # two minutes a packet
    ends: list[type] = []

    def write() -> None:
        try:
            out.sendall(bytes(10_000))
        except OSError as error:
            ends.append(type(error))

    writer = threading.Thread(target=write)
    writer.start()
    out.shutdown(socket.SHUT_RDWR)
    writer.join(WAIT)
    assert ends == [BrokenPipeError]
    out._cut.set()  # nor does this test wait for what is under way
    out.close()


def test_a_peer_that_takes_nothing_does_not_hold_up_the_end(
    tcp: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated, "_LINGER_S", 0.05)
    out = shaped(Link(delay=0.1), tcp[0], tmp_path)
    for _ in range(200):  # 50 MB: more than the kernel keeps
        out.sendmsg([bytes(1 << 18)])
    out.close()
    assert not out._carrier.is_alive()
    assert out._under_way


# ---- the layout and the job ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["kAuto", "kTcp"])
def test_units_talk_over_tcp_and_the_processes_of_one_as_before(tmp_path: Path, transport: str) -> None:
    job = job_of("two by two", link=LINKS[2], transport=transport)
    (tmp_path / "store").mkdir(mode=0o700)
    sockets = Path(mkdtemp(prefix="tt-"))

    def router_of(number: int) -> Router:
        store = open_store((tmp_path / "store").as_uri())
        who = Identity(job.name, bytes(32), number, 0, job.digest())
        return Router(RouterConfig(job, layout(job.cluster), who, store, sockets), ProcessMemory())

    here, there, guest = (router_of(number) for number in range(3))
    servers = [Address(Role.SERVER, 0, n) for n in range(2)]
    me = Address(Role.WORKER, 0, 1)
    for home, server in zip((here, there), servers, strict=True):
        home.publish("server", server, home.attach(server, Recorder()))
    guest.attach(me, Recorder(), dial_only=True)
    for server in servers:
        guest.connect(me, server, "server")
    kinds = [guest._routes[me, server].schemes[0] for server in servers]
    assert kinds == ["unix" if transport == "kAuto" else "tcp", "tcp"]
    assert type(guest._routes[me, servers[1]]._routes[me, servers[1]]._sock) is ShapedSocket
    for each in (guest, here, there):
        each.close()


def test_a_link_changes_no_bit(tmp_path: Path) -> None:
    name = "two by two"
    script, build = usual_loop(vectors(6)), building(mlp, adam)
    link = Link(bandwidth=100.0, delay=2.0, jitter=1.0, loss=0.01)
    hosted = run_hosted(job_of(name, link=link), build, script, tmp_path)
    assert hosted.same_bits(reference(job_of(name), build, script))


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("100mbit,20ms", Link(bandwidth=100.0, delay=20.0)),
        ("1gbit", Link(bandwidth=1000.0)),
        ("1.5Mbit, jitter=5ms, loss=0.01", Link(bandwidth=1.5, jitter=5.0, loss=0.01)),
        ("bandwidth=500kbit,delay=1s,loss=2%", Link(bandwidth=0.5, delay=1000.0, loss=0.02)),
        ("100us,.5gbit", Link(bandwidth=500.0, delay=0.1)),
    ],
)
def test_a_link_in_short(text: str, link: Link) -> None:
    assert amounts.link("--emulate", text) == link


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("100", "'100' is not a part of a link"),
        ("100mbit,", "'' is not a part of a link"),
        ("delay=5mbit", "'delay=5mbit' is not a part of a link"),
        ("speed=5mbit", "'speed=5mbit' is not a part of a link"),
        ("-5ms", "'-5ms' is not a part of a link"),
        ("1mbit,2mbit", "bandwidth is given twice"),
        ("0mbit", "--emulate = '0mbit': bandwidth must be 1 bit/s to 1,000,000 Gbit/s"),
        ("loss=1", "--emulate = 'loss=1': loss must be a number >= 0 and < 1"),
        ("jitter=4000s", "--emulate = 'jitter=4000s': jitter must be at most 3600 s"),
    ],
)
def test_what_is_no_link(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        amounts.link("--emulate", text)


def test_the_option_replaces_the_link_of_the_file() -> None:
    job = Job(cluster=Cluster(nworkers_per_group=2, link=Link(loss=0.1)))
    assert job_arguments.with_link(job, "1gbit").cluster == Cluster(nworkers_per_group=2, link=Link(bandwidth=1000.0))
    assert job_arguments.with_link(job, "") is job
    shared = Job(cluster=Cluster(nworkers_per_group=2, transport="kShm"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="transport = kShm: must be kAuto or kTcp with a link"):
        job_arguments.with_link(shared, "1gbit")
