"""Rehearsals against arithmetic: what a layout must take where only some things cost time."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from living_objects import living
from made_probe import made_job, made_probe

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
from topotrain.tools.prediction.failures import SNAPSHOT_S_PER_BYTE
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.predict import predict
from topotrain.tools.prediction.prediction import Prediction
from topotrain.tools.probe.probe_file import ProbedKernels, ProbedOptimizer, ProbedTransport

SLICE = 1 << 20
"""Of tests whose arithmetic is that of slices of one size."""
COMPUTE_S = 0.09
MODEL_BYTES = 4_000_000
FAST, SLOW = Link(bandwidth=100_000.0), Link(bandwidth=100.0)
OUTER = Updater(type=UpdaterType.kSGD, learning_rate=LRGen(type=ChangeMethod.kFixed, base_lr=1.0))
APART = Cluster(nworkers_per_group=2, server_worker_separate=True)
LAYOUTS = {
    "sandblaster": {"nworkers_per_group": 3, "nservers_per_group": 2, "server_worker_separate": True},
    "allreduce": {"nworkers_per_group": 3, "nservers_per_group": 3},
    "in memory": {"nworkers_per_group": 3, "nworkers_per_procs": 3, "nservers_per_group": 3, "nservers_per_procs": 3},
    "one server in the unit": {"nworkers_per_group": 2, "nworkers_per_procs": 2},
    "downpour": {"nworker_groups": 3, "nservers_per_group": 2, "server_worker_separate": True},
    "hogwild": {"nworker_groups": 3, "nserver_groups": 3},
    "hogwild in memory": {"nworker_groups": 2, "nworkers_per_procs": 2},
    "hybrid": {"nworker_groups": 4, "nworkers_per_group": 2, "nserver_groups": 2, "sync_freq": 2},
    "ring average": {"nworker_groups": 3, "nserver_groups": 3, "agreement": Agreement.kRingAverage},
    "gossip": {"nworker_groups": 4, "nserver_groups": 4, "agreement": Agreement.kGossip},
    "elastic": {"nworker_groups": 3, "nserver_groups": 3, "agreement": Agreement.kElastic, "moving_rate": 0.25},
    "islands": {"nworker_groups": 3, "server_worker_separate": True, "outer": OUTER, "sync_freq": 4},
    "streaming": {
        "nworker_groups": 3,
        "server_worker_separate": True,
        "outer": OUTER,
        "sync_freq": 4,
        "fragments": 2,
        "overlap": 1,
    },
    "decoupled": {"nworker_groups": 3, "server_worker_separate": True, "outer": OUTER, "sync_freq": 4, "quorum": 1},
    "bounded": {"nworker_groups": 3, "server_worker_separate": True, "max_staleness": 1},
    "int8": {"nworkers_per_group": 2, "server_worker_separate": True, "compression": Compression.kInt8},
    "topk": {"nworker_groups": 2, "server_worker_separate": True, "compression": Compression.kTopK},
    "fp16": {"nworkers_per_group": 2, "server_worker_separate": True, "compression": Compression.kFp16},
    "ring": {"nworkers_per_group": 3, "nservers_per_group": 3, "algorithm": Algorithm.kRing},
    "tree": {"nworkers_per_group": 4, "nservers_per_group": 4, "algorithm": Algorithm.kTree},
    "local sgd": {"nworker_groups": 2, "server_worker_separate": True, "n_push": 3, "n_fetch": 3},
    "host sums": {
        "nworkers_per_group": 4,
        "nworkers_per_procs": 2,
        "nservers_per_group": 2,
        "server_worker_separate": True,
    },
    "tcp": {"nworkers_per_group": 2, "server_worker_separate": True, "transport": TransportChoice.kTcp},
}


def bytes_between_hosts(found: Prediction) -> float:
    return sum(link.nbytes for link in found.links if link.between_hosts)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("link", [None, Link(bandwidth=1000.0, delay=1.0)], ids=["one host", "1gbit,1ms"])
def test_every_layout_of_the_product_can_be_rehearsed(name, link):
    if link is not None and name == "tcp":
        link = None
    found = predict(made_job(**LAYOUTS[name]), made_probe(), Machines(link=link))
    assert found.step_s > 0
    assert found.samples_per_s > 0
    assert found.parts.total == pytest.approx(found.step_s, rel=0.6)
    assert all(0 <= resource.share <= 1 for resource in found.busiest)
    assert json.loads(found.to_json())["version"] == 1


@pytest.mark.parametrize(
    "job",
    [
        Job(cluster=APART, grads=Grads.kHidden),
        Job(cluster=APART, pull=Pull.kLazy),
        Job(
            cluster=replace(APART, nworkers_per_group=3, backup=1),
            grads=Grads.kHidden,
            per_worker_batch=True,
        ),
    ],
    ids=["hidden", "lazy", "backup"],
)
def test_fields_outside_of_the_cluster_block(job):
    assert predict(job, made_probe(), Machines(link=FAST)).step_s > 0


def test_nothing_but_computing_takes_the_time_of_computing():
    # Three workers divide a batch of 33.
    job = made_job(**LAYOUTS["sandblaster"], slice_bytes=SLICE)
    found = predict(job, made_probe(batch=33), Machines(link=FAST))
    assert found.step_s == pytest.approx(COMPUTE_S / 3, rel=0.05)
    assert found.parts.compute == pytest.approx(COMPUTE_S / 3, rel=1e-6)
    assert found.samples_per_s == pytest.approx(33 / (COMPUTE_S / 3), rel=0.05)
    assert found.same_as_one_process
    assert found.staleness.max == 0


def test_processes_share_the_cores_of_a_host():
    job = made_job(nworkers_per_group=4, nworkers_per_procs=4)
    # Four workers with a quarter of the batch each need as long on one core as one worker.
    found = predict(job, made_probe(batch=32, cores=1), Machines())
    assert found.step_s == pytest.approx(COMPUTE_S, rel=0.02)
    assert found.busiest[0].name == "host 0's cores"
    assert found.busiest[0].share == pytest.approx(1.0, abs=0.05)
    assert predict(job, made_probe(batch=32, cores=4), Machines()).step_s == pytest.approx(COMPUTE_S / 4, rel=0.02)


class CountedSteps:
    """Counts the steps of a rehearsal."""

    made = 0

    def stepped(self, made: int, most: int) -> None:
        self.made = made
        assert made <= most


@pytest.mark.parametrize("times", [1.0, 4.0, 12.0, 1000.0])
def test_a_straggler_does_not_prolong_the_rehearsal(times):
    job, counted = made_job(**LAYOUTS["downpour"]), CountedSteps()
    found = predict(job, made_probe(), Machines(link=FAST, stragglers={1: times}), stepped=counted.stepped)
    # Three workers, and 27 steps of each. Up to four times slower all of them are made.
    assert counted.made == pytest.approx(27 * (2 * times + 1) if times <= 4 else 4 * 3 * 27, abs=5)
    assert found.samples_per_s == pytest.approx(32 / COMPUTE_S * (2 + 1 / times), rel=0.05)
    assert found.start_s < 3


def test_a_group_with_a_straggler_that_makes_no_step_is_counted_by_arithmetic():
    job = made_job(nworker_groups=2, nworkers_per_group=2, server_worker_separate=True, sync_freq=1)
    found = predict(job, made_probe(), Machines(link=FAST, stragglers={3: 1000.0}))
    alone = predict(made_job(nworkers_per_group=2, server_worker_separate=True), made_probe(), Machines(link=FAST))
    assert found.samples_per_s == pytest.approx(alone.samples_per_s * 1.001, rel=0.05)


def test_steps_that_take_years_are_refused():
    with pytest.raises(ConfigError, match="prediction: some steps of this job would take more than 32 years"):
        predict(made_job(**LAYOUTS["allreduce"]), made_probe(), Machines(link=Link(bandwidth=1e-12)))


# --- links --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 4, 6])
def test_a_ring_sends_what_the_theory_says(workers):
    job = made_job(nworkers_per_group=workers, nservers_per_group=workers, algorithm=Algorithm.kRing)
    found = predict(job, made_probe((1 << 20,)), Machines(link=FAST))
    each = bytes_between_hosts(found) / workers
    # Besides the ring each worker gets new values of the servers elsewhere.
    values = (workers - 1) / workers
    assert each == pytest.approx((2 * values + values) * (4 << 20), rel=0.02)


def test_a_push_and_a_pull_over_the_link_of_one_server():
    # Four workers send the model and get it back, over the one link of the server: in and out at the same time only
    # in part, since no value is new before all gradients are there.
    job = Job(cluster=replace(APART, nworkers_per_group=4), grads=Grads.kHidden)
    found = predict(job, made_probe(batch=4), Machines(link=SLOW))
    one_way = 4 * MODEL_BYTES * 8 / 100e6
    assert one_way < found.step_s < 2 * one_way + COMPUTE_S
    assert found.busiest[0].name.startswith("server 0/0's link")
    assert bytes_between_hosts(found) == pytest.approx(8 * MODEL_BYTES, rel=0.01)


def test_the_links_of_one_server_saturate():
    def samples(groups: int, servers: int) -> float:
        layout = {"nworker_groups": groups, "nservers_per_group": servers, "server_worker_separate": True}
        job = made_job(**layout, slice_bytes=SLICE)
        return predict(job, made_probe(), Machines(link=Link(bandwidth=1000.0))).samples_per_s

    # The link of the server takes 4 MB in 32 ms, so it can serve no more workers than that. Equal workers share it
    # alike, so that their pushes end together, and then all pull: each direction is idle for a part of the time.
    bound = 32 / (MODEL_BYTES * 8 / 1e9)
    assert bound / 2 < samples(8, 1) < bound
    assert samples(12, 1) == pytest.approx(samples(8, 1), rel=0.1)
    assert samples(8, 4) > 1.8 * samples(8, 1)


def test_one_server_makes_so_many_updates_and_no_more():
    # An update takes a tenth of a second, and is made for one group at a time.
    slow = made_probe(optimizer=ProbedOptimizer("SGD", 0.0, 0.0, 1e-7, 0.0))

    def samples(groups: int, servers: int) -> float:
        job = made_job(nworker_groups=groups, nservers_per_group=servers, server_worker_separate=True)
        return predict(job, slow, Machines(link=FAST)).samples_per_s

    assert samples(1, 1) == pytest.approx(32 / (COMPUTE_S + 0.1), rel=0.05)
    for groups in (4, 8):
        assert samples(groups, 1) == pytest.approx(32 / 0.1, rel=0.05)
        assert samples(groups, 2) == pytest.approx(min(2 * 32 / 0.1, groups * 32 / (COMPUTE_S + 0.05)), rel=0.05)


def test_a_slow_link_is_the_busiest_resource_by_name():
    job = made_job(nworker_groups=4, server_worker_separate=True, slice_bytes=SLICE)
    found = predict(job, made_probe(), Machines(link=SLOW))
    assert {resource.name for resource in found.busiest[:2]} == {"server 0/0's link in", "server 0/0's link out"}
    assert found.busiest[0].share > 0.7


# --- stragglers ----------------------------------------------------------------------------------------------------


def test_nothing_is_left_of_a_rehearsal():
    """A search makes many of them in one process."""
    # A test that fails in its backward leaves paths in torch's engine.
    kinds = ("Rehearsal", "RehearsedWorker", "MeanPath")
    before = living(*kinds)
    predict(made_job(nworkers_per_group=2), made_probe(), Machines(link=FAST))
    assert living(*kinds) <= before


def test_a_straggler_costs_sandblaster_its_time_and_downpour_its_share():
    straggler = Machines(link=FAST, stragglers={1: 4.0})
    together = made_job(nworkers_per_group=4, server_worker_separate=True)
    found = predict(together, made_probe(), straggler)
    assert found.step_s == pytest.approx(COMPUTE_S, rel=0.05)  # a quarter of the batch, four times as long
    assert found.waits[0].process == "worker 0/1"
    # Three workers of four wait for three quarters of the step.
    assert found.waits[0].seconds == pytest.approx(0.75 * 0.75 * COMPUTE_S, rel=0.1)
    apart = made_job(nworker_groups=4, server_worker_separate=True)
    even = predict(apart, made_probe(), Machines(link=FAST)).samples_per_s
    assert predict(apart, made_probe(), straggler).samples_per_s == pytest.approx(even * 3.25 / 4, rel=0.02)


def test_a_bound_on_staleness_holds_the_others_back():
    straggler = Machines(link=FAST, stragglers={0: 4.0})
    bound = predict(made_job(**LAYOUTS["bounded"]), made_probe(), straggler)
    free = predict(made_job(nworker_groups=3, server_worker_separate=True), made_probe(), straggler)
    assert bound.samples_per_s == pytest.approx(3 * 32 / (4 * COMPUTE_S), rel=0.05)
    assert free.samples_per_s == pytest.approx(2.25 * 32 / COMPUTE_S, rel=0.05)


def test_a_batch_that_is_too_late_for_its_step_is_given_again():
    job = Job(cluster=replace(APART, nworkers_per_group=3, backup=1), grads=Grads.kHidden, per_worker_batch=True)
    found = predict(job, made_probe(spread=0.3), Machines(link=FAST))
    # Two of three batches count in each step.
    assert found.samples_per_s == pytest.approx(2 * 32 / COMPUTE_S, rel=0.15)


def test_a_backup_worker_hides_a_straggler():
    job = Job(cluster=replace(APART, nworkers_per_group=4, backup=1), grads=Grads.kHidden, per_worker_batch=True)
    found = predict(job, made_probe(), Machines(link=FAST, stragglers={2: 4.0}))
    assert found.step_s == pytest.approx(COMPUTE_S, rel=0.1)


# --- work ----------------------------------------------------------------------------------------------------------


def test_an_update_takes_the_time_of_the_kernel():
    slow = made_probe(optimizer=ProbedOptimizer("SGD", 0.0, 0.0, 1e-7, 0.0))
    job = made_job(nworker_groups=1, server_worker_separate=True)
    found = predict(job, slow, Machines(link=FAST))
    # A million elements in buckets, on one server.
    assert found.step_s == pytest.approx(COMPUTE_S + 0.1, rel=0.05)
    two = predict(replace(job, cluster=replace(job.cluster, nservers_per_group=2)), slow, Machines(link=FAST))
    assert two.step_s == pytest.approx(COMPUTE_S + 0.05, rel=0.05)


def test_messages_and_bytes_cost_both_ends():
    costs = ProbedTransport(0.0, 0.0, 0.0, 1e-8, 0.0)  # 40 ms for the model, at each receiver
    probe = made_probe(transports={"shm": costs, "tcp": costs})
    found = predict(made_job(server_worker_separate=True), probe, Machines(hosts=2))
    # The gradients are received while others are computed, and the values behind the step.
    assert found.step_s == pytest.approx(COMPUTE_S + 0.04 + 0.01, rel=0.1)


def test_operations_of_the_servers_count_their_bytes():
    slow = made_probe(kernels=ProbedKernels(0.0, 1e-9, 1e-9))
    job = made_job(nworkers_per_group=4, server_worker_separate=True)
    plain, counted = (predict(job, probe, Machines(link=FAST)).step_s for probe in (made_probe(), slow))
    # The sum of four gradients of 4 MB reads and writes at least twelve times 4 MB.
    assert counted - plain > 0.01


def test_islands_exchange_less():
    def traffic(**more: int) -> float:
        job = made_job(nworker_groups=3, server_worker_separate=True, outer=OUTER, **more)
        return bytes_between_hosts(predict(job, made_probe(), Machines(link=FAST)))

    assert traffic(sync_freq=8) == pytest.approx(traffic(sync_freq=4) / 2, rel=0.05)
    assert traffic(sync_freq=4) == pytest.approx(3 * 2 * MODEL_BYTES / 4, rel=0.05)


def test_the_spread_of_steps_makes_a_group_wait():
    even = predict(made_job(**LAYOUTS["sandblaster"]), made_probe(batch=33), Machines(link=FAST))
    drawn = predict(made_job(**LAYOUTS["sandblaster"]), made_probe(batch=33, spread=0.3), Machines(link=FAST))
    assert drawn.step_s > 1.1 * even.step_s
    assert drawn.step_p95_s > drawn.step_s
    assert drawn.parts.wait > 0.05 * drawn.step_s


def test_groups_that_do_not_wait_have_stale_gradients():
    found = predict(
        made_job(nworker_groups=4, server_worker_separate=True), made_probe(spread=0.1), Machines(link=FAST)
    )
    assert found.staleness.mean == pytest.approx(3.0, abs=0.5)
    assert not found.same_as_one_process


# --- options --------------------------------------------------------------------------------------------------------


def test_a_seed_determines_everything():
    job, probe, machines = made_job(**LAYOUTS["downpour"]), made_probe(spread=0.2), Machines(link=SLOW)
    first, again = (predict(job, probe, machines, seed=3).to_json() for _ in range(2))
    assert first == again
    assert predict(job, probe, machines, seed=4).to_json() != first


def test_memory_that_is_too_little_is_refused():
    job = made_job(nworkers_per_group=2, server_worker_separate=True)
    with pytest.raises(
        ConfigError, match=r"--memory = '0.01 GB': is too little: host \d needs .* GB of training state"
    ):
        predict(job, made_probe(), Machines(link=FAST, memory_bytes=10_000_000))
    assert predict(job, made_probe(), Machines(link=FAST, memory_bytes=64_000_000)).memory


def test_a_failure_costs_a_pause_or_takes_the_job_back_to_a_snapshot():
    month = 30 * 86400.0
    probe, machines = made_probe(start_s=60.0), Machines(link=FAST, mtbf_s=month)
    model_bytes = sum(each.nbytes for each in probe.model)
    beside_snapshots = 30 / (30 + SNAPSHOT_S_PER_BYTE * model_bytes)
    together = predict(made_job(nworkers_per_group=4), probe, machines)
    # Each of four hosts has servers. A failure pauses for 60.4 s, and half of the 30 s between two snapshots is lost.
    assert together.goodput == pytest.approx(beside_snapshots / (1 + 4 * 75.4 / month))
    apart = predict(made_job(nworker_groups=4), probe, machines)
    # Only the host of the first group, which has the server, takes the job back.
    common = 75.4 / month
    groups = [1 / (1 + common), *[1 / (1 + common + 60.4 / month)] * 3]
    assert apart.goodput == pytest.approx(beside_snapshots * sum(groups) / 4)


def test_failures_are_refused_where_nothing_would_be_left():
    job = made_job(nworkers_per_group=2)
    with pytest.raises(ConfigError, match="--mtbf"):
        predict(replace(job, on_failure=OnFailure.kStop), made_probe(), Machines(mtbf_s=1e6))
    with pytest.raises(ConfigError, match="snapshot_s = '0': must be above 0 with --mtbf"):
        predict(replace(job, snapshot_s=0.0), made_probe(), Machines(mtbf_s=1e6))
    often = replace(job, snapshot_s=0.0, checkpoint_freq=100)
    found = predict(often, made_probe(), Machines(mtbf_s=1e6))
    assert found.goodput == pytest.approx(1 / (1 + (2.4 + 50 * found.step_s) / 1e6), rel=1e-3)


@pytest.mark.parametrize(
    ("cluster", "field"),
    [
        ({"replicas": 2, "nservers_per_group": 2, "transport": "kTcp"}, "cluster.replicas = 2"),
        (
            {"nworkers_per_group": 2, "nworker_groups": 2, "outer": OUTER, "sync_freq": 4},
            "cluster.nworkers_per_group = 2",
        ),
        ({"nworker_groups": 2, "nserver_groups": 0}, "cluster.nserver_groups = 0"),
    ],
)
def test_what_cannot_be_rehearsed_names_its_field(cluster, field):
    with pytest.raises(ConfigError) as found:
        predict(made_job(**cluster), made_probe(), Machines(hosts=4))
    assert field in str(found.value)


def test_an_optimizer_that_is_not_there_is_refused():
    probe = made_probe(optimizer=ProbedOptimizer("Mine", 0.0, 0.0, 0.0, 0.0))
    with pytest.raises(ConfigError, match="optimizer = 'Mine'"):
        predict(made_job(), probe, Machines())


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.lists(st.integers(1, 70_000), min_size=1, max_size=4),
)
def test_bytes_are_those_of_the_model_whatever_the_counts(groups, workers, servers, separate, counts):
    job = made_job(
        nworker_groups=groups, nworkers_per_group=workers, nservers_per_group=servers, server_worker_separate=separate
    )
    found = predict(job, made_probe(counts), Machines(link=FAST))
    model = sum(-(-count // 64) * 64 * 4 for count in counts)
    sent = sum(link.nbytes for link in found.links if link.name.startswith("worker"))
    # A worker pushes the padded model to the servers; what stays in its process is not sent.
    assert sent <= groups * workers * (model * 1.02 + 20_000)
    if separate:
        assert sent >= groups * workers * model
