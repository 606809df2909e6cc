"""Rehearsals against arithmetic: what a layout must take where only some things cost time."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from living_objects import living
from made_probe import made_job, made_probe
from seeds import SOAK, examples, soaked

from topotrain.config.job import (
    Agreement,
    Algorithm,
    ChangeMethod,
    Cluster,
    Compression,
    ConfigError,
    Grads,
    Job,
    Link,
    LRGen,
    OnFailure,
    Pull,
    TransportChoice,
    Updater,
    UpdaterType,
)
from topotrain.tools.prediction import rehearsal
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.predict import predict
from topotrain.tools.prediction.prediction import Prediction
from topotrain.tools.prediction.rehearsable import SNAPSHOT_S_PER_BYTE
from topotrain.tools.probe.probe_file import ProbedKernels, ProbedOptimizer, ProbedTransport

approx = pytest.approx
COMPUTE_S = 0.09
MODEL_BYTES = 4_000_000
STEPS = 9
"""Those that each worker makes here, three before the measured ones."""
FAST, SLOW = Link(bandwidth=100_000.0), Link(bandwidth=100.0)
OVER_FAST, OVER_SLOW, STRAGGLER = Machines(link=FAST), Machines(link=SLOW), Machines(link=FAST, stragglers={1: 4.0})
OUTER = Updater(type=UpdaterType.kSGD, learning_rate=LRGen(type=ChangeMethod.kFixed, base_lr=1.0))
APART: dict[str, Any] = {"server_worker_separate": True}
WHOLE: dict[str, Any] = {**APART, "slice_bytes": 1 << 20}
"""For arithmetic that is that of slices of one size."""
ROUNDS: dict[str, Any] = {"nworker_groups": 3, "outer": OUTER, "sync_freq": 4, **APART}
LAYOUTS: dict[str, dict[str, Any]] = {
    "sandblaster": {"nworkers_per_group": 3, "nservers_per_group": 2, **APART},
    "allreduce": {"nworkers_per_group": 3, "nservers_per_group": 3},
    "in memory": {"nworkers_per_group": 3, "nworkers_per_procs": 3, "nservers_per_group": 3, "nservers_per_procs": 3},
    "one server in the unit": {"nworkers_per_group": 2, "nworkers_per_procs": 2},
    "downpour": {"nworker_groups": 3, "nservers_per_group": 2, **APART},
    "hogwild": {"nworker_groups": 3, "nserver_groups": 3},
    "hogwild in memory": {"nworker_groups": 2, "nworkers_per_procs": 2},
    "hybrid": {"nworker_groups": 4, "nworkers_per_group": 2, "nserver_groups": 2, "sync_freq": 2},
    "ring average": {"nworker_groups": 3, "nserver_groups": 3, "agreement": Agreement.kRingAverage},
    "gossip": {"nworker_groups": 4, "nserver_groups": 4, "agreement": Agreement.kGossip},
    "elastic": {"nworker_groups": 3, "nserver_groups": 3, "agreement": Agreement.kElastic, "moving_rate": 0.25},
    "islands": ROUNDS,
    "streaming": {**ROUNDS, "fragments": 2, "overlap": 1},
    "decoupled": {**ROUNDS, "quorum": 1},
    "bounded": {"nworker_groups": 3, "max_staleness": 1, **APART},
    "int8": {"nworkers_per_group": 2, "compression": Compression.kInt8, **APART},
    "topk": {"nworker_groups": 2, "compression": Compression.kTopK, **APART},
    "fp16": {"nworkers_per_group": 2, "compression": Compression.kFp16, **APART},
    "ring": {"nworkers_per_group": 3, "nservers_per_group": 3, "algorithm": Algorithm.kRing},
    "tree": {"nworkers_per_group": 4, "nservers_per_group": 4, "algorithm": Algorithm.kTree},
    "local sgd": {"nworker_groups": 2, "n_push": 3, "n_fetch": 3, **APART},
    "host sums": {"nworkers_per_group": 4, "nworkers_per_procs": 2, "nservers_per_group": 2, **APART},
    "tcp": {"nworkers_per_group": 2, "transport": TransportChoice.kTcp, **APART},
}
LONE = Cluster(nworkers_per_group=3, **APART)
JOBS: dict[str, Job] = {
    **{name: made_job(**cluster) for name, cluster in LAYOUTS.items()},
    "hidden": Job(cluster=LONE, grads=Grads.kHidden),
    "lazy": Job(cluster=LONE, pull=Pull.kLazy),
    "backup": Job(cluster=replace(LONE, backup=1), grads=Grads.kHidden, per_worker_batch=True),
}


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "MEASURED", ((1 << 20, STEPS - rehearsal.WARM_UP),))


def rehearsed(machines: Machines = OVER_FAST, probe: Any = None, **cluster: Any) -> Prediction:
    return predict(made_job(**cluster), probe or made_probe(), machines)


def bytes_between_hosts(found: Prediction) -> float:
    return sum(link.nbytes for link in found.links if link.between_hosts)


ALSO_BELOW = ("sandblaster", "downpour", "hogwild", "hogwild in memory", "ring average", "islands", "bounded")
ALSO_BELOW += ("one server in the unit", "int8", "fp16", "ring", "hidden", "backup")
"""Jobs that other tests rehearse, or that differ little from another one."""


@pytest.mark.parametrize("name", soaked([name for name in JOBS if name not in ALSO_BELOW], ALSO_BELOW))
def test_every_layout_of_the_product_can_be_rehearsed(name: str) -> None:
    on_hosts = list(JOBS).index(name) % 2 and "memory" not in name
    machines = Machines(link=Link(bandwidth=1000.0, delay=1.0)) if on_hosts else Machines()
    found = predict(JOBS[name], made_probe(), machines)
    assert found.step_s > 0 and found.samples_per_s > 0
    assert found.parts.total == approx(found.step_s, rel=0.6)
    assert all(0 <= resource.share <= 1 for resource in found.busiest)
    assert json.loads(found.to_json())["version"] == 1


def test_computing_takes_its_time_and_processes_share_the_cores_of_a_host() -> None:
    found = rehearsed(probe=made_probe(batch=33), **LAYOUTS["sandblaster"], slice_bytes=1 << 20)
    assert found.step_s == approx(COMPUTE_S / 3, rel=0.05)
    assert found.parts.compute == approx(COMPUTE_S / 3, rel=1e-6)
    assert found.samples_per_s == approx(33 / (COMPUTE_S / 3), rel=0.05)
    assert found.same_as_one_process and found.staleness.max == 0
    # Four workers with a quarter of the batch each need as long on one core as one worker.
    four = {"nworkers_per_group": 4, "nworkers_per_procs": 4}
    found = rehearsed(Machines(), made_probe(batch=32, cores=1), **four)
    assert found.step_s == approx(COMPUTE_S, rel=0.02)
    assert (found.busiest[0].name, found.busiest[0].share) == ("host 0's cores", approx(1.0, abs=0.05))
    assert rehearsed(Machines(), made_probe(batch=32, cores=4), **four).step_s == approx(COMPUTE_S / 4, rel=0.02)


# --- links --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", soaked([4], [2]))
def test_a_ring_sends_what_the_theory_says(workers: int) -> None:
    found = rehearsed(
        probe=made_probe((1 << 20,)),
        nworkers_per_group=workers,
        nservers_per_group=workers,
        algorithm=Algorithm.kRing,
    )
    # Besides the ring each worker gets new values of the servers elsewhere.
    assert bytes_between_hosts(found) / workers == approx(3 * (workers - 1) / workers * (4 << 20), rel=0.02)


def test_a_push_and_a_pull_over_the_link_of_one_server() -> None:
    # Four workers send the model and get it back, over the one link of the server: in and out at the same time only
    # in part, since no value is new before all gradients are there.
    job = Job(cluster=replace(LONE, nworkers_per_group=4), grads=Grads.kHidden)
    found = predict(job, made_probe(batch=4), OVER_SLOW)
    one_way = 4 * MODEL_BYTES * 8 / 100e6
    assert one_way < found.step_s < 2 * one_way + COMPUTE_S
    assert found.busiest[0].name.startswith("server 0/0's link")
    assert bytes_between_hosts(found) == approx(8 * MODEL_BYTES, rel=0.01)


def test_the_links_of_one_server_saturate() -> None:
    def found(groups: int, servers: int, mbit: float = 1000.0) -> Prediction:
        machines = Machines(link=Link(bandwidth=mbit))
        return rehearsed(machines, nworker_groups=groups, nservers_per_group=servers, **WHOLE)

    # The link of the server takes 4 MB in 32 ms, so it can serve no more workers than that. Equal workers share it
    # alike, so that their pushes end together, and then all pull: each direction is idle for a part of the time.
    bound = 32 / (MODEL_BYTES * 8 / 1e9)
    eight = found(8, 1).samples_per_s
    assert bound / 2 < eight < bound
    assert not SOAK or found(12, 1).samples_per_s == approx(eight, rel=0.1)
    assert found(8, 4).samples_per_s > 1.8 * eight
    slow = found(4, 1, 100.0).busiest
    assert {resource.name for resource in slow[:2]} == {"server 0/0's link in", "server 0/0's link out"}
    assert slow[0].share > 0.6


def test_messages_and_bytes_cost_both_ends() -> None:
    costs = ProbedTransport(0.0, 0.0, 0.0, 1e-8, 0.0)  # 40 ms for the model, at each receiver
    found = rehearsed(Machines(hosts=2), made_probe(transports={"shm": costs, "tcp": costs}), **APART)
    # The gradients are received while others are computed, and the values behind the step.
    assert found.step_s == approx(COMPUTE_S + 0.04 + 0.01, rel=0.1)


def test_islands_exchange_less() -> None:
    four, eight = (bytes_between_hosts(rehearsed(**{**ROUNDS, "sync_freq": steps})) for steps in (4, 8))
    assert eight == approx(four / 2, rel=0.05)
    assert four == approx(3 * 2 * MODEL_BYTES / 4, rel=0.05)


@settings(max_examples=examples(12), deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.lists(st.integers(1, 70_000), min_size=1, max_size=4),
)
def test_bytes_are_those_of_the_model_whatever_the_counts(
    groups: int, workers: int, servers: int, separate: bool, counts: list[int]
) -> None:
    counted = {"nworker_groups": groups, "nworkers_per_group": workers, "nservers_per_group": servers}
    found = rehearsed(probe=made_probe(counts), **counted, server_worker_separate=separate)
    model = sum(-(-count // 64) * 64 * 4 for count in counts)
    sent = sum(link.nbytes for link in found.links if link.name.startswith("worker"))
    # A worker pushes the padded model to the servers; what stays in its process is not sent.
    assert sent <= groups * workers * (model * 1.02 + 20_000)
    if separate:
        assert sent >= groups * workers * model


# --- stragglers and waits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", soaked([4.0, 1000.0], [1.0]))
def test_a_straggler_does_not_prolong_the_rehearsal(times: float) -> None:
    made: list[tuple[int, int]] = []
    machines = replace(STRAGGLER, stragglers={1: times})
    found = predict(JOBS["downpour"], made_probe(), machines, stepped=lambda *counts: made.append(counts))
    # Three workers. Up to four times slower all of their steps are made.
    assert made[-1][0] == approx(STEPS * (2 * times + 1) if times <= 4 else 4 * 3 * STEPS, abs=5)
    assert all(steps <= most for steps, most in made)
    assert found.samples_per_s == approx(32 / COMPUTE_S * (2 + 1 / times), rel=0.05)
    assert found.start_s < 3


def test_a_group_with_a_straggler_that_makes_no_step_is_counted_by_arithmetic() -> None:
    slow = Machines(link=FAST, stragglers={3: 1000.0})
    found = rehearsed(slow, nworker_groups=2, nworkers_per_group=2, sync_freq=1, **APART)
    alone = rehearsed(nworkers_per_group=2, **APART)
    assert found.samples_per_s == approx(alone.samples_per_s * 1.001, rel=0.05)


def test_a_straggler_costs_each_framework_what_it_waits_for() -> None:
    found = rehearsed(STRAGGLER, nworkers_per_group=4, **APART)
    assert found.step_s == approx(COMPUTE_S, rel=0.05)  # a quarter of the batch, four times as long
    # Three workers of four wait for three quarters of the step.
    assert (found.waits[0].process, found.waits[0].seconds) == ("worker 0/1", approx(0.75 * 0.75 * COMPUTE_S, rel=0.1))
    # Of three workers with a bound all are as slow as the slowest one.
    found = rehearsed(STRAGGLER, nworker_groups=3, **APART, max_staleness=1)
    assert found.samples_per_s == approx(3 / 4 * 32 / COMPUTE_S, rel=0.05)
    # A backup worker hides it. Of three workers with one backup two batches count in each step, and the late one is
    # given again.
    four = replace(JOBS["backup"], cluster=replace(LONE, nworkers_per_group=4, backup=1))
    assert predict(four, made_probe(), STRAGGLER).step_s == approx(COMPUTE_S, rel=0.1)
    found = predict(JOBS["backup"], made_probe(spread=0.3), OVER_FAST)
    assert found.samples_per_s == approx(2 * 32 / COMPUTE_S, rel=0.25)


def test_the_spread_of_steps_makes_a_group_wait_and_gradients_stale() -> None:
    even, drawn = (rehearsed(probe=made_probe(batch=33, spread=s), **LAYOUTS["sandblaster"]) for s in (0.0, 0.3))
    assert drawn.step_s > 1.05 * even.step_s
    assert drawn.step_p95_s > drawn.step_s
    assert drawn.parts.wait > 0.05 * drawn.step_s
    found = rehearsed(probe=made_probe(spread=0.1), nworker_groups=4, **APART)
    assert found.staleness.mean == approx(3.0, abs=0.5)
    assert not found.same_as_one_process


def test_steps_that_take_years_are_refused() -> None:
    with pytest.raises(ConfigError, match="prediction: some steps of this job would take more than 32 years"):
        rehearsed(Machines(link=Link(bandwidth=1e-12)), **LAYOUTS["allreduce"])


# --- work ----------------------------------------------------------------------------------------------------------


def test_updates_take_the_time_of_the_kernel_on_each_server() -> None:
    # An update of a million elements takes a tenth of a second, and is made for one group at a time.
    slow = made_probe(optimizer=ProbedOptimizer("SGD", 0.0, 0.0, 1e-7, 0.0))
    for groups, servers in soaked([(1, 2), (4, 1)], [(1, 1), (4, 2)]):
        found = rehearsed(probe=slow, nworker_groups=groups, nservers_per_group=servers, **APART)
        rate = min(servers * 32 / 0.1, groups * 32 / (COMPUTE_S + 0.1 / servers))
        assert found.samples_per_s == approx(rate, rel=0.05)


def test_operations_of_the_servers_count_their_bytes() -> None:
    slow = made_probe(kernels=ProbedKernels(0.0, 1e-9, 1e-9))
    plain, counted = (rehearsed(probe=probe, nworkers_per_group=2, **APART).step_s for probe in (made_probe(), slow))
    # The sum of two gradients of 4 MB reads and writes at least six times 4 MB.
    assert counted - plain > 0.01


def test_a_seed_determines_everything_and_nothing_is_left_of_a_rehearsal() -> None:
    kinds = ("Rehearsal", "RehearsedWorker", "MeanPath")
    before = living(*kinds)  # a test that fails in its backward leaves paths in torch's engine
    job, probe = made_job(nworker_groups=2, **APART), made_probe(spread=0.2)
    first, again, other = (predict(job, probe, OVER_SLOW, seed=seed).to_json() for seed in (3, 3, 4))
    assert first == again != other
    assert living(*kinds) <= before


# --- options --------------------------------------------------------------------------------------------------------


def test_memory_that_is_too_little_is_refused() -> None:
    pair = {"nworkers_per_group": 2, **APART}
    words = r"--memory = '0.01 GB': is too little: host \d needs .* GB of training state"
    with pytest.raises(ConfigError, match=words):
        rehearsed(replace(OVER_FAST, memory_bytes=10_000_000), **pair)
    assert rehearsed(replace(OVER_FAST, memory_bytes=64_000_000), **pair).memory


def test_a_failure_costs_a_pause_or_takes_the_job_back_to_a_snapshot() -> None:
    month = 30 * 86400.0
    probe, machines = made_probe(start_s=60.0), Machines(link=FAST, mtbf_s=month)
    beside_snapshots = 30 / (30 + SNAPSHOT_S_PER_BYTE * MODEL_BYTES)
    together = rehearsed(machines, probe, nworkers_per_group=4)
    # Each of four hosts has servers. A failure pauses for 60.4 s, and half of the 30 s between two snapshots is lost.
    assert together.goodput == approx(beside_snapshots / (1 + 4 * 75.4 / month))
    apart = rehearsed(machines, probe, nworker_groups=4)
    # Only the host of the first group, which has the server, takes the job back.
    common = 75.4 / month
    groups = [1 / (1 + common), *[1 / (1 + common + 60.4 / month)] * 3]
    assert apart.goodput == approx(beside_snapshots * sum(groups) / 4)


def test_failures_are_refused_where_nothing_would_be_left() -> None:
    job, machines = made_job(nworkers_per_group=2), Machines(mtbf_s=1e6)
    for fields, words in (
        ({"on_failure": OnFailure.kStop}, "--mtbf"),
        ({"snapshot_s": 0.0}, "snapshot_s = '0': must be above 0 with --mtbf"),
    ):
        with pytest.raises(ConfigError, match=words):
            predict(replace(job, **fields), made_probe(), machines)  # type: ignore[arg-type]
    found = predict(replace(job, snapshot_s=0.0, checkpoint_freq=100), made_probe(), machines)
    assert found.goodput == approx(1 / (1 + (2.4 + 50 * found.step_s) / 1e6), rel=1e-3)


@pytest.mark.parametrize(
    ("cluster", "field"),
    [
        ({"replicas": 2, "nservers_per_group": 2, "transport": "kTcp"}, "cluster.replicas = 2"),
        ({**ROUNDS, "nworkers_per_group": 2}, "cluster.nworkers_per_group = 2"),
        ({"nworker_groups": 2, "nserver_groups": 0}, "cluster.nserver_groups = 0"),
    ],
)
def test_what_cannot_be_rehearsed_names_its_field(cluster: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        rehearsed(Machines(hosts=4), **cluster)
