"""Jobs that add up their gradients by a collective: our own algorithms and Gloo, against the one-process reference.

kNaive adds in the canonical order, so it has the reference's bits; ring, tree and Gloo add in another order and come
within 1e-6. Every own algorithm has the same bits in every run and on every transport.
"""

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
from pairwise import case_id
from torch import nn
from training_loops import (
    ALWAYS,
    accumulate,
    alternating_parts,
    clip_norm,
    edit,
    edit_between_backwards,
    never_zero,
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
USUAL = usual_loop(vectors(8))


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


# --- our own algorithms ------------------------------------------------------------------------------------------


def weighted(t: Trainer) -> None:
    """The last shares have no samples, or others than the first."""
    usual_loop([batch for size in (7, 2, 11, 1) for batch in vectors(2, size)])(t)


class Halves(nn.Module):
    """Which half a share uses depends on its first sample; `never` is used by none."""

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


HIDDEN: dict[str, Any] = {"grads": Grads.kHidden}
RING: dict[str, Any] = {"algorithm": Algorithm.kRing}
WAYS: list[tuple[Any, dict[str, Any]]] = [
    (usual_loop(vectors(4)), {}),
    (usual_loop(vectors(4)), HIDDEN),
    (usual_loop(vectors(5)), {**HIDDEN, "apply": Apply.kOnArrival}),
    (usual_loop(vectors(3, 7)), {"reduce": Reduce.kSum}),
    (weighted, {}),
    (weighted, HIDDEN),
    (halves, {}),
    (halves, HIDDEN),
]


OTHERS = cycle([Algorithm.kRing, Algorithm.kTree])


@pytest.mark.parametrize(
    ("algorithm", "way", "shared"),
    [(next(OTHERS), way, way % 2 > 0) for way in range(len(WAYS))]
    + [(Algorithm.kNaive, way, way > 5) for way in (0, 5, 6)],
)
def test_a_job_computes_what_the_reference_does(algorithm: Algorithm, way: int, shared: bool) -> None:
    """Shared: residents see each other's memory."""
    script, changes = WAYS[way]
    workers = {Algorithm.kNaive: 2, Algorithm.kRing: 3, Algorithm.kTree: 5}[algorithm] if way < 2 else 3
    job = beside(workers, algorithm=algorithm, **changes)
    build = building(Halves, adam) if script is halves else building()
    result = run_local(job, build, script, shared)
    gateways = [
        each for server in result.servers for each in server.hooks.extensions if isinstance(each, CollectiveServer)
    ]
    assert len(gateways) == len(result.servers) == workers
    check(job, result, build, script)
    if script is halves:
        begun = reference(job, build, lambda t: None)
        assert torch.equal(result.values["never.weight"], begun.values["never.weight"])


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
    results.append(run_local(job, build, script))
    check(job, results[0], build, script)
    assert all(other.same_bits(results[0]) for other in results)


SCRIPTS = (*ALWAYS, clip_norm, edit, edit_between_backwards)


@pytest.mark.parametrize(
    ("script", "algorithm"), list(zip(SCRIPTS, cycle(OWN), strict=False)), ids=lambda f: getattr(f, "__name__", f)
)
def test_the_script_sees_and_changes_the_groups_gradients(algorithm: Algorithm, script: Any) -> None:
    job = beside(algorithm=algorithm)
    check(job, run_local(job, building(), script), building(), script)


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
    assert scaler.get_scale() == 2.0**9


@pytest.mark.parametrize(
    ("changes", "script", "expected"),
    [
        ({"algorithm": Algorithm.kNaive}, one_overflow, one_overflow),
        ({"algorithm": Algorithm.kTree}, one_overflow, one_overflow),
        # Hidden gradients are added up at the step.
        ({"algorithm": Algorithm.kRing, **HIDDEN}, alternating_parts, alternating_parts),
        # The servers clip the global norm.
        *((RING | {"grads": grads, "updater": Updater(clip_norm=0.05)}, USUAL, clip_norm) for grads in Grads),
    ],
    ids=case_id,
)
def test_a_job_computes_what_the_plain_script_does(changes: Any, script: Any, expected: Any) -> None:
    assert run_local(beside(**changes), building(), script).distance(plain(building(), expected)) < 1e-5


def test_several_workers_in_a_unit_and_whole_tensors(tmp_path: Path) -> None:
    build, script = building(Transformer, adam), usual_loop(tokens(3))
    pairs = {"nworkers_per_procs": 2, "nservers_per_procs": 2, "transport": TransportChoice.kTcp}
    job = beside(4, algorithm=Algorithm.kTree, slicing=Slicing.kTensor, **pairs)
    assert run_hosted(job, build, script, tmp_path).distance(reference(job, build, script)) < NEAR


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
def test_workers_that_disagree_are_named(script: Any, kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        run_local(beside(2, algorithm=Algorithm.kTree), building(), script)


# --- Gloo --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "script"),
    [
        ({"transport": TransportChoice.kTcp, "workers": 3, **HIDDEN}, halves),
        # New values may come while the script goes on.
        ({"transport": TransportChoice.kTcp, "pull": "kLazy"}, halves),
        ({"reduce": Reduce.kSum}, weighted),
        ({"workers": 3}, accumulate),
        ({"workers": 3}, edit),
    ],
    ids=case_id,
)
def test_gloo_computes_what_the_reference_does(changes: dict[str, Any], script: Any, tmp_path: Path) -> None:
    job, build = gloo(**changes), building(Halves, adam) if script is halves else building()
    result = run_hosted(job, build, script, tmp_path)
    assert all(isinstance(handle.worker.client.gradients, TorchReduction) for handle in result.workers)
    assert result.distance(reference(job, build, script)) < NEAR


def test_gloo_leaves_out_an_overflow(tmp_path: Path) -> None:
    found = run_hosted(gloo(), building(), one_overflow, tmp_path)
    assert found.distance(plain(building(), one_overflow)) < 1e-5


def test_workers_that_disagree_under_gloo_are_named(tmp_path: Path) -> None:
    script, kind, words = DISAGREE[0]
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
