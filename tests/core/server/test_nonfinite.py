"""Gradients that are not finite: no value of a server is ever touched by one, and every skip is counted once.

Rule: a test's script is written once and says at which steps which workers compute a NaN; who has to have skipped what,
and what the values have to be, follows from that plan alone.
"""

import io
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from seeds import examples
from soak_cases import soaked

from tests.support.in_process_job import (
    Result,
    adam,
    building,
    cross_entropy,
    job_of,
    reference,
    run_hosted,
    run_local,
    sgd,
    usual_loop,
    vectors,
)
from tests.support.recorded_jobs import report_of
from tests.support.reporter_parts import context_of, no_connections, worker_of
from tests.support.simulation import STORM, ScriptedCluster, ScriptedWorker, job, same, total
from topotrain.config.job import (
    Algorithm,
    Apply,
    Compression,
    Engine,
    Grads,
    Job,
    NonFinite,
    Pull,
    Reduce,
    TransportChoice,
)
from topotrain.config.sharding import Parameter
from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
from topotrain.core.client.client import JobError
from topotrain.core.events import Event, Skipped, from_json, to_json
from topotrain.core.model.schema import slice_map_for
from topotrain.core.server.nonfinite import (
    NO_WORKER,
    NonfiniteLimit,
    all_finite,
    look,
    nonfinite_message,
    nonfinite_segment,
)
from topotrain.extensions.tables.row_optimizers import optimizer_text
from topotrain.extensions.tables.table_client import TableClient
from topotrain.extensions.tables.table_spec import TableSpec
from topotrain.launch import JobOutcome
from topotrain.tools.monitor.job_report import Report
from topotrain.tools.monitor.progress_display import QuietProgress
from topotrain.training.step_progress import ProgressReporter
from topotrain.training.worker_stats import SkippedStep, WorkerStats

Plan = Mapping[int, Set[tuple[int, int]]]
"""Step (from 0) -> (group, index) of the workers whose loss is not finite in it."""

STEPS = 6
SGD = optimizer_text(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
QUICK = settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ONE = {(0, 1)}


def poisoned(plan: Plan, number: float = float("nan"), steps: int = STEPS):
    """The usual loop, in which the losses of the plan are multiplied by a number that is none."""

    def script(t):
        me = (t.me.group, t.me.index)
        for step, batch in enumerate(vectors(steps)):
            t.optimizer.zero_grad()
            (loss,) = t.losses(cross_entropy, *batch)
            t.backward([loss * number if me in plan.get(step, ()) else loss])
            t.optimizer.step()
        t.worker.client.values.settle()

    return script


def skipped(result: Result) -> dict[tuple[int, int], int]:
    return {(h.me.group, h.me.index): h.worker.tally.skipped for h in result.workers}


def finite(result: Result) -> bool:
    """The job's values, and what every server and every worker has of them."""
    held = [server.state.known.values(bucket.id) for server in result.servers for bucket in server.state.known.buckets]
    mine = [parameter.detach().reshape(-1) for handle in result.workers for parameter in handle.model.parameters()]
    return all(bool(torch.isfinite(values).all()) for values in (*result.values.values(), *held, *mine))


HIDDEN = {"grads": Grads.kHidden}
ARRIVAL = {**HIDDEN, "apply": Apply.kOnArrival}
WHOLE = {
    "sandblaster": job_of(),
    "allreduce": job_of("allreduce"),
    "in-memory": job_of("in-memory"),
    "two by two": job_of("two by two"),
    "serverless": job_of("serverless"),
    "one": job_of("one"),
    "one, lazy": job_of("one", pull=Pull.kLazy),
    "ring": job_of("allreduce", algorithm=Algorithm.kRing),
    "hidden ring": job_of("allreduce", algorithm=Algorithm.kRing, **HIDDEN),
    "downpour": job_of("one", nworker_groups=3, nservers_per_group=2),
    "hogwild": job_of("one", nworker_groups=2, nserver_groups=2),
    "hogwild in memory": job_of("one", nworker_groups=2, nworkers_per_procs=2),
    "two groups of two": job_of("one", nworker_groups=2, nworkers_per_group=2),
    "encoded": job_of(compression=Compression.kInt8),
}
"""Where one worker's NaN costs its whole group the step."""

EACH = {
    "hidden": job_of(**HIDDEN),
    "hidden, allreduce": job_of("allreduce", **HIDDEN),
    "hidden, lazy": job_of("two by two", pull=Pull.kLazy, **HIDDEN),
    "hidden, encoded": job_of(compression=Compression.kFp16, **HIDDEN),
    "two hidden groups": job_of("one", nworker_groups=2, nworkers_per_group=2, **HIDDEN),
}
"""Where the others of its group go on without it."""


@st.composite
def plans(draw: st.DrawFn, of: Job) -> Plan:
    """Any steps of any workers, but never three in a row of one; nor of a group where its sum is all that is known."""
    topology = layout(of.cluster)
    workers = [(w.group, w.index) for g in range(topology.worker_groups) for w in topology.workers(g)]
    plan: dict[int, set[tuple[int, int]]] = {}
    for step in range(STEPS):
        bad = draw(st.sets(st.sampled_from(workers), max_size=2))
        if topology.server_collective and plan.get(step - 1) and plan.get(step - 2):
            bad = set()
        plan[step] = {w for w in bad if not all(w in plan.get(step - back, ()) for back in (1, 2))}
    return plan


def by_group(plan: Plan) -> Counter[int]:
    """How many steps of each group have something in them that is not finite."""
    return Counter(group for bad in plan.values() for group in {group for group, _ in bad})


@pytest.mark.parametrize("name", soaked([*WHOLE][1::2], [*WHOLE][::2]))
@QUICK
@given(data=st.data())
def test_a_group_whose_mean_is_spoiled_skips_the_step(name: str, data: st.DataObject) -> None:
    plan, bad = data.draw(plans(WHOLE[name])), data.draw(st.sampled_from([float("nan"), float("inf")]))
    result = run_local(WHOLE[name], building(), poisoned(plan, bad), shared=data.draw(st.booleans()))
    assert finite(result)
    steps = by_group(plan)
    assert skipped(result) == {(h.me.group, h.me.index): steps[h.me.group] for h in result.workers}


@pytest.mark.parametrize("name", soaked([*EACH][2:], [*EACH][:2]))
@QUICK
@given(data=st.data())
def test_the_others_of_a_group_go_on_without_it(name: str, data: st.DataObject) -> None:
    plan = data.draw(plans(EACH[name]))
    result = run_local(EACH[name], building(optimizer=adam), poisoned(plan), shared=data.draw(st.booleans()))
    assert finite(result)
    count = Counter(worker for bad in plan.values() for worker in bad)
    assert skipped(result) == {(h.me.group, h.me.index): count[h.me.group, h.me.index] for h in result.workers}


@QUICK
@given(data=st.data())
def test_on_arrival_a_bucket_is_left_out(data: st.DataObject) -> None:
    of = job_of(**ARRIVAL)
    plan = data.draw(plans(of))
    result = run_local(of, building(), poisoned(plan), shared=data.draw(st.booleans()))
    assert finite(result)
    count = Counter(worker for bad in plan.values() for worker in bad)
    assert skipped(result) == {(0, index): count[0, index] for index in range(3)}


# --- what the values are ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", soaked([adam], [sgd]))
def test_a_mean_without_one_is_the_mean_of_the_others(optimizer) -> None:
    """Bit for bit what weights of 0 give, which the reference computes."""
    batches = vectors(STEPS)

    def weighted(t) -> None:
        for step, batch in enumerate(batches):
            t.optimizer.zero_grad()
            lost = batch[0][4:8]
            weigh = lambda x, y, lost=lost, step=step: 0.0 if step in (1, 4) and torch.equal(x, lost) else len(x)  # noqa: E731
            t.backward(t.losses(cross_entropy, *batch, weight=weigh))
            t.optimizer.step()

    of = job_of(**HIDDEN)
    result = run_local(of, building(optimizer=optimizer), poisoned({1: ONE, 4: ONE}))
    assert result.same_bits(reference(of, building(optimizer=optimizer), weighted))


@pytest.mark.parametrize("name", soaked(["sandblaster"], ["in-memory", "one"]))
def test_a_skipped_step_leaves_no_trace(name: str) -> None:
    """Neither in the values nor in the optimizer: the job is one that never read that batch."""
    batches = vectors(STEPS)
    of, last = job_of(name), layout(job_of(name).cluster).workers_per_group - 1
    result = run_local(of, building(optimizer=adam), poisoned({2: {(0, last)}}))
    kept = usual_loop(batches[:2] + batches[3:])
    assert result.same_bits(reference(of, building(optimizer=adam), kept))


@pytest.mark.parametrize("settings_", [HIDDEN, ARRIVAL, {"pull": Pull.kLazy}])
def test_finite_gradients_are_applied_to_the_bit(settings_) -> None:
    checked, unchecked = job_of(**settings_), job_of(**settings_, nonfinite=NonFinite.kAllow)
    script = usual_loop(vectors(4))
    assert run_local(checked, building(), script).same_bits(run_local(unchecked, building(), script))


def test_unseen_it_spoils_everything() -> None:
    result = run_local(job_of(nonfinite=NonFinite.kAllow), building(), poisoned({2: ONE}))
    assert not finite(result)
    assert set(skipped(result).values()) == {0}


# --- transports ------------------------------------------------------------------------------------------------------

TRANSPORTS = {
    "tcp": job_of("two by two", transport=TransportChoice.kTcp),
    "hidden gloo": job_of("allreduce", engine=Engine.kGloo, **HIDDEN),
}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_over_real_transports(name: str, tmp_path) -> None:
    result = run_hosted(TRANSPORTS[name], building(), poisoned({1: ONE, 3: ONE | {(0, 0)}}), tmp_path)
    assert finite(result)
    assert set(skipped(result).values()) == {2}


# --- who it was, and the end -----------------------------------------------------------------------------------------


def whose(result: Result) -> list[list[tuple[int, str, str]]]:
    return [[(s.step, s.by, s.parameter) for s in h.worker.tally.take_skips()] for h in result.workers]


def one_parameter(name: str, plan: Plan):
    """NaN in the gradient of one parameter only."""

    def script(t) -> None:
        parameters = dict(t.model.named_parameters())
        for step, batch in enumerate(vectors(STEPS)):
            t.optimizer.zero_grad()
            losses = t.losses(cross_entropy, *batch)
            if (t.me.group, t.me.index) in plan.get(step, ()):
                # Not by a hook on the parameter, which is given the group's mean.
                losses[0] = losses[0] + (parameters[name] * torch.nan).sum()
            t.backward(losses)
            t.optimizer.step()

    return script


@pytest.mark.parametrize("name", soaked(["2.bias"], ["0.weight"]))
def test_the_worker_and_its_parameter_are_named(name: str) -> None:
    said = whose(run_local(job_of(), building(), one_parameter(name, {2: ONE})))
    assert said == [[(3, "worker 0/1", name)]] * 3
    said = whose(run_local(job_of("one"), building(), one_parameter(name, {2: {(0, 0)}})))
    assert said == [[(3, "worker 0/0", name)]]
    said = whose(run_local(job_of(**HIDDEN), building(), one_parameter(name, {2: ONE})))
    assert said == [[], [(3, "worker 0/1", name)], []]


def test_where_only_the_sum_is_known_the_worker_looks_itself() -> None:
    """In a ring nobody but the worker has its own part."""
    said = whose(run_local(WHOLE["ring"], building(), one_parameter("2.bias", {2: ONE})))
    assert said == [[(3, "", "2.bias")], [(3, "worker 0/1", "2.bias")], [(3, "", "2.bias")]]


def test_what_the_script_itself_spoils_is_no_workers_fault() -> None:
    def script(t) -> None:
        for step, batch in enumerate(vectors(STEPS)):
            t.optimizer.zero_grad()
            t.backward(t.losses(cross_entropy, *batch))
            if step == 2:
                t.model[0].bias.grad.fill_(torch.inf)
            t.optimizer.step()

    for shared in (False, True):
        result = run_local(job_of(), building(), script, shared=shared)
        assert finite(result)
        assert whose(result) == [[(3, "", "0.bias")]] * 3


def test_what_the_script_mends_counts() -> None:
    """Only what would be applied is looked at."""

    def script(t) -> None:
        for step, batch in enumerate(vectors(STEPS)):
            t.optimizer.zero_grad()
            (loss,) = t.losses(cross_entropy, *batch)
            t.backward([loss * torch.nan if step == 2 and t.me.index == 1 else loss])
            for parameter in t.model.parameters():
                parameter.grad.nan_to_num_()
            t.optimizer.step()

    for shared in (False, True):
        result = run_local(job_of(), building(), script, shared=shared)
        assert finite(result)
        assert set(skipped(result).values()) == {0}


@pytest.mark.parametrize("settings_", [{}, HIDDEN, ARRIVAL], ids=["visible", "hidden", "on arrival"])
def test_three_in_a_row_are_too_many_of_a_group(settings_) -> None:
    words = r"the gradient of \S+ that worker 0/1 pushed is not finite in 3 steps in a row, the last of them step 4"
    with pytest.raises(JobError, match=words) as caught:
        run_local(job_of(**settings_), building(), poisoned({1: ONE, 2: ONE, 3: ONE}))
    assert caught.value.quarantine
    two_of_three = {0: ONE, 1: ONE, 3: ONE, 4: ONE | {(0, 2)}}
    assert finite(run_local(job_of(**settings_), building(), poisoned(two_of_three)))


def test_the_first_one_may_end_the_job() -> None:
    with pytest.raises(JobError, match=r"gradient of \S+ that worker 0/1 pushed is not finite in step 2; n") as caught:
        run_local(job_of(nonfinite=NonFinite.kFail), building(), poisoned({1: ONE}))
    assert not caught.value.quarantine


def test_steps_of_ones_own_are_left_out_of_the_sum() -> None:
    of = job_of("one", n_push=3, n_fetch=3)
    result = run_local(of, building(), poisoned({0: {(0, 0)}, 4: {(0, 0)}}))
    assert finite(result)
    assert skipped(result) == {(0, 0): 2}
    assert [step for step, _, _ in whose(result)[0]] == [1, 5]
    words = (
        r"the gradient of \S+ is not finite in 3 local steps of worker 0/0 in a row, the last of them step 4; nothing"
    )
    with pytest.raises(JobError, match=words) as caught:
        run_local(of, building(), poisoned({1: {(0, 0)}, 2: {(0, 0)}, 3: {(0, 0)}}))
    assert caught.value.quarantine


def test_clipping_by_the_servers_skips_the_whole_step() -> None:
    """The norm would be over all of them."""

    def script(t) -> None:
        for step, batch in enumerate(vectors(4)):
            t.optimizer.zero_grad()
            (loss,) = t.losses(cross_entropy, *batch)
            t.backward([loss * torch.nan if step == 2 and t.me.index == 1 else loss])
            t.worker.clip(0.1, 2.0)
            t.optimizer.step()
            assert t.worker.tally.last_norm >= 0

    result = run_local(job_of(**HIDDEN), building(), script)
    assert finite(result)
    assert set(skipped(result).values()) == {1}


# --- under a storm ---------------------------------------------------------------------------------------------------


@pytest.mark.simulated
@pytest.mark.parametrize("shape", [(3, 1, 1), (2, 2, 2)], ids=str)
@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 2**20))
def test_the_ledger_is_exact_whatever_the_network_does(shape: tuple[int, int, int], seed: int) -> None:
    """Whole numbers: the values are the sum of exactly the steps that were finite, and each skip is counted once."""
    cluster = ScriptedCluster(job(*shape), seed, STORM)
    counted: list[list[torch.Tensor]] = []
    found: dict[Address, list[int]] = {}
    bad = {
        (group, step): cluster.random.randrange(shape[1]) for group in range(shape[0]) for step in range(6)
        if step % 3 and cluster.random.random() < 0.5
    }  # fmt: skip

    def script(worker: ScriptedWorker) -> None:
        worker.open()
        skips = found.setdefault(worker.me, [])
        for step in range(6):
            gradient = worker.numbers()
            who = bad.get((worker.me.group, step))
            if who is None:
                counted.append([-part for part in gradient])
            elif who == worker.me.index:
                gradient[step % 3][cluster.random.randrange(len(gradient[step % 3]))] = torch.nan
            if worker.step(gradient, marks=(worker.me.group, step, step)).found_inf:
                skips.append(step)
        worker.finish()

    cluster.play(script)
    assert same(cluster.values(), total(counted))
    for me, skips in found.items():
        assert skips == [step for step in range(6) if (me.group, step) in bad]
    counts = cluster.server(0, 0).steps.batches.counts()
    assert counts == dict.fromkeys(range(shape[0]), 6)


# --- tables ----------------------------------------------------------------------------------------------------------


def client_of(worker: ScriptedWorker) -> TableClient:
    return TableClient(worker.client, worker.cluster.topology, worker.cluster.job)


def test_rows_that_are_not_finite_take_the_step_with_them() -> None:
    cluster = ScriptedCluster(job(1, 2, 2))

    def script(worker: ScriptedWorker) -> None:
        client = client_of(worker)
        client.open(TableSpec("t", 4, 1, optimizer=SGD))
        worker.open()
        ones = [torch.ones_like(value) for value in worker.values()]
        for step in range(3):
            number = torch.nan if step == 1 and worker.me.index == 1 else 1.0
            client.push("t", range(4), torch.tensor([1.0, number, 1.0, 1.0]).view(-1, 1))
            outcome = worker.step(ones)
            assert (outcome.found_inf, outcome.refused) == ((True, ((NO_WORKER, -1),)) if step == 1 else (False, ()))
        assert client.pull("t", range(4)).view(-1).tolist() == [-4.0] * 4
        client.close()
        worker.finish()

    cluster.play(script)
    assert all(bool((part == -4).all()) for part in cluster.values())


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_push_of_rows_that_are_not_finite_changes_nothing(mode: str) -> None:
    cluster = ScriptedCluster(job(1, 1, 1))

    def script(worker: ScriptedWorker) -> None:
        client = client_of(worker)
        client.open(TableSpec("t", 4, 1, "float32", mode, SGD))
        for number in (1.0, torch.nan, torch.inf, 1.0, torch.nan, torch.nan):
            client.push("t", range(4), torch.full((4, 1), number))
        assert client.pull("t", range(4)).view(-1).tolist() == [-2.0] * 4
        client.push("t", range(4), torch.full((4, 1), torch.nan))
        with pytest.raises(JobError, match="table 't': 3 pushes in a row not finite"):
            client.pull("t", range(4))

    cluster.play(script)


# --- what is told ----------------------------------------------------------------------------------------------------


def test_each_skip_is_reported_once_and_counted() -> None:
    told: list[Event] = []
    me = Address(Role.WORKER, 0, 1)
    tally = WorkerStats(steps=4, started=1.0)
    telling = ProgressReporter(context_of(me, told), worker_of(tally), no_connections())
    tally.add_skip(SkippedStep(2, "worker 0/1", "a"))
    telling.after_step(None)
    telling.after_step(None)
    tally.add_skip(SkippedStep(4, "", ""))
    tally.add_skip(SkippedStep(5, "worker 0/0", "b"))
    telling.job_over()
    skips = [event for event in told if isinstance(event, Skipped)]
    assert [(e.step, e.total, e.by, e.parameter) for e in skips] == [
        (2, 1, "worker 0/1", "a"),
        (4, 2, "", ""),
        (5, 3, "worker 0/0", "b"),
    ]
    assert [from_json(to_json(event)) for event in skips] == skips
    of = job_of()
    report = Report(of, layout(of.cluster))
    for event in skips:
        report(event)
    assert report.as_data(JobOutcome(0, 1.0))["skipped"] == [
        {"who": "worker 0/1", "count": 3, "steps": [2, 4, 5], "by": "worker 0/0", "parameter": "b"}
    ]
    report(Skipped("worker 0/1", 1, 1, "worker 0/1", "a"))  # it was started again
    assert report.as_data(JobOutcome(0, 1.0))["skipped"][0]["count"] == 4


def test_a_skip_is_reported_with_its_worker() -> None:
    said = io.StringIO()
    window = QuietProgress(report_of(layout(job_of().cluster)), Console(file=said, width=200), said)
    for index in range(3):
        window(Skipped(f"worker 0/{index}", 7, 1, "worker 0/1", "net.weight"))
        window(Skipped(f"worker 0/{index}", 9, 2, "", ""))
    assert said.getvalue().splitlines() == [
        "topotrain: worker 0/0: its group's sum of the gradients of a table's rows is not finite in step 9: the step "
        "is skipped (its skipped step number 2)",
        "topotrain: worker 0/1: the gradient of net.weight is not finite in step 7: the step is skipped",
    ]
    for step in range(1, 101):
        window(Skipped("worker 0/1", step, step, "worker 0/1", "net.weight"))
    assert len(said.getvalue().splitlines()) == 2 + 10 + 9


# --- parts -----------------------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=examples(80), deadline=None)
def test_whether_all_are_finite(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]))
    size = data.draw(st.integers(1, 300))
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    x[data.draw(st.integers(0, size - 1))] = data.draw(st.sampled_from([1.0, 0.0, torch.finfo(dtype).max]))
    x[data.draw(st.integers(0, size - 1))] = -torch.finfo(dtype).max
    assert all_finite(x)
    x[data.draw(st.integers(0, size - 1))] = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    assert not all_finite(x)


def test_where_in_a_bucket() -> None:
    parameters = tuple(Parameter(f"p{i}", (70,), (1,), "float32", True) for i in range(3))
    (bucket,) = slice_map_for(parameters, layout(job_of("one").cluster)).buckets
    gradient = torch.zeros(bucket.hi - bucket.lo)
    assert nonfinite_segment(bucket, 0b111, gradient) is None
    second = bucket.pieces[1]
    gradient[second.hi - bucket.lo - 1] = torch.inf
    assert nonfinite_segment(bucket, 0b111, gradient) == second.segment
    assert nonfinite_segment(bucket, 0b101, gradient) is None


def test_finite_parts_of_an_infinite_sum() -> None:
    """Half precision has no room for the sum of two large gradients; no worker's part is wrong, and the step is."""

    def script(t) -> None:
        for step in range(3):
            t.optimizer.zero_grad()
            weight = 6e4 if step == 1 else 1.0
            t.backward(t.losses(lambda model, x, weight=weight: (model.weight * weight).sum(), torch.zeros(6, 1)))
            t.optimizer.step()

    half = building(
        lambda: torch.nn.Linear(1, 1, bias=False).half(), lambda mod: torch.optim.SGD(mod.parameters(), 0.1)
    )
    result = run_local(replace(job_of(**HIDDEN, nservers_per_group=1), reduce=Reduce.kSum), half, script)
    assert finite(result)
    assert whose(result) == [[(2, "", "weight")]] * 3


def test_which_sums_need_another_look() -> None:
    (bucket,) = slice_map_for((Parameter("p", (64,), (1,), "float32", True),), layout(job_of("one").cluster)).buckets
    assert look(bucket, torch.full((64,), 1e18)) == (None, False)
    assert look(bucket, torch.full((64,), 1e20)) == (None, True)
    assert look(bucket, torch.full((64,), torch.inf)) == (bucket.pieces[0].segment, True)
    assert look(bucket, torch.ones(64, dtype=torch.float16)) == (None, True)


def test_strikes() -> None:
    strikes = NonfiniteLimit(NonFinite.kSkip)
    assert [strikes.step(0, [1]), strikes.step(1, [1]), strikes.step(0, [1, 2])] == [None] * 3
    assert strikes.step(0, [2]) is None
    assert strikes.step(0, [1, 2]) == 2
    strikes.forget(0)
    assert [strikes.step(0, [NO_WORKER]) for _ in range(3)] == [None, None, NO_WORKER]
    assert NonfiniteLimit(NonFinite.kFail).step(0, [0]) == 0
    assert "sum of the group's gradients of a table's rows is not finite in step 1" in nonfinite_message("", "", 1, 1)


def test_a_shard_cannot_refuse_a_worker_that_is_not_there() -> None:
    cluster = ScriptedCluster(job(1, 2, 2))
    cluster.play(lambda worker: worker.open() and worker.finish())
    server, shard = cluster.server(0, 0), Address(Role.SERVER, 0, 1)
    for refused in [(2, 0), (-2, 0), (0, 3), (0, -2), (0,)]:
        with pytest.raises(m.ProtocolError, match="no such"):
            server.handle(shard, m.StepVote(0, 0, True, 0.0, False, 0, 0, refused))
