"""Gradients that are not finite: no value of a server is ever touched by one, and every skip is counted once.

A plan says at which steps which workers compute a NaN. The skips of each worker, and the values, follow from the plan.
"""

import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from seeds import examples, soaked

from tests.support.in_process_job import (
    Result,
    adam,
    building,
    cross_entropy,
    job_of,
    reference,
    run_hosted,
    run_local,
    usual_loop,
    vectors,
)
from tests.support.recorded_jobs import report_of
from tests.support.reporter_parts import context_of, no_connections, worker_of
from tests.support.simulation import STORM, ScriptedCluster, ScriptedWorker, job, same, total
from topotrain.config.job import Algorithm, Apply, Compression, Engine, Grads, Job, NonFinite, Pull, Reduce
from topotrain.config.sharding import Parameter
from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
from topotrain.core.client.client import JobError
from topotrain.core.events import Event, Skipped, from_json, to_json
from topotrain.core.model.schema import slice_map_for
from topotrain.core.server.nonfinite import NO_WORKER, NonfiniteLimit, look, nonfinite_message, nonfinite_segment
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
BATCHES = vectors(STEPS)
SGD = optimizer_text(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
ONE = {(0, 1)}
HIDDEN = {"grads": Grads.kHidden}
ARRIVAL = {**HIDDEN, "apply": Apply.kOnArrival}


def training(
    spoil: Callable[[Any, int, torch.Tensor], torch.Tensor] = lambda t, step, loss: loss,
    after: Callable[[Any, int], None] = lambda t, step: None,
) -> Callable[[Any], None]:
    """The usual loop. spoil: returns another loss. after: called between backward and step."""

    def script(t: Any) -> None:
        for step, batch in enumerate(BATCHES):
            t.optimizer.zero_grad()
            t.backward([spoil(t, step, loss) for loss in t.losses(cross_entropy, *batch)])
            after(t, step)
            t.optimizer.step()
        t.worker.client.values.settle()

    return script


def poisoned(plan: Plan, number: float = float("nan"), after: Callable[[Any, int], None] = lambda t, step: None) -> Any:
    """The usual loop, in which the losses of the plan are multiplied by a number that is none."""
    return training(lambda t, step, loss: loss * number if t.me[1:] in plan.get(step, ()) else loss, after)


def one_parameter(name: str, plan: Plan) -> Any:
    """NaN in the gradient of one parameter only."""

    def spoil(t: Any, step: int, loss: torch.Tensor) -> torch.Tensor:
        # Not by a hook on the parameter, which is given the group's mean.
        return loss + (dict(t.model.named_parameters())[name] * torch.nan).sum() if t.me[1:] in plan[step] else loss

    return training(spoil)


def skipped(result: Result) -> dict[tuple[int, int], int]:
    return {h.me[1:]: h.worker.tally.skipped for h in result.workers}


def whose(result: Result) -> list[list[tuple[int, str, str]]]:
    return [[(s.step, s.by, s.parameter) for s in h.worker.tally.take_skips()] for h in result.workers]


def finite(result: Result) -> bool:
    """The job's values, and what every server and every worker has of them."""
    held = [server.state.known.values(bucket.id) for server in result.servers for bucket in server.state.known.buckets]
    mine = [parameter.detach().reshape(-1) for handle in result.workers for parameter in handle.model.parameters()]
    return all(bool(torch.isfinite(values).all()) for values in (*result.values.values(), *held, *mine))


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
    "on arrival": job_of(**ARRIVAL),
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


NAMES = [*WHOLE, *EACH]


@pytest.mark.parametrize("name", soaked(NAMES[1::2], NAMES[::2]))
@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_step_with_it_is_skipped_by_the_group_or_by_the_worker(name: str, data: st.DataObject) -> None:
    of = (WHOLE | EACH)[name]
    plan, bad = data.draw(plans(of)), data.draw(st.sampled_from([float("nan"), float("inf")]))
    result = run_local(of, building(optimizer=adam), poisoned(plan, bad), shared=data.draw(st.booleans()))
    assert finite(result)
    each = Counter(worker for workers in plan.values() for worker in workers)
    groups = Counter(group for workers in plan.values() for group in {group for group, _ in workers})
    assert skipped(result) == {
        h.me[1:]: groups[h.me.group] if name in WHOLE else each[h.me[1:]] for h in result.workers
    }


def test_servers_that_reduce_among_themselves_skip_it_too(tmp_path: Any) -> None:
    of = job_of("allreduce", engine=Engine.kGloo, **HIDDEN)
    result = run_hosted(of, building(), poisoned({1: ONE, 3: ONE | {(0, 0)}}), tmp_path)
    assert finite(result) and set(skipped(result).values()) == {2}


# --- what the values are ---------------------------------------------------------------------------------------------


def test_a_mean_without_one_is_the_mean_of_the_others() -> None:
    """Bit for bit what weights of 0 give, which the reference computes."""

    def weighted(t: Any) -> None:
        for step, batch in enumerate(BATCHES):
            t.optimizer.zero_grad()
            lost = batch[0][4:8]
            weigh = lambda x, y, lost=lost, step=step: 0.0 if step in (1, 4) and torch.equal(x, lost) else len(x)  # noqa: E731
            t.backward(t.losses(cross_entropy, *batch, weight=weigh))
            t.optimizer.step()

    of = job_of(**HIDDEN)
    result = run_local(of, building(optimizer=adam), poisoned({1: ONE, 4: ONE}))
    assert result.same_bits(reference(of, building(optimizer=adam), weighted))


def test_a_skipped_step_leaves_no_trace() -> None:
    """Neither in the values nor in the optimizer: the job is one that never read that batch."""
    result = run_local(job_of(), building(optimizer=adam), poisoned({2: {(0, 2)}}))
    assert result.same_bits(reference(job_of(), building(optimizer=adam), usual_loop(BATCHES[:2] + BATCHES[3:])))


def test_finite_gradients_are_applied_to_the_bit_and_others_where_they_are_allowed() -> None:
    for each in (HIDDEN, ARRIVAL, {"pull": Pull.kLazy}):
        checked, unchecked = job_of(**each), job_of(**each, nonfinite=NonFinite.kAllow)
        assert run_local(checked, building(), training()).same_bits(run_local(unchecked, building(), training()))
    result = run_local(job_of(nonfinite=NonFinite.kAllow), building(), poisoned({2: ONE}))
    assert not finite(result) and set(skipped(result).values()) == {0}


# --- who it was, and the end -----------------------------------------------------------------------------------------


def test_the_worker_and_its_parameter_are_named() -> None:
    mine = (3, "worker 0/1", "2.bias")
    for of, said in (
        (job_of(), [[mine]] * 3),
        (job_of(**HIDDEN), [[], [mine], []]),
        # In a ring the worker itself knows its own part, and no other worker does.
        (WHOLE["ring"], [[(3, "", "2.bias")], [mine], [(3, "", "2.bias")]]),
    ):
        plan = {step: ONE if step == 2 else set() for step in range(STEPS)}
        assert whose(run_local(of, building(), one_parameter("2.bias", plan))) == said


@pytest.mark.parametrize("shared", [False, True])
def test_only_what_the_script_leaves_to_be_applied_is_looked_at(shared: bool) -> None:
    def spoils(t: Any, step: int) -> None:
        if step == 2:
            t.model[0].bias.grad.fill_(torch.inf)

    def mends(t: Any, step: int) -> None:
        for parameter in t.model.parameters():
            parameter.grad.nan_to_num_()

    result = run_local(job_of(), building(), training(after=spoils), shared=shared)
    assert finite(result) and whose(result) == [[(3, "", "0.bias")]] * 3, "it is the fault of no worker"
    result = run_local(job_of(), building(), poisoned({2: ONE}, after=mends), shared=shared)
    assert finite(result) and set(skipped(result).values()) == {0}


@pytest.mark.parametrize(
    ("more", "steps", "words"),
    [
        ({}, (1, 2, 3), r"that worker 0/1 pushed is not finite in 3 steps in a row, the last of them step 4"),
        (HIDDEN, (1, 2, 3), r"that worker 0/1 pushed is not finite in 3 steps in a row, the last of them step 4"),
        (ARRIVAL, (1, 2, 3), r"that worker 0/1 pushed is not finite in 3 steps in a row, the last of them step 4"),
        ({"nonfinite": NonFinite.kFail}, (1,), r"that worker 0/1 pushed is not finite in step 2; n"),
    ],
    ids=["visible", "hidden", "on arrival", "the first one"],
)
def test_too_many_in_a_row_end_the_group(more: dict[str, Any], steps: Sequence[int], words: str) -> None:
    with pytest.raises(JobError, match=rf"the gradient of \S+ {words}") as caught:
        run_local(job_of(**more), building(), poisoned(dict.fromkeys(steps, ONE)))
    assert caught.value.quarantine is (len(steps) > 1)
    if len(steps) > 1:
        two_of_three = {0: ONE, 1: ONE, 3: ONE, 4: ONE | {(0, 2)}}
        assert finite(run_local(job_of(**more), building(), poisoned(two_of_three)))


def test_steps_of_ones_own_are_left_out_of_the_sum() -> None:
    of, me = job_of("one", n_push=3, n_fetch=3), {(0, 0)}
    result = run_local(of, building(), poisoned({0: me, 4: me}))
    assert finite(result) and skipped(result) == {(0, 0): 2}
    assert [step for step, _, _ in whose(result)[0]] == [1, 5]
    words = r"is not finite in 3 local steps of worker 0/0 in a row, the last of them step 4; nothing"
    with pytest.raises(JobError, match=rf"the gradient of \S+ {words}") as caught:
        run_local(of, building(), poisoned({1: me, 2: me, 3: me}))
    assert caught.value.quarantine


def test_clipping_by_the_servers_skips_the_whole_step() -> None:
    """The norm would be over all of them."""
    result = run_local(job_of(**HIDDEN), building(), poisoned({2: ONE}, after=lambda t, _: t.worker.clip(0.1, 2.0)))
    assert finite(result) and set(skipped(result).values()) == {1}
    assert all(h.worker.tally.last_norm >= 0 for h in result.workers)


def test_finite_parts_of_an_infinite_sum() -> None:
    """Half precision has no room for the sum of two large gradients; no worker's part is wrong, and the step is."""

    def script(t: Any) -> None:
        for step in range(3):
            t.optimizer.zero_grad()
            weight = 6e4 if step == 1 else 1.0
            t.backward(t.losses(lambda model, x, weight=weight: (model.weight * weight).sum(), torch.zeros(6, 1)))
            t.optimizer.step()

    half = building(
        lambda: torch.nn.Linear(1, 1, bias=False).half(), lambda mod: torch.optim.SGD(mod.parameters(), 0.1)
    )
    result = run_local(replace(job_of(**HIDDEN, nservers_per_group=1), reduce=Reduce.kSum), half, script)
    assert finite(result) and whose(result) == [[(2, "", "weight")]] * 3


# --- on the simulated network ----------------------------------------------------------------------------------------


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
    assert cluster.server(0, 0).steps.batches.counts() == dict.fromkeys(range(shape[0]), 6)


def opened(worker: ScriptedWorker, mode: str) -> TableClient:
    client = TableClient(worker.client, worker.cluster.topology, worker.cluster.job)
    client.open(TableSpec("t", 4, 1, "float32", mode, SGD))
    return client


def test_rows_that_are_not_finite_take_the_step_with_them() -> None:
    cluster = ScriptedCluster(job(1, 2, 2))

    def script(worker: ScriptedWorker) -> None:
        client = opened(worker, "step")
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
    def script(worker: ScriptedWorker) -> None:
        client = opened(worker, mode)
        for number in (1.0, torch.nan, torch.inf, 1.0, torch.nan, torch.nan):
            client.push("t", range(4), torch.full((4, 1), number))
        assert client.pull("t", range(4)).view(-1).tolist() == [-2.0] * 4
        client.push("t", range(4), torch.full((4, 1), torch.nan))
        with pytest.raises(JobError, match="table 't': 3 pushes in a row not finite"):
            client.pull("t", range(4))

    ScriptedCluster(job(1, 1, 1)).play(script)


def test_a_shard_cannot_refuse_a_worker_that_is_not_there() -> None:
    cluster = ScriptedCluster(job(1, 2, 2))
    cluster.play(lambda worker: worker.open() and worker.finish())
    server, shard = cluster.server(0, 0), Address(Role.SERVER, 0, 1)
    for refused in [(2, 0), (-2, 0), (0, 3), (0, -2), (0,)]:
        with pytest.raises(m.ProtocolError, match="no such"):
            server.handle(shard, m.StepVote(0, 0, True, 0.0, False, 0, 0, refused))


# --- what is told ----------------------------------------------------------------------------------------------------


def test_each_skip_is_reported_once_and_counted() -> None:
    told: list[Event] = []
    tally = WorkerStats(steps=4, started=1.0)
    telling = ProgressReporter(context_of(Address(Role.WORKER, 0, 1), told), worker_of(tally), no_connections())
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
    report = Report(job_of(), layout(job_of().cluster))
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


def test_where_in_a_bucket_and_which_sums_need_another_look() -> None:
    cluster = layout(job_of("one").cluster)
    parameters = tuple(Parameter(f"p{i}", (70,), (1,), "float32", True) for i in range(3))
    (bucket,) = slice_map_for(parameters, cluster).buckets
    gradient = torch.zeros(bucket.hi - bucket.lo)
    assert nonfinite_segment(bucket, 0b111, gradient) is None
    second = bucket.pieces[1]
    gradient[second.hi - bucket.lo - 1] = torch.inf
    assert nonfinite_segment(bucket, 0b111, gradient) == second.segment
    assert nonfinite_segment(bucket, 0b101, gradient) is None
    (small,) = slice_map_for((Parameter("p", (64,), (1,), "float32", True),), cluster).buckets
    assert look(small, 1, torch.full((64,), 1e18)) == (None, False)
    assert look(small, 1, torch.full((64,), 1e20)) == (None, True)
    assert look(small, 1, torch.full((64,), torch.inf)) == (small.pieces[0].segment, True)
    assert look(small, 0, torch.full((64,), torch.inf)) == (None, True), "it is no gradient of this worker"
    assert look(small, 1, torch.ones(64, dtype=torch.float16)) == (None, True)


def test_strikes() -> None:
    strikes = NonfiniteLimit(NonFinite.kSkip)
    assert [strikes.step(0, [1]), strikes.step(1, [1]), strikes.step(0, [1, 2])] == [None] * 3
    assert strikes.step(0, [2]) is None
    assert strikes.step(0, [1, 2]) == 2
    strikes.forget(0)
    assert [strikes.step(0, [NO_WORKER]) for _ in range(3)] == [None, None, NO_WORKER]
    assert NonfiniteLimit(NonFinite.kFail).step(0, [0]) == 0
    assert "sum of the group's gradients of a table's rows is not finite in step 1" in nonfinite_message("", "", 1, 1)
