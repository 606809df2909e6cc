"""What the hosts of the servers carry in the rounds of an outer optimizer: bytes, and seconds on a link."""

import json
from typing import Any

import pytest

from topotrain.config.job import Cluster, Grads, Job, Link, LRGen, Updater
from topotrain.config.sharding import Parameter
from topotrain.launch.runtime.round_traffic import RoundTraffic, link_mbit, link_seconds
from topotrain.tools.plan.layout_plan import LayoutPlan, PlannedSchema, plan

OUTER = Updater(type="kNesterov", momentum=0.9, learning_rate=LRGen(type="kFixed", base_lr=0.7))  # type: ignore[arg-type]
MODEL = PlannedSchema(
    (Parameter("w", (500_000,), (1,), "float32", True), Parameter("v", (12_000,), (1,), "float32", True))
)
ELEMENTS = 512_000


def planned(**settings: Any) -> LayoutPlan:
    """The plan of eight islands with servers of their own; `settings` of the cluster."""
    usual = {"nworker_groups": 8, "server_worker_separate": True, "sync_freq": 50, "outer": OUTER}
    return plan(Job(cluster=Cluster(**{**usual, **settings})), MODEL)  # type: ignore[arg-type]


def traffic(**settings: Any) -> RoundTraffic:
    found = planned(**settings).traffic
    assert found is not None
    return found


def words(found: LayoutPlan) -> str:
    return " ".join(found.explain().split())


def test_bytes_and_seconds_of_a_link() -> None:
    assert link_mbit(8 * 1.9e6, 2.9) == pytest.approx(41.9, abs=0.05)
    assert link_seconds(8 * 1.9e6, 41.93) == pytest.approx(2.9, abs=0.001)
    assert link_seconds(1e6, 8.0) == 1.0


@pytest.mark.parametrize(
    ("compression", "up", "down"),
    [
        ("kNone", 4.0, 4.0),
        ("kE3M0", 0.5 + 4 / 256, 2.0),
        ("kInt8", 1 + 4 / 512, 1 + 4 / 512),
        ("kFp16", 2.0, 2.0),
        ("kTopK", 0.08, 4),
    ],
)
@pytest.mark.parametrize("servers", [1, 3])
def test_bytes_are_those_of_the_encodings(compression: str, up: float, down: float, servers: int) -> None:
    """A push goes up, and the changes of the values come down: kE3M0 is for pushes only."""
    found = traffic(compression=compression, nservers_per_group=servers)
    assert found.worker_bytes == pytest.approx(ELEMENTS * up, rel=0.001)
    assert found.worker_received == pytest.approx(ELEMENTS * down, rel=0.001)
    assert found.link.received == pytest.approx(8 * ELEMENTS * up / servers, rel=0.01)
    assert found.link.sent == pytest.approx(8 * ELEMENTS * down / servers, rel=0.01)
    assert (found.server_bytes, found.server_sent) == (found.link.received, found.link.sent), "no worker is there"


def test_the_seconds_of_a_round_and_the_shortest_step() -> None:
    """Both ways at once: the longer one counts."""
    link = traffic(compression="kE3M0", nservers_per_group=2, link=Link(bandwidth=100.0)).link
    assert link.exchange_s == pytest.approx(8 * ELEMENTS / 2 * 2 * 8 / 100e6, rel=0.001)
    assert link.shortest_step_s == pytest.approx(link.exchange_s / 50)
    assert (link.hosts, link.hosts_for_half) == (2, 4)
    half = traffic(compression="kE3M0", nservers_per_group=4, link=Link(bandwidth=100.0)).link
    assert half.shortest_step_s == pytest.approx(link.shortest_step_s / 2, rel=0.01)


def test_servers_beside_workers_share_their_links_and_need_none_between_them() -> None:
    """On each of two hosts: half of each of seven pushes, and the other half of the new values for its own worker."""
    link = traffic(server_worker_separate=False, nservers_per_group=2, link=Link(bandwidth=10.0)).link
    assert link.received == pytest.approx(4 * ELEMENTS / 2 * (7 + 1), rel=0.01)
    assert link.sent == pytest.approx(4 * ELEMENTS / 2 * (7 + 1), rel=0.01)
    assert (link.hosts, link.hosts_for_half) == (2, None)
    together = traffic(server_worker_separate=False, nworkers_per_procs=8).link
    assert (together.received, together.sent) == (0, 0)
    # A group pushes once, and each of its workers receives all. Fragments change no byte of a round.
    found = traffic(nworker_groups=4, nworkers_per_group=2)
    assert (found.worker_bytes, found.worker_received) == (2 * ELEMENTS, 4 * ELEMENTS)
    assert (found.link.received, found.link.sent) == (4 * 4 * ELEMENTS, 8 * 4 * ELEMENTS)
    assert traffic(fragments=2, quorum=1) == traffic()


def test_the_text_has_the_link_and_what_would_halve_it() -> None:
    found = planned(compression="kE3M0", nservers_per_group=2, link=Link(bandwidth=100.0))
    assert (
        "in 50 steps each worker sends 0.26 MB to the servers and receives 1.02 MB (kE3M0 up, changes of the values as "
        "kBf16 down) a round moves 1.06 MB into the busiest of 2 hosts with servers and 4.10 MB out of it. At 100 "
        "Mbit/s that takes 0.328 s; with k servers on k hosts 0.656 s / k. The link is full with steps shorter than "
        "0.00656 s; steps half as long need 4 hosts with servers"
    ) in words(found)
    assert all(len(line) <= 120 for line in found.explain().splitlines())
    data = json.loads(json.dumps(found.as_data()))["round"]
    assert data["link"]["exchange_s"] == pytest.approx(0.3277, rel=0.01)
    assert data["encoding"] == "kE3M0 up, changes of the values as kBf16 down"
    # Without a bandwidth the text has what steps of a second need.
    for settings in ({}, {"link": Link(delay=50.0)}):
        assert (
            "a round moves 16.38 MB into the host with servers and 16.38 MB out of it. With steps of 1 s that is 2.62 "
            "Mbit/s, with steps of 0.1 s ten times as much; with k servers on k hosts each carries a k-th"
        ) in words(planned(**settings))
    # Beside workers no number of hosts is promised.
    text = words(planned(server_worker_separate=False, nservers_per_group=2, link=Link(bandwidth=10.0)))
    assert "The link is full with steps shorter than 0.131 s" in text and "k-th" not in text and "half" not in text


@pytest.mark.parametrize(
    ("settings", "nbytes", "means"),
    [
        ({"nworkers_per_group": 2, "nservers_per_group": 2}, 1.0, 0.5),  # AllReduce on two hosts
        ({"nworkers_per_group": 4, "server_worker_separate": True}, 4.0, 4.0),
        ({"nworker_groups": 4, "server_worker_separate": True}, 4.0, 0.0),  # Downpour: groups of one see no mean
        ({"nworkers_per_group": 4, "nworkers_per_procs": 2, "server_worker_separate": True}, 4.0, 0.0),  # summed
        ({"nworkers_per_group": 2, "nservers_per_group": 2, "compression": "kFp16"}, 0.5, 0.25),
    ],
)
def test_a_step_moves_gradients_up_and_values_down(settings: dict[str, Any], nbytes: float, means: float) -> None:
    found = plan(Job(cluster=Cluster(**settings)), MODEL)
    assert found.step is not None
    sizes = pytest.approx((nbytes * 4 * ELEMENTS, means * 4 * ELEMENTS), rel=1e-3)
    assert (found.step.nbytes, found.step.means) == sizes
    saves = "compression" not in settings
    assert (found.step.by, "With compression: kFp16" in words(found)) == ("kFp16" if saves else "", saves)
    assert found.as_data()["step"]["nbytes"] == found.step.nbytes


def test_a_compression_that_the_layout_refuses_is_not_offered_and_other_layouts_have_no_traffic() -> None:
    cluster = Cluster(nworkers_per_group=4, server_worker_separate=True, backup=1)
    step = plan(Job(cluster=cluster, grads=Grads.kHidden, per_worker_batch=True), MODEL).step
    assert step is not None
    assert (step.nbytes, step.by) == (4 * 4 * ELEMENTS, "")
    for settings in ({}, {"n_push": 2, "n_fetch": 2}, {"transport": "kShm", "nworkers_per_group": 2}):
        assert plan(Job(cluster=Cluster(**settings)), MODEL).step is None  # type: ignore[arg-type]
    assert plan(Job(cluster=Cluster(nworkers_per_group=2)), MODEL).traffic is None
