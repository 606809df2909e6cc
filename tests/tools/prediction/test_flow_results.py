"""Known results, from the arithmetic of the flow model alone: each within 5 % of theory."""

from collections.abc import Mapping
from typing import Any

import pytest
from made_probes import model_of, probe_of, without_growth

from topotrain.config.job import Algorithm, Apply, ChangeMethod, Cluster, Grads, Job, Link, LRGen, Updater, UpdaterType
from topotrain.tools.prediction.flow_model import FlowModel, predict_flow
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.prediction import Method
from topotrain.tools.simulator.goodput import ChipFailures, GoodputSimulation, pushes_for

WITHIN = 0.05
MEGABYTES = 100
GIGABIT = Link(bandwidth=1000.0)
ON_LINK_S = MEGABYTES * 1e6 * 8 / 1e9
"""How long the model takes a link, in one direction."""
OUTER = Updater(type=UpdaterType.kNesterov, momentum=0.9, learning_rate=LRGen(type=ChangeMethod.kFixed, base_lr=0.7))


def step_s(cluster: Mapping[str, Any], grads: Grads = Grads.kHidden, apply: Apply = Apply.kAtStep) -> float:
    """The step of a model of which only the exchange takes time."""
    probe = without_growth(probe_of(model_of(MEGABYTES), 0.0005, 0.0005))
    # Small slices: the last one of a server has to go to all workers when all others are through.
    block = Cluster(slice_bytes=1 << 15, **cluster)
    job = Job(cluster=block, grads=grads, apply=apply, per_worker_batch=True)
    return FlowModel(job, probe, Machines(link=GIGABIT)).steps[0].step_s


# --- synchronous exchanges -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [Algorithm.kRing, Algorithm.kAuto])
@pytest.mark.parametrize("hosts", [2, 4, 16, 100])
def test_an_all_reduce_sends_each_byte_twice_less_the_own_part(hosts: int, algorithm: Algorithm) -> None:
    found = step_s({"nworkers_per_group": hosts, "nservers_per_group": hosts, "algorithm": algorithm})
    assert found == pytest.approx(2 * (hosts - 1) / hosts * ON_LINK_S, rel=WITHIN)


@pytest.mark.parametrize("hosts", [4, 16])
def test_visible_means_go_around_once_more(hosts: int) -> None:
    ring = {"nworkers_per_group": hosts, "nservers_per_group": hosts, "algorithm": Algorithm.kRing}
    assert step_s(ring, Grads.kVisible) == pytest.approx(3 * (hosts - 1) / hosts * ON_LINK_S, rel=WITHIN)


def dedicated(workers: int, servers: int) -> dict[str, Any]:
    return {"nworkers_per_group": workers, "nservers_per_group": servers, "server_worker_separate": True}


@pytest.mark.parametrize(("workers", "servers"), [(8, 1), (8, 2), (8, 8), (4, 8), (64, 16)])
def test_dedicated_servers_take_as_long_as_the_busier_side(workers: int, servers: int) -> None:
    theory = max(1.0, workers / servers) * ON_LINK_S
    # Gradients first, and then values.
    assert step_s(dedicated(workers, servers)) == pytest.approx(2 * theory, rel=WITHIN)
    # Both at once, over links in both directions.
    assert step_s(dedicated(workers, servers), apply=Apply.kOnArrival) == pytest.approx(theory, rel=WITHIN)


def byteps(workers: int, spare: int) -> float:
    """The optimum of Jiang et al. (2020) with so many hosts beside the workers, over the time of a model on a link."""
    return 2 * workers * (workers - 1) / (workers**2 + spare * workers - 2 * spare)


def test_spare_hosts_reach_the_optimum_of_byteps() -> None:
    workers = 8
    beside = {"nworkers_per_group": workers, "nservers_per_group": workers}
    none = step_s(beside, apply=Apply.kOnArrival) / ON_LINK_S
    assert none == pytest.approx(byteps(workers, 0), rel=WITHIN)
    all_spare = step_s(dedicated(workers, workers), apply=Apply.kOnArrival) / ON_LINK_S
    assert all_spare == pytest.approx(byteps(workers, workers), rel=WITHIN)
    for spare in (2, 4, 6):
        # Servers of equal parts on all hosts: a worker's host has the parts of others in both directions, too.
        everywhere = {"nworkers_per_group": workers, "nservers_per_group": workers + spare}
        found = step_s(everywhere, apply=Apply.kOnArrival) / ON_LINK_S
        assert found == pytest.approx((2 * workers + spare - 2) / (workers + spare), rel=WITHIN)
        # The optimum gives a worker's host smaller parts than a spare one.
        assert byteps(workers, spare) <= found < none


# --- slow workers ----------------------------------------------------------------------------------------------------


def rates(cluster: Mapping[str, Any], stragglers: Mapping[int, float]) -> float:
    probe = without_growth(probe_of(model_of(0.1, 4), 0.1, 0.2))
    job = Job(cluster=Cluster(**cluster), per_worker_batch=True)
    return FlowModel(job, probe, Machines(link=Link(bandwidth=10_000.0), stragglers=stragglers)).samples_per_s


def test_a_permanent_straggler_holds_up_a_group_and_no_other_one() -> None:
    together = {"nworkers_per_group": 4, "nservers_per_group": 4}
    assert rates(together, {1: 4.0}) == pytest.approx(rates(together, {}) / 4, rel=WITHIN)
    apart = {"nworker_groups": 4, "server_worker_separate": True}
    assert rates(apart, {1: 4.0}) == pytest.approx(rates(apart, {}) * (3 + 1 / 4) / 4, rel=WITHIN)
    homes = {"nworker_groups": 40, "nserver_groups": 40, "sync_freq": 4}
    assert rates(homes, {1: 4.0}) == pytest.approx(rates(homes, {}) * (39 + 1 / 4) / 40, rel=0.01)
    bound = {**apart, "max_staleness": 2}
    assert rates(bound, {1: 4.0}) == pytest.approx(rates(bound, {}) / 4, rel=WITHIN)


def test_the_straggler_is_waited_for() -> None:
    probe = without_growth(probe_of(model_of(0.1, 4), 0.1, 0.2))
    job = Job(cluster=Cluster(nworkers_per_group=70, nservers_per_group=2, server_worker_separate=True))
    found = predict_flow(job, probe, Machines(link=GIGABIT, stragglers={3: 2.0}))
    assert found.method is Method.FLOW
    assert [wait.process for wait in found.waits] == ["worker 0/3"]
    assert found.parts.total == pytest.approx(found.step_s, rel=WITHIN)
    assert found.parts.wait > 0.2


def test_chance_makes_the_slowest_of_many_slower() -> None:
    def slowest(workers: int) -> float:
        probe = without_growth(probe_of(model_of(0.1, 4), 0.1, 0.2, spread=0.1))
        cluster = Cluster(nworkers_per_group=workers, nservers_per_group=1, server_worker_separate=True)
        machines = Machines(link=Link(bandwidth=100_000.0))
        return FlowModel(Job(cluster=cluster, per_worker_batch=True), probe, machines).steps[0].step_s

    # The mean of the largest of 100 standard normal numbers is 2.51.
    assert slowest(100) / slowest(1) == pytest.approx(1.251, rel=WITHIN)


def test_chance_does_not_slow_down_a_straggler() -> None:
    def lost(stragglers: Mapping[int, float]) -> float:
        cluster = Cluster(nworkers_per_group=100, nservers_per_group=1, server_worker_separate=True)
        machines = Machines(link=Link(bandwidth=100_000.0), stragglers=stragglers)
        job = Job(cluster=cluster, per_worker_batch=True)
        steps = [
            FlowModel(job, without_growth(probe_of(model_of(0.1, 4), 0.1, 0.2, spread=each)), machines).steps[0].step_s
            for each in (0.0, 0.1)
        ]
        return steps[1] / steps[0]

    assert lost({}) > 1.2
    # Others are never as slow, and its own steps are as often shorter as they are longer.
    assert lost({1: 4.0}) == pytest.approx(1.0, rel=0.01)


def test_rare_rounds_lose_less_to_chance() -> None:
    def lost(sync_freq: int) -> float:
        cluster = Cluster(nworker_groups=16, server_worker_separate=True, sync_freq=sync_freq, outer=OUTER)
        machines = Machines(link=Link(bandwidth=100_000.0))
        steps = [
            FlowModel(Job(cluster=cluster), probe_of(model_of(0.1, 4), 0.1, 0.2, spread=each), machines).steps[0].step_s
            for each in (0.0, 0.1)
        ]
        return steps[1] / steps[0] - 1

    # The mean of the largest of 16 standard normal numbers is 1.77; the sum of 25 has a fifth of their spread.
    assert lost(1) == pytest.approx(0.177, rel=0.1)
    assert lost(25) == pytest.approx(0.177 / 5, rel=0.1)


# --- asynchronous groups ---------------------------------------------------------------------------------------------


def downpour(groups: int, servers: int = 1) -> FlowModel:
    """Workers that compute for two seconds, and send 100 MB."""
    probe = probe_of(model_of(MEGABYTES), 1.0, 1.0, samples=10)
    cluster = Cluster(nworker_groups=groups, nservers_per_group=servers, server_worker_separate=True)
    return FlowModel(Job(cluster=cluster), probe, Machines(link=GIGABIT))


def test_one_server_saturates_as_distbelief_found() -> None:
    alone = downpour(1)
    # Each step brings the model to the server once.
    most = 10 / ON_LINK_S
    knee = alone.steps[0].step_s / ON_LINK_S
    assert 3 < knee < 5
    before = 0.0
    for groups in (1, 2, 4, 8, 64, 500):
        bound, found = min(groups * alone.samples_per_s, most), downpour(groups).samples_per_s
        assert before < found <= bound * (1 + 1e-9), groups
        before = found
        # Near the knee groups meet at the server by chance, and wait for each other.
        if not knee / 4 < groups < knee * 4:
            assert found == pytest.approx(bound, rel=WITHIN), groups
    busiest = predict_flow(downpour(64).job, downpour(64).probe, Machines(link=GIGABIT)).busiest[0]
    assert busiest.name.startswith("server 0/0's link")
    assert busiest.share == pytest.approx(1.0, rel=WITHIN)
    # With more servers each has a part of it.
    assert downpour(64, 8).samples_per_s == pytest.approx(8 * most, rel=WITHIN)


def test_staleness_is_the_number_of_the_others() -> None:
    found = predict_flow(downpour(80).job, downpour(80).probe, Machines(link=GIGABIT)).staleness
    assert found.mean == pytest.approx(79, rel=WITHIN)
    together = Job(cluster=Cluster(nworkers_per_group=80, nservers_per_group=2, server_worker_separate=True))
    assert predict_flow(together, downpour(1).probe, Machines(link=GIGABIT)).staleness.max == 0


def test_a_slow_network_hurts_those_least_that_exchange_least() -> None:
    def samples(**cluster: Any) -> float:
        probe = probe_of(model_of(MEGABYTES), 0.1, 0.2)
        job = Job(cluster=Cluster(**cluster), per_worker_batch=True)
        return FlowModel(job, probe, Machines(link=Link(bandwidth=100.0, delay=20.0))).samples_per_s

    hosts = 8
    reduced = samples(nworkers_per_group=hosts, nservers_per_group=hosts)
    rarely = samples(nworker_groups=hosts, server_worker_separate=True, sync_freq=100, outer=OUTER)
    hidden = samples(nworker_groups=hosts, server_worker_separate=True, sync_freq=2000, quorum=1, outer=OUTER)
    assert reduced < rarely < hidden
    # Workers that never wait lose what a push costs.
    assert hidden == pytest.approx(hosts * 48 / 0.3, rel=WITHIN)


def test_server_groups_share_nothing_in_a_step() -> None:
    def samples(groups: int, homes: int, apart: bool = False) -> float:
        probe = probe_of(model_of(MEGABYTES), 0.1, 0.2)
        cluster = Cluster(nworker_groups=groups, nserver_groups=homes, sync_freq=16, server_worker_separate=apart)
        return FlowModel(Job(cluster=cluster), probe, Machines(link=GIGABIT)).samples_per_s

    assert samples(100, 100) == pytest.approx(100 * samples(1, 1), rel=WITHIN)
    # Two groups of each server group meet there, as in a job of two.
    assert samples(100, 50, apart=True) == pytest.approx(50 * samples(2, 1, apart=True), rel=WITHIN)


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("quorum", "parts"), [(0, 1), (1, 8)])
def test_goodput_of_lock_step_and_of_decoupled_workers(quorum: int, parts: int) -> None:
    """The prediction beside a simulation, in which the product's own server decides the rounds."""
    hosts, mtbf_s = 65, 20_000.0
    cluster = Cluster(
        nworker_groups=64, server_worker_separate=True, sync_freq=24, quorum=quorum, outer=OUTER, workspace="w"
    )
    probe = probe_of(model_of(1), 0.5, 0.5)
    found = predict_flow(Job(cluster=cluster), probe, Machines(link=GIGABIT, mtbf_s=mtbf_s)).goodput
    assert found is not None
    stall_s = probe.start_s + 0.4
    groups = 64 if quorum else 1
    failures = ChipFailures(hosts, mtbf_s, stall_s, base=0.0)
    simulation = GoodputSimulation(failures, groups, quorum)
    for _ in simulation.run(min(20_000, pushes_for(failures, groups))):
        pass
    assert found == pytest.approx(simulation.found().share, rel=WITHIN)
