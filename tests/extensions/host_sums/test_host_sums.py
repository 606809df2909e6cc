"""Jobs over several hosts, in which the workers of a unit send one sum: the bits, and the bytes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_job import (
    Result,
    Script,
    Trainer,
    WorkerHandle,
    building,
    cross_entropy,
    job_of,
    reference,
    run_hosted,
    usual_loop,
    vectors,
)
from torch import nn

from topotrain.config.job import Algorithm, Cluster, Compression, Job, Link, TransportChoice
from topotrain.config.topology import layout
from topotrain.extensions.host_sums.host_reduction import HostReduction
from topotrain.extensions.host_sums.host_units import HostUnit, host_units, used_units
from topotrain.tools.plan.layout_plan import plan

HOSTS = (0, 1, 2)
"""Two units of workers and one of servers, each on a host of its own."""
BATCHES = vectors(6, 16)


def wide(width: int = 800) -> nn.Module:
    """Its buckets end inside of parameters."""
    return nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Linear(width, 5))


def large() -> nn.Module:
    """Large beside the messages without a body."""
    return wide(2900)


def two_units(workers: int = 2, **changes: Any) -> Job:
    """Two units of so many workers of one group, and two servers in a third unit."""
    layout = {
        "nworkers_per_group": 2 * workers,
        "nworkers_per_procs": workers,
        "nservers_per_group": 2,
        "nservers_per_procs": 2,
        "server_worker_separate": True,
    }
    return job_of("one", **{**layout, "slice_bytes": 1 << 14, **changes})


def connected(script: Script) -> Script:
    """The script, begun when the workers of each unit are connected, so that the second step is one of sums."""

    def run(trainer: WorkerHandle) -> None:
        reduction = trainer.exchange.gradients
        if isinstance(reduction, HostReduction):
            trainer.exchange.channel.wait_until(lambda: reduction.is_connected)
        script(trainer)

    return run


def run(job: Job, script: Script, folder: Path, hosts: Sequence[int] = HOSTS, **more: Any) -> Result:
    folder.mkdir()
    return run_hosted(job, building(more.get("model", wide)), connected(script), folder, hosts)


def sums_of(result: Result) -> int:
    """How many sums the workers have sent to servers."""
    reductions = [handle.exchange.gradients for handle in result.workers]
    return sum(each.sums for each in reductions if isinstance(each, HostReduction))


@pytest.mark.parametrize("grads", ["kVisible", "kHidden"])
def test_a_unit_sends_one_gradient_and_gets_one_answer(tmp_path: Path, grads: str) -> None:
    script = usual_loop(BATCHES)
    one = run(two_units(4, grads=grads, slice_bytes=1 << 16), script, tmp_path / "one", model=large)
    each = run(two_units(4, grads=grads, slice_bytes=1 << 16, transport="kTcp"), script, tmp_path / "each", model=large)
    assert one.same_bits(each)
    assert one.same_bits(reference(two_units(4), building(large), script))
    assert sums_of(one) > 0
    # The first step is as without sums, and so are the first values; the other five are a quarter.
    model = 4 * sum(value.numel() for value in one.values.values())
    # A unit gets the means, also without a look at them; without sums nothing is sent that the script does not read.
    means = 5 * 2 + 8 if grads == "kVisible" else 0
    saved = (5 * 2 * (8 - 2) - means) * model
    assert sum(each.traffic) - sum(one.traffic) == pytest.approx(saved, rel=0.05)


def apart_of(result: Result) -> int:
    """How many gradients leads have sent one by one."""
    reductions = [handle.exchange.gradients for handle in result.workers]
    return sum(each.apart for each in reductions if isinstance(each, HostReduction))


CHANGES: list[dict[str, Any]] = [
    {"reduce": "kSum"},
    {"grads": "kHidden", "apply": "kOnArrival"},
    {"grads": "kHidden", "pull": "kLazy"},
    {"nonfinite": "kAllow", "grads": "kHidden"},
    {"nservers_per_group": 1, "nservers_per_procs": 1},
    # AllReduce of two hosts.
    {"nservers_per_group": 4, "server_worker_separate": False},
]


@pytest.mark.parametrize(
    ("changes", "size"),
    [({}, 16), ({}, 2), *zip(CHANGES, (5, 5, 16, 5, 16, 18), strict=True)],
    ids=str,
)
def test_the_bits_are_those_of_the_canonical_sum(tmp_path: Path, changes: dict[str, Any], size: int) -> None:
    """Equal shares; unequal ones; and more workers than samples: some have weight 0."""
    job, script = two_units(3, **changes), usual_loop(vectors(4, size))
    found = run(job, script, tmp_path / "job", HOSTS[: 3 if job.cluster.server_worker_separate else 2])
    assert found.same_bits(reference(job, building(wide), script))
    unequal = size == 16 and job.reduce.value == "kMean"
    assert (sums_of(found) > 0, apart_of(found) > 0) == (not unequal, unequal)


@pytest.mark.parametrize("changes", [{}, {"grads": "kHidden", "apply": "kOnArrival"}])
def test_units_of_different_weights_are_asked_for_the_gradients(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Inside each unit the weights are equal, so only the servers see the difference."""

    def script(trainer: Trainer) -> None:
        for number, (samples, y) in enumerate(BATCHES):
            x = samples.clone()  # the workers are threads of one process
            x[:, 0] = 3.0 if number % 2 else torch.tensor([3.0, 7.0]).repeat_interleave(8)
            trainer.optimizer.zero_grad()
            trainer.backward(trainer.losses(cross_entropy, x, y, weight=lambda x, _: float(x[0, 0])))
            trainer.optimizer.step()

    job = two_units(2, **changes)
    found = run(job, script, tmp_path / "job")
    assert found.same_bits(reference(job, building(wide), script))
    assert sums_of(found) > 0
    assert apart_of(found) > 0


def test_only_gradients_that_all_have_are_summed(tmp_path: Path) -> None:
    """Workers without a gradient in a bucket, or in a part of it; several backwards; clipping by the script."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = wide(), wide()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.left(x) if float(x[0, 0]) < 0 else self.right(x)

    def script(trainer: Trainer) -> None:
        for batch in BATCHES:
            trainer.optimizer.zero_grad()
            trainer.backward(trainer.losses(cross_entropy, *batch))
            trainer.backward(trainer.losses(cross_entropy, *batch))
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.5)
            trainer.optimizer.step()

    job = two_units(2)
    found = run(job, script, tmp_path / "job", model=Halves)
    assert found.same_bits(reference(job, building(Halves), script))
    assert sums_of(found) > 0


def accumulating(trainer: WorkerHandle) -> None:
    """The number of backwards is guessed wrong."""
    for number, batch in enumerate(BATCHES):
        trainer.optimizer.zero_grad()
        for _ in range(1 + number % 3):
            trainer.backward(trainer.losses(cross_entropy, *batch))
        trainer.optimizer.step()


def dropping(trainer: WorkerHandle) -> None:
    """A worker sets its gradients to None after they were pushed and summed."""
    for number, batch in enumerate(BATCHES):
        trainer.optimizer.zero_grad()
        trainer.backward(trainer.losses(cross_entropy, *batch))
        if number >= 2 and trainer.me.index == number % 4:
            trainer.model.zero_grad(set_to_none=True)
        trainer.optimizer.step()


@pytest.mark.parametrize("script", [accumulating, dropping])
def test_what_a_script_does_before_its_step_is_as_without_sums(tmp_path: Path, script: Script) -> None:
    found = run(two_units(2, grads="kHidden"), script, tmp_path / "job")
    assert found.same_bits(run(two_units(2, grads="kHidden", transport="kTcp"), script, tmp_path / "each"))
    assert sums_of(found) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_have_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    batches = [(x.to(dtype), y) for x, y in BATCHES]
    job, script = two_units(2), usual_loop(batches)

    def model() -> nn.Module:
        return wide().to(dtype)

    found = run(job, script, tmp_path / "job", model=model)
    assert found.same_bits(reference(job, building(model), script))
    # The mean of float16 makes the parts smaller first, by the weights of the whole group.
    assert (sums_of(found) > 0) is (dtype is not torch.float16)


@pytest.mark.parametrize("changes", [{}, {"grads": "kHidden"}])
def test_a_gradient_that_is_not_finite_is_that_of_its_worker(tmp_path: Path, changes: dict[str, Any]) -> None:
    """One worker's gradient of one step is infinite: what is applied, and who is named, is as without sums."""

    def script(trainer: WorkerHandle) -> None:
        for number, (x, y) in enumerate(BATCHES):
            factor = float("inf") if number == 3 and trainer.me.index == 2 else 1.0
            trainer.optimizer.zero_grad()
            trainer.backward([loss * factor for loss in trainer.losses(cross_entropy, x, y)])
            trainer.optimizer.step()

    found = run(two_units(2, **changes), script, tmp_path / "job")
    each = run(two_units(2, transport="kTcp", **changes), script, tmp_path / "each")
    assert found.same_bits(each)
    assert sums_of(found) > 0
    assert apart_of(found) > 0
    named = [handle.worker.tally.skips for handle in found.workers]
    assert named == [handle.worker.tally.skips for handle in each.workers]
    assert any("worker 0/2" in str(skips) for skips in named)


# --- which workers send a sum of their host, and what a plan says about it -------------------------------------------

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
