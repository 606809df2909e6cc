"""The planner: the layout of the four named frameworks, and what a model adds to it."""

import json
from dataclasses import replace
from typing import Any

import pytest

from topotrain.config.job import Cluster, ConfigError, Grads, Job, LRGen, OnFailure, TransportChoice, Updater
from topotrain.config.sharding import Parameter
from topotrain.tools.plan.layout_plan import LayoutPlan, PlannedSchema, plan

FRAMEWORKS = {
    "Sandblaster": (Cluster(nworkers_per_group=3, nservers_per_group=2, server_worker_separate=True), 5),
    "AllReduce": (Cluster(nworkers_per_group=3, nservers_per_group=3), 3),
    "Downpour": (
        Cluster(nworker_groups=2, nworkers_per_group=2, nservers_per_group=2, server_worker_separate=True),
        6,
    ),
    "Distributed Hogwild": (Cluster(nworker_groups=3, nserver_groups=3), 3),
}
MODEL = PlannedSchema(
    (
        Parameter("embedding.weight", (1000, 10), (10, 1), "float32", True),
        Parameter("head.weight", (100, 10), (10, 1), "float32", True),
        Parameter("frozen", (64,), (1,), "float64", False),
    ),
    state_factor=2,
)
FLOAT32, FLOAT64 = 11_000, 64


def planned(cluster: Cluster) -> LayoutPlan:
    return plan(Job(cluster=cluster), MODEL)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_server_group_of_the_named_frameworks_owns_every_element(name: str) -> None:
    cluster, units = FRAMEWORKS[name]
    bare = plan(Job(cluster=cluster))
    assert bare.as_data()["nprocs"] == units
    assert set(bare.as_data()) == {"nprocs", "units", "server_group_of_worker_group"}
    assert name in bare.explain() and "elements" not in bare.explain()
    data = planned(cluster).as_data()
    for group in range(cluster.nserver_groups):
        owned = [share for share in data["slices"] if share["server"][0] == group]
        assert sum(share["elements"] for share in owned) == FLOAT32 + FLOAT64
        assert sum(share["value_bytes"] for share in owned) == 4 * FLOAT32 + 8 * FLOAT64
        assert len(owned) == cluster.nservers_per_group
    assert data["tensors"] == 3
    assert json.loads(json.dumps(data)) == data
    text = planned(cluster).explain()
    assert max(map(len, text.splitlines())) <= 120 and "3 tensors" in text and "imbalance" in text
    servers = [f"server {group}/{index}" for group, index in (share["server"] for share in data["slices"])]
    assert all(any(line.startswith(who) for line in text.splitlines()) for who in ("worker 0/0", *servers))
    homes = planned(Cluster(nserver_groups=0, nworkers_per_group=2)).as_data()["slices"]
    assert [(each["server"], each["elements"]) for each in homes] == [([0, 0], FLOAT32 + FLOAT64)]


def test_memory_counts_what_each_process_holds() -> None:
    job = Job(cluster=FRAMEWORKS["Sandblaster"][0])
    visible = plan(job, MODEL).memory[0]
    hidden = plan(replace(job, grads=Grads.kHidden), MODEL).memory[0]
    assert visible.values == 4 * FLOAT32 + 8 * FLOAT64
    assert visible.gradients == 4 * FLOAT32  # a frozen parameter has none
    assert visible.exchange == 2 * 4 * FLOAT32  # its own part, and the mean that p.grad shows
    assert hidden.exchange == 4 * FLOAT32
    assert visible.state == 0
    assert visible.total == visible.values + visible.gradients + visible.exchange
    found = planned(FRAMEWORKS["Downpour"][0])
    server = next(memory for memory in found.memory if memory.who == "server 0/1")
    assert server.unit == 5
    assert server.exchange == 6 * server.values  # two groups of two workers, and the mean of each
    assert server.state == 2 * server.values  # Adam
    hogwild = planned(FRAMEWORKS["Distributed Hogwild"][0])
    assert hogwild.memory[-1].exchange == 3 * hogwild.memory[-1].values  # one worker, and two copies for the master
    # The second copy of another server.
    cluster = replace(FRAMEWORKS["Sandblaster"][0], nservers_per_group=3, transport=TransportChoice.kTcp)
    alone = [memory.total for memory in planned(cluster).memory[3:]]
    twice = planned(replace(cluster, replicas=2))
    assert [memory.second for memory in twice.memory[3:]] == [alone[2], alone[0], alone[1]]
    assert [memory.total for memory in twice.memory[3:]] == [alone[0] + alone[2], alone[1] + alone[0], sum(alone[1:])]
    assert not any(memory.second for memory in twice.memory[:3])
    assert "second MB" in twice.explain()
    assert "second MB" not in planned(cluster).explain()
    # In a collective, in parts of one server's size: three parts' pushes and means, what comes up and down, and the
    # worker's own.
    for settings, copies in (
        ({"algorithm": "kRing"}, [1 + 6 + 4] * 3),
        ({"algorithm": "kNaive"}, [1 + 12, 1 + 6, 1 + 6]),
        ({"engine": "kGloo"}, [1, 1, 1]),
    ):
        servers = planned(Cluster(nworkers_per_group=3, nservers_per_group=3, **settings)).memory[3:]  # type: ignore[arg-type]
        assert [memory.exchange / memory.values for memory in servers] == copies


def test_more_fragments_than_the_optimizer_has_parameters_are_refused_as_in_a_run() -> None:
    outer = Updater(type="kSGD", learning_rate=LRGen(type="kFixed", base_lr=1.0))  # type: ignore[arg-type]
    cut = Job(cluster=Cluster(sync_freq=12, outer=outer, fragments=3))
    words = r"cluster\.fragments = 3: must be at most 2, the number of parameters that the optimizer has"
    with pytest.raises(ConfigError, match=words):
        plan(cut, replace(MODEL, trained=2))
    assert plan(cut, MODEL).slices is not None
    assert plan(cut).slices is None, "without a program the number is not known"
    with pytest.raises(ConfigError, match="must be at most 3"):
        plan(replace(cut, cluster=replace(cut.cluster, fragments=4)), MODEL)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (
            "tcp://a:1",
            "rendezvous tcp://a:1: if unit 0 serves this store, the job ends when the host of unit 0 is lost",
        ),
        ("env://", "with redis://HOST or file:///SHARED/FOLDER another unit takes over"),
        ("", "on several hosts the job survives the loss of any of them with --rendezvous redis://HOST or file://"),
        ("redis://a/0", ""),
        ("file:///shared", ""),
    ],
)
def test_a_store_that_is_lost_with_unit_0_is_named_with_the_better_ones(url: str, words: str) -> None:
    job = Job(cluster=Cluster(nworkers_per_group=2), rendezvous=url)
    text = " ".join(plan(job).explain().split())
    assert words in text if words else "note:" not in text
    assert "note:" not in plan(Job(rendezvous=url)).explain(), "one unit"
    with pytest.raises(ConfigError, match="rendezvous 'foo'"):
        plan(replace(job, rendezvous="foo"))
    assert "note:" not in plan(replace(job, on_failure=OnFailure.kStop)).explain()


def test_a_plan_of_an_outer_optimizer_has_its_state_on_the_servers_and_the_scripts_on_the_workers() -> None:
    outer = Updater(type="kNesterov", momentum=0.9, learning_rate=LRGen(type="kFixed", base_lr=0.7))  # type: ignore[arg-type]
    cluster = Cluster(nworker_groups=3, server_worker_separate=True, sync_freq=10, outer=outer)
    schema = PlannedSchema((Parameter("w", (500_000,), (1,), "float32", True),), state_factor=2.0)
    found, size = plan(Job(cluster=cluster), schema), 2_000_000
    worker, server = found.memory[0], found.memory[-1]
    assert (worker.values, worker.gradients, worker.exchange, worker.state) == (size, size, 2 * size, 2 * size)
    assert (server.values, server.state, server.exchange) == (size, size, 3 * size)
    assert "in 10 steps each worker sends 2.00 MB to the servers and receives as much (uncompressed)" in found.explain()
    data = found.as_data()["round"]
    assert (data["steps"], data["worker_bytes"], data["server_bytes"], data["group_bytes"]) == (10, size, 3 * size, 0)
    assert (data["link"]["received"], data["link"]["sent"], data["link"]["apart"]) == (3 * size, 3 * size, True)
    assert plan(Job(cluster=replace(cluster, overlap=1)), schema).memory[0].exchange == 3 * size
    assert found.topology.framework == "DiLoCo (rounds of 10 steps)"
    # Groups of two: received values and the difference; the gradient, the mean, and half of the other's gradient.
    found = plan(Job(cluster=replace(cluster, nworkers_per_group=2)), schema)
    assert found.memory[0].exchange == 2 * size + 2.5 * size and found.memory[-1].exchange == 3 * size
    text = " ".join(found.explain().split())
    assert (
        "in 10 steps each worker sends 1.00 MB to the servers and receives 2.00 MB (uncompressed). In each step a "
        "worker sends 2.00 MB to the others of its group and receives as much a round moves 6.00 MB into the host with "
        "servers and 12.00 MB out of it."
    ) in text
    assert found.topology.framework.endswith("(rounds of 10 steps, in synchronous groups of 2 workers)")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"agreement": "kElastic"}, "kElastic: after every update a group and the center move towards each other by"),
        ({"agreement": "kGossip", "sync_freq": 4}, "kGossip: after every 4 updates a group averages with another one"),
        ({"agreement": "kRingAverage"}, "kRingAverage: after every update a group averages with the next one"),
    ],
)
def test_a_plan_says_how_server_groups_average(fields: dict[str, Any], words: str) -> None:
    found = plan(Job(cluster=Cluster(nworker_groups=3, nserver_groups=3, **fields), seed=17))
    said = " ".join(found.explain().split())
    assert f"agreement: {words}" in said and found.as_data()["agreement"].startswith(words)
    assert ("seed 17" in said) is (fields["agreement"] == "kGossip")
    assert "agreement" not in plan(Job(cluster=Cluster(nworker_groups=3, nserver_groups=3))).as_data()
