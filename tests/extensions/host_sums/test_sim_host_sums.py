"""Deaths of workers whose unit sends one sum, under the simulated clock: every batch counts once.

The network keeps the order of messages, as real transports do, and bodies are read where they are.
"""

from dataclasses import replace

import pytest
import torch
from fault_schedule import VIEWS, Fault, FaultSchedule
from fault_trial import Trial
from seeds import SOAK, every, seeds
from simulation import ScriptedCluster, ScriptedWorker, same, total

from topotrain.config.job import Cluster, Grads, Job, Link, Reduce
from topotrain.core.protocol import NO_REVISION
from topotrain.extensions.host_sums.host_reduction import HostReduction

pytestmark = pytest.mark.simulated

TWO_HOSTS = Job(
    reduce=Reduce.kSum,
    grads=Grads.kVisible,
    cluster=Cluster(
        nworkers_per_group=4,
        nworkers_per_procs=2,
        nservers_per_group=2,
        nservers_per_procs=2,
        server_worker_separate=True,
        link=Link(),
    ),
)
HIDDEN = replace(TWO_HOSTS, grads=Grads.kHidden)
TWO_GROUPS = replace(TWO_HOSTS, cluster=replace(TWO_HOSTS.cluster, nworker_groups=2))
JOBS = {"visible": TWO_HOSTS, "hidden": HIDDEN, "two groups": TWO_GROUPS}
FOUND = (95, 104, 110)
"""Messages at which a death shows a defect: a mutant of tests/soak/mutants.txt survives without them."""


def trial(job: Job, seed: int, *faults: Fault, survive: float = 1.0, mode: str = "static") -> Trial:
    schedule = FaultSchedule("views", 6, 2, mode, True, faults, survive=survive)
    return Trial(job, seed, schedule, VIEWS).run()


def sums_of(found: Trial) -> int:
    reductions = [client.gradients for client in found.clients.values()]
    return sum(each.sums for each in reductions if isinstance(each, HostReduction))


@pytest.mark.parametrize("name", JOBS)
def test_without_a_death_all_steps_but_the_first_are_sums(name: str) -> None:
    found = trial(JOBS[name], 1)
    assert not found.wrong()
    steps = 12 // JOBS[name].cluster.nworker_groups
    buckets = len(found.map.buckets)
    assert sums_of(found) == JOBS[name].cluster.nworker_groups * 2 * buckets * (steps - 1)


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize(("mode", "index"), [("static", 0), ("lease", 1), ("static", 3)])
def test_a_worker_dies_at_any_message(name: str, mode: str, index: int) -> None:
    """The lead of the first server, that of the second one, and one of the other unit; survivors go on."""
    kills = sums = 0
    for after in (*every(10 + index, 130, 14)[: 130 if SOAK else 1], *FOUND):
        found = trial(JOBS[name], after, Fault(0, 0, index, after, away=0.02), mode=mode)
        assert not found.wrong(), f"after {after}: {found.wrong()[:3]}"
        kills += found.kills
        sums += sums_of(found)
    assert kills
    assert sums > 0


@pytest.mark.parametrize("name", JOBS)
def test_a_whole_group_restarts_and_sends_sums_again(name: str) -> None:
    again = 0
    for after in every(30, 110, 8):
        found = trial(JOBS[name], after, Fault(0, 0, 0, after, away=0.02), survive=0.0)
        assert not found.wrong(), f"after {after}: {found.wrong()[:3]}"
        if found.kills:
            assert all(found.worker_processes[me].incarnation == 1 for me in found.workers if me.group == 0)
            again += sums_of(found)
    assert again > 0


def play_drops(seed: int) -> bool:
    """One worker commits without what it has pushed. Whether the servers have the sum of all other gradients."""
    cluster = ScriptedCluster(HIDDEN, seed, VIEWS)
    counted: list[list[torch.Tensor]] = []

    def script(worker: ScriptedWorker) -> None:
        worker.open(3.0)
        for step in range(5):
            gradient = worker.numbers()
            worker.sleep(0.0, 0.01)
            drops = step > 1 and worker.me.index == step % 4
            counted.extend([] if drops else [gradient])
            revisions = (NO_REVISION if drops else 0,) * len(cluster.map.buckets)
            worker.step(gradient, revisions=revisions)
        worker.finish()

    cluster.play(script)
    assert any(client.gradients.sums for client in cluster.clients.values())  # type: ignore[attr-defined]
    return same(cluster.values(), [3.0 - part for part in total(counted)])


def test_the_commits_say_which_gradients_are_in_a_sum() -> None:
    assert all(play_drops(seed) for seed in seeds(20, 5, 9, 10))


def play_weights(seed: int) -> bool:
    """The units have different weights in every second step. Whether the servers have the weighted means."""
    job = replace(HIDDEN, reduce=Reduce.kMean)
    cluster = ScriptedCluster(job, seed, VIEWS)
    parts: list[list[torch.Tensor]] = []

    def script(worker: ScriptedWorker) -> None:
        worker.open(3.0)
        for step in range(5):
            gradient = worker.numbers()
            worker.sleep(0.0, 0.01)
            weight = 3.0 if step % 2 and worker.me.index >= 2 else 1.0
            parts.append([part.double() * weight / (8 if step % 2 else 4) for part in gradient])
            worker.step(gradient, weight=weight)
        worker.finish()

    cluster.play(script)
    reductions = [client.gradients for client in cluster.clients.values()]
    assert all(sum(getattr(each, name) for each in reductions) for name in ("sums", "apart"))
    return same(cluster.values(), [3.0 - part for part in total(parts)])


def test_a_server_asks_for_gradients_whatever_comes_last() -> None:
    assert all(play_weights(seed) for seed in seeds(25))
