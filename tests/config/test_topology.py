"""The layout, checked against the formulas over all legal combinations up to 16 workers and 16 servers."""

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples

from topotrain.config.job import Cluster, ConfigError, TransportChoice
from topotrain.config.topology import MOST, Address, Role, Topology, layout, validate

DOCS = Path(__file__).parents[2] / "docs" / "topologies.md"
UP_TO = 16
SANDBLASTER = Cluster(nworkers_per_group=3, nservers_per_group=2, server_worker_separate=True)
ALL_REDUCE = Cluster(nworkers_per_group=3, nservers_per_group=3)
DOWNPOUR = Cluster(nworker_groups=2, nworkers_per_group=2, nservers_per_group=2, server_worker_separate=True)
HOGWILD = Cluster(nworker_groups=3, nserver_groups=3)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def splits(groups: int) -> list[tuple[int, int]]:
    """Every legal (members per group, residents per unit) with `groups` groups."""
    sizes = range(1, UP_TO // groups + 1)
    return [(n, p) for n in sizes for p in divisors(groups * n) if n % p == 0 or p % n == 0]


def legal() -> list[dict[str, int]]:
    """Every legal choice of the six counts, up to 16 workers and 16 servers."""
    combinations = []
    for gw in range(1, UP_TO + 1):
        for gs in [0, *divisors(gw)]:
            for (nw, pw), (ns, ps) in product(splits(gw), splits(gs) if gs else [(1, 1), (3, 2)]):
                combinations.append(
                    {
                        "nworker_groups": gw,
                        "nserver_groups": gs,
                        "nworkers_per_group": nw,
                        "nservers_per_group": ns,
                        "nworkers_per_procs": pw,
                        "nservers_per_procs": ps,
                    }
                )
    return combinations


LEGAL = legal()


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """All twelve fields of the block."""
    return Cluster(
        **draw(st.sampled_from(LEGAL)),
        workspace=draw(st.sampled_from(["", "w", "/tmp/x"])),
        server_worker_separate=draw(st.booleans()),
        sync_freq=draw(st.integers(1, 100)),
        start_port=draw(st.integers(1024, 65535)),
        share_memory=draw(st.booleans()),
        poll_time=draw(st.integers(1, 1000)),
    )


def all_workers(t: Topology) -> list[Address]:
    return [worker for g in range(t.worker_groups) for worker in t.workers(g)]


def all_servers(t: Topology) -> list[Address]:
    return [server for sg in range(t.server_groups) for server in t.servers(sg)]


def check_placed_once(t: Topology) -> None:
    assert [worker for unit in t.units for worker in unit.workers] == all_workers(t)
    assert sorted(server for unit in t.units for server in unit.servers) == all_servers(t)
    assert [unit.rank for unit in t.units] == list(range(len(t.units)))
    assert all(t.unit_of(who) == unit.rank for unit in t.units for who in (*unit.workers, *unit.servers))


def check_formulas(t: Topology) -> None:
    c = t.cluster
    wp = c.nworker_groups * c.nworkers_per_group // c.nworkers_per_procs
    sp = c.nserver_groups * c.nservers_per_group // c.nservers_per_procs
    apart = c.server_worker_separate
    assert len(t.units) == (wp + sp if apart else max(wp, sp))
    for _, g, i in all_workers(t):
        assert t.unit_of(Address(Role.WORKER, g, i)) == (g * c.nworkers_per_group + i) // c.nworkers_per_procs
    for _, g, k in [] if t.implicit else all_servers(t):
        place = (g * c.nservers_per_group + k) // c.nservers_per_procs
        assert t.unit_of(Address(Role.SERVER, g, k)) == place + (wp if apart else 0)
    assert all(len(unit.workers) in (0, c.nworkers_per_procs) for unit in t.units)
    assert t.implicit or all(len(unit.servers) in (0, c.nservers_per_procs) for unit in t.units)


def check_groups(t: Topology) -> None:
    r = t.worker_groups // t.server_groups
    for g in range(t.worker_groups):
        assert t.server_group_of(g) == g // r
    served = [g for sg in range(t.server_groups) for g in t.worker_groups_of(sg)]
    assert served == list(range(t.worker_groups))
    assert all(t.server_group_of(g) == sg for sg in range(t.server_groups) for g in t.worker_groups_of(sg))


def check_sums(t: Topology) -> None:
    for g in range(t.worker_groups):
        tree = t.sum_tree(g)
        assert [i for members in tree for i in members] == list(range(t.workers_per_group))
        units = [{t.unit_of(Address(Role.WORKER, g, i)) for i in members} for members in tree]
        assert all(len(places) == 1 for places in units)
        assert len(set().union(*units)) == len(tree)


def check_sharing(t: Topology) -> None:
    for unit in t.units:
        sets = t.sharing(unit.rank)
        members = [worker for one in sets for worker in one]
        assert len(members) == len(set(members))
        assert set(members) <= set(unit.workers)
        assert t.cluster.share_memory or not sets
        for one in sets:
            groups = {worker.group for worker in one}
            homes = {t.server_group_of(g) for g in groups}
            assert len(groups) > 1 == len(homes)
            assert set(one) == {w for w in unit.workers if t.server_group_of(w.group) in homes}


CHECKS = (check_placed_once, check_formulas, check_groups, check_sums, check_sharing)


@given(clusters())
@settings(max_examples=examples(100), deadline=None)
def test_every_legal_cluster_follows_the_rules(cluster):
    topology = layout(cluster)
    for check in CHECKS:
        check(topology)
    data = json.loads(json.dumps(topology.as_data()))
    assert data["nprocs"] == len(data["units"]) == len(topology.units)
    assert data["units"][0]["workers"] == [[worker.group, worker.index] for worker in topology.units[0].workers]
    lines = topology.explain().splitlines()
    assert [line.split()[0] for line in lines[4 : 4 + len(topology.units)]] == [str(u.rank) for u in topology.units]


@given(st.lists(st.integers(1, 9), min_size=6, max_size=6))
@settings(max_examples=examples(200), deadline=None)
def test_a_cluster_is_refused_exactly_where_its_counts_do_not_fit(counts):
    gw, gs, nw, ns, pw, ps = counts
    workers = gw * nw % pw == 0 and (nw % pw == 0 or pw % nw == 0)
    servers = gs * ns % ps == 0 and (ns % ps == 0 or ps % ns == 0)
    cluster = Cluster(
        nworker_groups=gw,
        nserver_groups=gs,
        nworkers_per_group=nw,
        nservers_per_group=ns,
        nworkers_per_procs=pw,
        nservers_per_procs=ps,
    )
    if workers and servers and gw % gs == 0:
        layout(cluster)
    else:
        with pytest.raises(ConfigError):
            layout(cluster)


@pytest.mark.parametrize(
    ("cluster", "name"),
    [
        (SANDBLASTER, "Sandblaster ("),
        (ALL_REDUCE, "AllReduce ("),
        (DOWNPOUR, "Downpour ("),
        (HOGWILD, "Distributed Hogwild ("),
        (Cluster(), "one worker and its server"),
        (Cluster(nworkers_per_group=2, nworkers_per_procs=2), "in-memory Sandblaster"),
        (Cluster(nworkers_per_group=3), "Sandblaster with co-located servers"),
        (Cluster(nworker_groups=2, nworkers_per_procs=2), "in-memory Hogwild"),
        (
            Cluster(nworker_groups=2, nworkers_per_procs=2, server_worker_separate=True),
            "in-memory Hogwild with servers",
        ),
        (Cluster(nworker_groups=4, nworkers_per_procs=2), "hybrid: Downpour between units"),
        (Cluster(nworker_groups=2), "Downpour with co-located servers"),
        (Cluster(nworker_groups=4, nserver_groups=2), "hybrid: Distributed Hogwild"),
        (Cluster(nworker_groups=2, nserver_groups=2, server_worker_separate=True), "Distributed Hogwild with servers"),
        (Cluster(nserver_groups=0, nworkers_per_group=2), "AllReduce without servers"),
        (Cluster(nserver_groups=0, nworker_groups=2, nworkers_per_procs=2), "independent groups"),
    ],
)
def test_a_layout_has_a_name(cluster, name):
    topology = layout(cluster)
    assert topology.explain().startswith(name)
    assert topology.synced == ("Distributed Hogwild" in name)
    assert bool(topology.sharing(0)) == ("in-memory Hogwild" in name or name.startswith("hybrid: Downpour"))


def test_without_declared_servers_each_group_has_a_home_beside_its_first_worker():
    topology = layout(Cluster(nworker_groups=2, nserver_groups=0, nworkers_per_group=4, nworkers_per_procs=2))
    assert (topology.implicit, topology.synced, topology.server_groups, topology.shards) == (True, False, 2, 1)
    assert [topology.unit_of(home) for sg in range(2) for home in topology.servers(sg)] == [0, 2]
    assert [len(unit.servers) for unit in topology.units] == [1, 0, 1, 0]
    data = topology.as_data()
    assert all(unit["servers"] == [] for unit in data["units"])
    assert data["server_group_of_worker_group"] == [None, None]
    with pytest.raises(ValueError, match="does not exist"):
        topology.unit_of(Address(Role.WORKER, 2, 0))


@pytest.mark.parametrize(
    ("counts", "field", "accepted"),
    [
        ({"nworkers_per_group": 4, "nworkers_per_procs": 3}, "nworkers_per_procs", "one of 1, 2, 4"),
        ({"nservers_per_group": 3, "nservers_per_procs": 2}, "nservers_per_procs", "one of 1, 3"),
        ({"nworker_groups": 4, "nserver_groups": 3}, "nserver_groups", "one of 0, 1, 2, 4"),
        ({"nworker_groups": 2, "nserver_groups": 4}, "nserver_groups", "one of 0, 1, 2"),
    ],
)
def test_defect_10_counts_that_do_not_divide_are_an_error_with_a_way_out(counts, field, accepted):
    with pytest.raises(ConfigError) as caught:
        validate(Cluster(**counts))
    assert caught.value.field == f"cluster.{field}"
    assert caught.value.value == counts[field]
    assert accepted in caught.value.accepted
    assert str(caught.value).startswith(f"cluster.{field} = {counts[field]}: must be ")


def test_defect_10_a_slip_of_the_finger_is_an_error_and_not_a_long_wait():
    with pytest.raises(ConfigError, match=f"up to {MOST} workers"):
        layout(Cluster(nworker_groups=2_000_000_000))


def documented() -> list[tuple[str, Cluster, list[list[str]]]]:
    """(heading, cluster, residents of each box in the picture) for every block of the page."""
    found = []
    pattern = r"^##+ ([^\n]*)\n(?:(?!^#).)*?^```\ncluster \{\n(.*?)^\}\n```\n+```\n(.*?)^```"
    for heading, block, picture in re.findall(pattern, DOCS.read_text(), re.DOTALL | re.MULTILINE):
        values = dict(re.findall(r"(\w+): (\w+)", block))
        fields = {name: text == "true" if text in ("true", "false") else int(text) for name, text in values.items()}
        boxes = [re.findall(r"[ws] \d/\d", box) for box in re.findall(r"\|([^|\n]*[ws] \d/\d[^|\n]*)(?=\|)", picture)]
        found.append((heading, Cluster(**fields), boxes))
    return found


def test_the_page_shows_what_the_blocks_mean():
    page = documented()
    assert [cluster for _, cluster, _ in page][:4] == [SANDBLASTER, ALL_REDUCE, DOWNPOUR, HOGWILD]
    assert len(page) == 7
    for heading, cluster, boxes in page:
        topology = layout(cluster)
        assert topology.framework.startswith("hybrid" if heading == "Mixing them" else heading)
        drawn = sorted(name for box in boxes for name in box)
        living = [
            f"{who.role.name.lower()[0]} {who.group}/{who.index}"
            for u in topology.units
            for who in u.workers + u.servers
        ]
        assert drawn == sorted(living), heading


@pytest.mark.parametrize("apart", [True, False])
def test_units_that_workers_have_left_are_idle_and_all_ranks_stay(apart):
    cluster = Cluster(nworkers_per_group=4, nservers_per_group=2, server_worker_separate=apart)
    whole = layout(cluster, (0,) * 6 if apart else (0, 0, 1, 1))
    smaller = layout(replace(cluster, nworkers_per_group=2), whole.hosts)
    assert [unit.rank for unit in smaller.units] == list(range(len(whole.units)))
    assert smaller.idle == 2 and whole.idle == 0
    assert [unit.rank for unit in smaller.units if not unit.workers and not unit.servers] == [2, 3]
    for address in (*smaller.workers(0), *smaller.servers(0)):
        rank = smaller.unit_of(address)
        assert rank == whole.unit_of(address)
        assert address in (*smaller.units[rank].workers, *smaller.units[rank].servers)
        assert smaller.host_of(address) == whole.host_of(address)
        # a unit has the layout of all, with only itself
        assert replace(smaller, units=smaller.units[:1]).unit_of(address) == rank
    with pytest.raises(ValueError, match="3 hosts for"):
        layout(cluster, (0, 0, 0))


def test_shared_memory_does_not_reach_another_host() -> None:
    apart = Cluster(nworkers_per_group=2, transport=TransportChoice.kShm)
    assert len(layout(apart, (0, 0)).units) == 2
    with pytest.raises(ConfigError, match=r"cluster.transport = 'kShm': cannot join units on 2 hosts: kAuto takes"):
        layout(apart, (0, 1))
