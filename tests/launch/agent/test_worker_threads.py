"""How many threads a worker computes with."""

import os

import pytest

from topotrain.config.job import Cluster, Job
from topotrain.config.topology import layout
from topotrain.launch.agent.worker_threads import OMP, allowed_cores, worker_threads

FOUR = Job(cluster=Cluster(nworker_groups=4, nservers_per_group=2, server_worker_separate=True))
"""Units 0 to 3 have a worker each, and units 4 and 5 a server."""


@pytest.mark.parametrize(("cores", "expected"), [(16, 4), (7, 1), (8, 2), (2, 1), (1, 1)])
def test_the_cores_of_a_host_are_divided_among_its_workers(cores: int, expected: int) -> None:
    assert worker_threads(FOUR, layout(FOUR.cluster), 0, {}, cores) == expected


def test_the_job_file_comes_before_the_environment_and_both_before_the_cores() -> None:
    topology = layout(FOUR.cluster)
    assert worker_threads(FOUR, topology, 0, {OMP: "3"}, 16) == 0, "the process reads it from its environment"
    assert worker_threads(Job(cluster=FOUR.cluster, threads=5), topology, 0, {OMP: "3"}, 16) == 5


def test_only_workers_of_the_same_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    topology = layout(FOUR.cluster, hosts=(0, 0, 0, 1, 1, 1))
    assert [worker_threads(FOUR, topology, unit, {}, 12) for unit in (0, 1, 3)] == [4, 4, 12]


def test_cores_that_a_scheduler_gives_a_unit_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    topology = layout(FOUR.cluster, hosts=(0, 0, 0, 0, 0, 0))
    assert worker_threads(FOUR, topology, 0, {}, 6) == 6
    assert worker_threads(FOUR, layout(FOUR.cluster), 0, {}, 6) == 1, "the units of `topotrain run` have one affinity"


def test_the_affinity_of_the_process_counts() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert allowed_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert 1 <= allowed_cores() <= len(allowed)
