"""Which workers send a sum of their host, and what a plan says about it."""

from typing import Any

import pytest

from topotrain.config.job import Algorithm, Cluster, Compression, Job, Link, TransportChoice
from topotrain.config.topology import layout
from topotrain.extensions.host_sums.host_units import HostUnit, host_units, used_units
from topotrain.tools.plan.layout_plan import plan

PAIRS = {"nworkers_per_group": 4, "nworkers_per_procs": 2}
APART = {**PAIRS, "nservers_per_group": 2, "server_worker_separate": True}


def test_a_unit_sends_sums_to_the_servers_of_other_hosts() -> None:
    apart = layout(Cluster(**APART), (0, 1, 2, 2))
    everywhere = frozenset({0, 1})
    assert host_units(apart, 0) == (HostUnit(0, (0, 1), everywhere), HostUnit(0, (2, 3), everywhere))
    beside = layout(Cluster(**PAIRS, nservers_per_group=4, nservers_per_procs=2), (0, 1))
    assert [unit.shards for unit in host_units(beside, 0)] == [frozenset({2, 3}), frozenset({0, 1})]
    assert host_units(layout(Cluster(**APART)), 0) == (), "one host"
    assert host_units(layout(Cluster(nworkers_per_group=4), (0, 1, 2, 3)), 0) == (), "one worker in each unit"


def test_each_worker_adds_up_for_as_many_servers() -> None:
    unit = HostUnit(0, (4, 5, 6, 7), frozenset(range(8)))
    assert [unit.lead(shard) for shard in range(8)] == [4, 5, 6, 7, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "changes",
    [
        {"transport": TransportChoice.kTcp},
        {"compression": Compression.kFp16},
        {"shares": (1.0, 1.0, 2.0, 2.0)},
        {
            "nservers_per_group": 4,
            "nservers_per_procs": 2,
            "server_worker_separate": False,
            "algorithm": Algorithm.kRing,
        },
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_jobs_in_which_each_worker_uses_the_link_for_itself(changes: dict[str, Any]) -> None:
    job = Job(cluster=Cluster(**{**APART, "link": Link(), **changes}))
    assert not used_units(job, layout(job.cluster), 0)
    said = " ".join(plan(job).explain().split())
    assert "link: with a host for each unit its 2 workers use the link each for itself: " in said


def test_a_plan_says_what_is_summed() -> None:
    said = " ".join(plan(Job(cluster=Cluster(**APART))).explain().split())
    assert "link: with a host for each unit its 2 workers are summed before the link" in said
    assert "1/2 of the bytes" in plan(Job(cluster=Cluster(**APART))).as_data()["link"]
    for quiet in ({**APART, "transport": TransportChoice.kShm}, {"nworkers_per_group": 4}):
        assert "link" not in plan(Job(cluster=Cluster(**quiet))).as_data()
