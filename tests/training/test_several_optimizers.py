"""Several optimizers, of one model or of several, in one job: each step takes the gradients of its own parameters."""

import copy

import pytest
import torch
from in_process_job import cross_entropy, job_of, mlp, plain, run_local, vectors
from torch import nn
from training_loops import gan, head_and_all, in_phases, one_backward_and_two_steps, parts_of_one_model, play

from topotrain.config.job import Apply, Cluster, ConfigError, Grads, Job, Slicing
from topotrain.core.client.client import JobError
from topotrain.core.optim.adapter import OptimizerSpec, describe_all

# --- other settings ----------------------------------------------------------------------------------------------


def test_an_optimizer_of_whole_tensors_stands_beside_one_of_slices():
    def build():
        model = mlp()
        return model, (
            torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02),
            torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1], lr=0.01),
        )

    job = job_of("allreduce", slicing=Slicing.kTensor)
    assert run_local(job, build, one_backward_and_two_steps).distance(plain(build, one_backward_and_two_steps)) < 1e-5


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(nworker_groups=2, nworkers_per_group=2, nservers_per_group=2, server_worker_separate=True),
        Cluster(nworker_groups=3, nserver_groups=3),
    ],
    ids=["Downpour", "Hogwild"],
)
def test_asynchronous_groups_count_each_update_of_each_optimizer_once(cluster):
    def build():
        model = nn.ParameterList([torch.zeros(70), torch.zeros(9)])
        return model, [torch.optim.SGD([p], lr=rate) for p, rate in zip(model, (1.0, 0.5))]

    def script(t):
        for step in range(6):
            for optimizer in t.optimizer:
                optimizer.zero_grad()
            t.backward(t.losses(lambda m, x: -m[0].sum() - m[1].sum(), torch.ones(2, 1)))
            for optimizer in t.optimizer[: 1 + step % 2]:
                optimizer.step()

    first, second = run_local(Job(cluster=cluster), build, script).values.values()
    groups = cluster.nworker_groups
    assert torch.equal(first, torch.full((70,), 6.0 * groups)) and torch.equal(second, torch.full((9,), 1.5 * groups))


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"apply": Apply.kOnArrival, "grads": Grads.kHidden}, "apply"),
        ({"n_push": 2, "nworkers_per_group": 1, "nservers_per_group": 1}, "cluster.n_push"),
        ({"n_fetch": 2, "nworkers_per_group": 1, "nservers_per_group": 1}, "cluster.n_fetch"),
        ({"backup": 1, "grads": Grads.kHidden, "per_worker_batch": True}, "cluster.backup"),
    ],
)
def test_what_several_optimizers_do_not_go_with_is_named(more, field):
    with pytest.raises(ConfigError, match=f"{field} = .* with several optimizers: "):
        run_local(job_of("sandblaster", **more), gan, play)


def test_each_optimizer_has_its_own_state():
    """`state_dict` has the state of the optimizer's own parameters, as in torch, and goes back to the servers."""

    def script(t):
        play(t, steps=3)
        before = [optimizer.state_dict() for optimizer in t.optimizer]
        t.notes["state"] = before
        for optimizer, state in zip(t.optimizer, before):
            optimizer.load_state_dict(state)
        play(t, steps=3)

    def undisturbed(t):
        play(t, steps=3)
        play(t, steps=3)

    result = run_local(job_of("sandblaster"), gan, script)
    assert result.same_bits(run_local(job_of("sandblaster"), gan, undisturbed))
    of_g, of_d = result.workers[0].notes["state"]
    assert [set(entry) for entry in of_g["state"].values()] == [{"step", "exp_avg", "exp_avg_sq"}] * 4
    assert [set(entry) for entry in of_d["state"].values()] == [{"momentum_buffer"}] * 4
    assert float(of_g["state"][0]["step"]) == 3


def test_a_parameter_of_several_optimizers_has_a_state_in_each():
    """Read, cleared and loaded apart, as in torch."""

    def script(t):
        in_phases(t)
        saved = [copy.deepcopy(optimizer.state_dict()["state"]) for optimizer in t.optimizer]
        t.optimizer[1].state.clear()
        found.append(([{k: sorted(v) for k, v in state.items()} for state in saved], len(t.optimizer[0].state)))
        in_phases(t)
        t.optimizer[0].load_state_dict({**t.optimizer[0].state_dict(), "state": saved[0]})
        in_phases(t)

    found = []
    expected = plain(head_and_all, script)
    assert run_local(job_of("two by two"), head_and_all, script).distance(expected) < 1e-5
    assert all(each == found[0] for each in found)
    assert expected.distance(plain(head_and_all, lambda t: [in_phases(t) for _ in range(3)])) > 1e-3


# --- descriptions ------------------------------------------------------------------------------------------------


def test_the_text_of_one_optimizer_is_as_it_was_and_that_of_several_comes_back():
    model, optimizers = parts_of_one_model()
    one = describe_all(optimizers[:1], list(model.parameters())[::2])
    assert '"name":"torch.optim.Adam"' in one.to_text() and "optimizers" not in one.to_text()
    both = describe_all(optimizers, list(model.parameters()))
    assert OptimizerSpec.from_text(both.to_text()) == both
    assert both.name == "torch.optim.Adam and torch.optim.SGD" and both.assignment == (0, 1, 0, 1)
    assert both.momentum([{"momentum": 0.5}, {"momentum": 0.9}]) == 0.9
    right = '[["torch.optim.Adam",1],["torch.optim.SGD",1]]'
    assert right in both.to_text()
    for wrong in (
        "[]",
        "3",
        '[["torch.optim.SGD",1]]',
        '[["SGD",2]]',
        '[["torch.optim.SGD",-1],["torch.optim.SGD",3]]',
    ):
        with pytest.raises(ConfigError):
            OptimizerSpec.from_text(both.to_text().replace(right, wrong))


def test_the_text_of_optimizers_of_the_same_parameters_comes_back():
    model, optimizers = head_and_all()
    spec = describe_all(optimizers, list(model.parameters()))
    assert OptimizerSpec.from_text(spec.to_text()) == spec
    assert (spec.assignment, spec.also) == ((1, 1, 0, 0), ((2, 1), (3, 1), (1, 2), (2, 3)))
    for wrong in ("3", "[[2]]", "[[4,1]]", "[[2,4]]", "[[2,true]]"):
        with pytest.raises(ConfigError, match="also"):
            OptimizerSpec.from_text(spec.to_text().replace("[[2,1],[3,1],[1,2],[2,3]]", wrong))


# --- what goes wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grads", [Grads.kHidden])
def test_workers_that_step_with_different_optimizers_are_named(grads):
    def script(t):
        t.backward(t.losses(cross_entropy, *vectors(1)[0]))
        t.optimizer[t.me.index % 2].step()

    with pytest.raises(
        JobError, match=r"workers \d and \d of a group disagree about the optimizer .* in step 1: [01] and"
    ):
        run_local(job_of("sandblaster", grads=grads), parts_of_one_model, script)


def test_one_optimizer_without_finite_gradients_ends_the_job_though_the_other_has_them():
    def script(t):
        first, second = t.optimizer
        for batch in vectors(9):
            for optimizer, factor in ((first, float("nan")), (second, 1.0)):
                optimizer.zero_grad()
                t.backward([loss * factor for loss in t.losses(cross_entropy, *batch)])
                optimizer.step()
                t.notes[optimizer is first] = t.notes.get(optimizer is first, 0) + 1

    with pytest.raises(JobError, match="is not finite in 3 steps in a row"):
        run_local(job_of("one"), parts_of_one_model, script)


def test_gradients_that_are_not_finite_skip_the_step_of_their_optimizer_only():
    def script(t):
        first, second = t.optimizer
        begin = [p.detach().clone() for p in t.model.parameters()]
        t.backward([loss * float("nan") for loss in t.losses(cross_entropy, *vectors(1)[0])])
        first.step()
        second.zero_grad()
        t.backward(t.losses(cross_entropy, *vectors(2)[1]))
        second.step()
        t.notes["moved"] = [not torch.equal(p, q) for p, q in zip(t.model.parameters(), begin)]

    result = run_local(job_of("one"), parts_of_one_model, script)
    assert result.workers[0].notes["moved"] == [False, True, False, True]
