"""Jobs that add up their gradients by a collective: our own algorithms and Gloo, against the one-process reference.

kNaive adds in the canonical order, so it has the reference's bits; ring, tree and Gloo add in another order and come
within 1e-6. Every own algorithm has the same bits in every run and on every transport.
"""

from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_job import (
    Result,
    Trainer,
    Transformer,
    adam,
    building,
    cross_entropy,
    job_of,
    mlp,
    plain,
    reference,
    run_hosted,
    run_local,
    tokens,
    usual_loop,
    vectors,
)
from torch import nn
from training_loops import (
    ALWAYS,
    accumulate,
    alternating_parts,
    clip_norm,
    edit,
    edit_between_backwards,
    never_zero,
    two_losses,
)

from topotrain.config.job import (
    Algorithm,
    Apply,
    ConfigError,
    Engine,
    Grads,
    Job,
    Reduce,
    Slicing,
    TransportChoice,
    Updater,
)
from topotrain.config.topology import layout
from topotrain.core.client.client import JobError, PeerLost
from topotrain.extensions.collectives.collective_server import CollectiveServer
from topotrain.extensions.collectives.torch_reduction import TorchReduction

OWN = (Algorithm.kNaive, Algorithm.kRing, Algorithm.kTree)
NEAR = 1e-6
Run = Callable[..., Result]


def beside(workers: int = 3, **changes: Any) -> Job:
    """As many servers as workers, each beside one."""
    return job_of("allreduce", nworkers_per_group=workers, nservers_per_group=workers, **changes)


def gloo(workers: int = 2, **changes: Any) -> Job:
    return beside(workers, engine=Engine.kGloo, **changes)


def check(job: Job, result: Result, build: Any, script: Any) -> None:
    """As near to the reference as the algorithm says."""
    expected = reference(job, build, script)
    assert result.distance(expected) < NEAR
    if job.cluster.algorithm is Algorithm.kNaive:
        assert result.same_bits(expected)


@pytest.fixture(params=[False, True], ids=["sent", "shown"])
def run(request: pytest.FixtureRequest) -> Run:
    """In this process; all that it needs travels, or residents see each other's memory."""
    return partial(run_local, shared=request.param)


# --- our own algorithms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grads", Grads)
@pytest.mark.parametrize(("algorithm", "workers"), [*zip(OWN, (2, 3, 3), strict=True), (Algorithm.kTree, 5)])
def test_a_job_computes_what_the_reference_does(algorithm: Algorithm, workers: int, grads: Grads, run: Run) -> None:
    job, build, script = beside(workers, algorithm=algorithm, grads=grads), building(), usual_loop(vectors(4))
    result = run(job, build, script)
    gateways = [
        each for server in result.servers for each in server.hooks.extensions if isinstance(each, CollectiveServer)
    ]
    assert len(gateways) == len(result.servers) == workers
    check(job, result, build, script)


@pytest.mark.parametrize(("algorithm", "workers"), list(zip(OWN, (2, 3, 3), strict=True)))
def test_the_bits_are_the_same_in_every_run_and_on_every_transport(
    algorithm: Algorithm, workers: int, tmp_path: Path
) -> None:
    build, script = building(Transformer, adam), usual_loop(tokens(3))
    results = []
    for transport in (TransportChoice.kShm, TransportChoice.kTcp):
        (tmp_path / transport.value).mkdir()
        job = beside(workers, algorithm=algorithm, transport=transport)
        results.append(run_hosted(job, build, script, tmp_path / transport.value))
    results += [run_local(job, build, script, shared) for shared in (False, True)]
    check(job, results[0], build, script)
    assert all(other.same_bits(results[0]) for other in results)


SCRIPTS = (*ALWAYS, clip_norm, edit, edit_between_backwards)


@pytest.mark.parametrize(
    ("script", "algorithm"), list(zip(SCRIPTS, cycle(OWN), strict=False)), ids=lambda f: getattr(f, "__name__", f)
)
def test_the_script_sees_and_changes_the_groups_gradients(algorithm: Algorithm, script: Any) -> None:
    job = beside(algorithm=algorithm)
    check(job, run_local(job, building(), script), building(), script)


@pytest.mark.parametrize("script", [accumulate, alternating_parts, two_losses], ids=lambda f: f.__name__)
def test_hidden_gradients_are_added_up_at_the_step(script: Any) -> None:
    job = beside(algorithm=Algorithm.kRing, grads=Grads.kHidden)
    assert run_local(job, building(), script).distance(plain(building(), script)) < 1e-5


def weighted(t: Trainer) -> None:
    """The last shares have no samples, or others than the first."""
    usual_loop([batch for size in (7, 2, 11, 1) for batch in vectors(2, size)])(t)


@pytest.mark.parametrize("grads", Grads)
@pytest.mark.parametrize("algorithm", OWN)
def test_unequal_batches_are_weighted(algorithm: Algorithm, grads: Grads) -> None:
    job = beside(algorithm=algorithm, grads=grads)
    check(job, run_local(job, building(), weighted), building(), weighted)


@pytest.mark.parametrize("algorithm", OWN)
def test_a_sum_is_not_divided(algorithm: Algorithm) -> None:
    job, script = beside(algorithm=algorithm, reduce=Reduce.kSum), usual_loop(vectors(3, 7))
    check(job, run_local(job, building(), script), building(), script)


class Halves(nn.Module):
    """Which half a share uses depends on its first sample; `never` is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = nn.Linear(12, 5), nn.Linear(12, 5), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if x[0, 0] > 0 else self.b(x)


def halves(t: Trainer) -> None:
    for batch in vectors(6):
        t.optimizer.zero_grad()
        t.backward(t.losses(cross_entropy, *batch))
        assert t.model.never.weight.grad is None
        t.optimizer.step()


@pytest.mark.parametrize("grads", Grads)
@pytest.mark.parametrize("algorithm", OWN)
def test_a_gradient_that_only_some_have_counts_as_zero_from_the_others(algorithm: Algorithm, grads: Grads) -> None:
    job, build = beside(algorithm=algorithm, grads=grads), building(Halves, adam)
    result = run_local(job, build, halves)
    check(job, result, build, halves)
    assert torch.equal(result.values["never.weight"], reference(job, build, lambda t: None).values["never.weight"])


@pytest.mark.parametrize("algorithm", OWN)
def test_buckets_are_applied_on_arrival(algorithm: Algorithm, run: Run) -> None:
    job = beside(algorithm=algorithm, grads=Grads.kHidden, apply=Apply.kOnArrival)
    check(job, run(job, building(), usual_loop(vectors(5))), building(), usual_loop(vectors(5)))


@pytest.mark.parametrize("grads", Grads)
@pytest.mark.parametrize("setting", [{"algorithm": Algorithm.kRing}, {"engine": Engine.kGloo}], ids=["ring", "gloo"])
def test_new_values_may_come_while_the_script_goes_on(setting: Any, grads: Grads, tmp_path: Path) -> None:
    job = beside(pull="kLazy", grads=grads, **setting)
    result = run_hosted(job, building(), usual_loop(vectors(5)), tmp_path)
    assert result.distance(reference(job, building(), usual_loop(vectors(5)))) < NEAR


def test_several_workers_in_a_unit_and_whole_tensors(tmp_path: Path) -> None:
    build, script = building(Transformer, adam), usual_loop(tokens(3))
    pairs = {"nworkers_per_procs": 2, "nservers_per_procs": 2, "transport": TransportChoice.kTcp}
    job = beside(4, algorithm=Algorithm.kTree, slicing=Slicing.kTensor, **pairs)
    assert run_hosted(job, build, script, tmp_path).distance(reference(job, build, script)) < NEAR


@pytest.mark.parametrize("grads", Grads)
def test_the_servers_clip_the_global_norm(grads: Grads) -> None:
    clipping = Updater(clip_norm=0.05)
    job = beside(algorithm=Algorithm.kRing, grads=grads, updater=clipping)
    result = run_local(job, building(), usual_loop(vectors(8)))
    assert result.distance(plain(building(), clip_norm)) < 1e-5


def one_overflow(t: Trainer) -> None:
    """In the third step one sample's loss is infinite: that step is left out by all, and the scale halves."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    for step, (x, y) in enumerate(vectors(6)):
        if step == 2:
            x[0, 0] = 1e38
        t.optimizer.zero_grad()
        losses = t.losses(lambda m, x, y: m[0](x).pow(2).mean() + cross_entropy(m, x, y), x, y)
        t.backward([scaler.scale(loss) for loss in losses])
        scaler.step(t.optimizer)
        scaler.update()
    t.model.scale = scaler.get_scale()


@pytest.mark.parametrize("algorithm", OWN)
def test_a_grad_scaler_leaves_out_an_overflow(algorithm: Algorithm) -> None:
    result = run_local(beside(algorithm=algorithm), building(), one_overflow)
    assert result.distance(plain(building(), one_overflow)) < 1e-5
    assert {worker.model.scale for worker in result.workers} == {2.0**9}


@pytest.mark.parametrize("grads", Grads)
def test_one_worker_has_nothing_to_add_up(grads: Grads) -> None:
    for setting in ({"algorithm": Algorithm.kRing}, {"engine": Engine.kGloo}):
        job = job_of("one", grads=grads, **setting)
        assert not layout(job.cluster).collective
        assert run_local(job, building(), never_zero).same_bits(reference(job_of("one"), building(), never_zero))


# --- disagreements -----------------------------------------------------------------------------------------------


def one_more_backward(t: Any) -> None:
    t.backward(t.losses(cross_entropy, *vectors(1)[0]))
    if t.me.index == 1:
        t.backward(t.losses(cross_entropy, *vectors(1)[0]))
    t.optimizer.step()


def other_rates(t: Any) -> None:
    t.optimizer.param_groups[0]["lr"] = 0.1 + t.me.index
    usual_loop(vectors(1))(t)


def drops_one(t: Any) -> None:
    t.backward(t.losses(cross_entropy, *vectors(1)[0]))
    if t.me.index == 1:
        t.model[2].bias.grad = None
    t.optimizer.step()


def ends_early(t: Any) -> None:
    usual_loop(vectors(2 if t.me.index == 1 else 4))(t)


DISAGREE = [
    (one_more_backward, JobError, r"unequal numbers of backwards.*worker 0 .* after 1, worker 1 is in backward .* 2"),
    (other_rates, JobError, r"workers \d and \d of a group disagree about the optimizer's hyper-parameters"),
    (drops_one, JobError, r"workers \d and \d of a group disagree about which parameters have a gradient"),
]


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [*DISAGREE, (ends_early, JobError, "worker 1 ended its script after 2 steps")],
    ids=lambda x: getattr(x, "__name__", ""),
)
@pytest.mark.parametrize("algorithm", [Algorithm.kNaive, Algorithm.kTree])
def test_workers_that_disagree_are_named(algorithm: Algorithm, script: Any, kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        run_local(beside(2, algorithm=algorithm), building(), script)


# --- Gloo --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grads", Grads)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("transport", [TransportChoice.kShm, TransportChoice.kTcp])
def test_gloo_computes_what_the_reference_does(
    workers: int, grads: Grads, transport: TransportChoice, tmp_path: Path
) -> None:
    job, build, script = gloo(workers, grads=grads, transport=transport), building(Halves, adam), halves
    result = run_hosted(job, build, script, tmp_path)
    assert all(isinstance(handle.worker.client.gradients, TorchReduction) for handle in result.workers)
    assert result.distance(reference(job, build, script)) < NEAR


@pytest.mark.parametrize("script", [accumulate, alternating_parts, clip_norm, edit, weighted], ids=lambda f: f.__name__)
def test_the_script_sees_and_changes_what_gloo_added_up(script: Any, tmp_path: Path) -> None:
    job = gloo(3)
    assert run_hosted(job, building(), script, tmp_path).distance(reference(job, building(), script)) < NEAR


def test_gloo_leaves_out_an_overflow_and_adds_without_dividing(tmp_path: Path) -> None:
    for number, (changes, script) in enumerate([({}, one_overflow), ({"reduce": Reduce.kSum}, weighted)]):
        (tmp_path / str(number)).mkdir()
        job = gloo(**changes)
        result = run_hosted(job, building(), script, tmp_path / str(number))
        expected = plain(building(), script) if script is one_overflow else reference(job, building(), script)
        assert result.distance(expected) < 1e-5


def test_hidden_gradients_are_weighted_by_gloo(tmp_path: Path) -> None:
    job = gloo(3, grads=Grads.kHidden)
    assert run_hosted(job, building(), weighted, tmp_path).distance(reference(job, building(), weighted)) < NEAR


@pytest.mark.parametrize(("script", "kind", "words"), DISAGREE, ids=lambda x: getattr(x, "__name__", ""))
def test_workers_that_disagree_under_gloo_are_named(script: Any, kind: type, words: str, tmp_path: Path) -> None:
    with pytest.raises((kind, PeerLost), match=f"{words}|lost worker"):
        run_hosted(gloo(), building(), script, tmp_path)


def test_a_wait_for_a_worker_that_does_not_come_names_the_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("topotrain.extensions.collectives.torch_reduction.DEADLINE", 0.5)

    def script(t: Any) -> None:
        usual_loop(vectors(1))(t)
        if t.me.index == 0:
            t.backward(t.losses(cross_entropy, *vectors(1)[0]))

    with pytest.raises(PeerLost, match=r"kGloo, rank 0 of 2: all_reduce number \d+ .*deadline 0.5 s.*same backwards"):
        run_hosted(gloo(), building(mlp), script, tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what is refused here")
def test_nccl_without_a_gpu_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster.engine = kNccl: needs an NVIDIA GPU"):
        run_hosted(beside(2, engine=Engine.kNccl), building(), usual_loop(vectors(1)), tmp_path)
