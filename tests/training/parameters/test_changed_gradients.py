"""What scripts do to gradients between the backward and the step: alike on all workers of a group, or refused."""

import pytest
import torch
from in_process_job import building, cross_entropy, job_of, plain, run_local, vectors
from torch import nn

from topotrain.config.job import Grads
from topotrain.core.client.client import JobError


def index_of(t):
    return t.me.index if hasattr(t, "me") else 0


def by_backward(t, batch):
    t.backward(t.losses(cross_entropy, *batch))


def by_hand(t, batch):
    (found,) = t.losses(lambda model, *given: given, *batch)
    parameters = list(t.model.parameters())
    for p, g in zip(parameters, torch.autograd.grad(cross_entropy(t.model, *found), parameters)):
        p.grad = g


def training(change, gradients=by_backward, steps=5):
    def script(t):
        for step, batch in enumerate(vectors(steps, 14)):
            t.optimizer.zero_grad()
            gradients(t, batch)
            change(t, step)
            t.optimizer.step()

    return script


def noise(t, step):
    drawn = torch.Generator().manual_seed(index_of(t))
    for p in t.model.parameters():
        p.grad.add_(torch.randn(p.shape, generator=drawn), alpha=0.01)


def one_worker(t, step):
    if step == 2 and not index_of(t):
        t.model[2].bias.grad.neg_()


def by_own_number(t, step):
    for p in t.model.parameters():
        p.grad = p.grad * (1 + index_of(t))


def between_two(t, step):
    noise(t, step)
    by_backward(t, vectors(1, 14)[0])


@pytest.mark.parametrize(
    ("change", "shared"), [(noise, False), (one_worker, True), (by_own_number, False), (between_two, True)]
)
def test_other_changes_on_each_worker_are_refused_by_name(change, shared):
    name = r"2\.bias\)" if change is one_worker else r"\d\.\w+"
    said = rf"workers \d and \d of a group disagree about (what|which).* \({name}"
    with pytest.raises(JobError, match=rf"{said}.*tt\.mean\(value\)"):
        run_local(job_of(), building(), training(change), shared)


def same_noise(t, step):
    drawn = torch.Generator().manual_seed(step)
    for p in t.model.parameters():
        p.grad.add_(torch.randn(p.shape, generator=drawn), alpha=0.01)


def nothing_on_one(t, step):
    if not index_of(t):
        nn.utils.clip_grad_norm_(t.model.parameters(), float("inf"))


def clip(t, step):
    nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)


def clip_the_mean(t, step):
    if hasattr(t, "worker"):
        t.worker.path.reduce_own()  # as tt.clip_grad_norm_
    clip(t, step)


def backward_again(t, step):
    by_backward(t, vectors(1, 14)[0])


def same_by_hand(t, batch):
    t.losses(lambda *given: given, *batch)
    for p in t.model.parameters():
        p.grad = p.detach() * 0.1


@pytest.mark.parametrize(
    ("change", "gradients", "shared"),
    [
        (same_noise, by_backward, True),
        (nothing_on_one, by_backward, False),
        (clip_the_mean, by_hand, False),
        (clip, same_by_hand, True),
        (backward_again, same_by_hand, False),
    ],
)
def test_the_same_change_on_all_workers_counts(change, gradients, shared):
    script = training(change, gradients)
    assert run_local(job_of(), building(), script, shared).distance(plain(building(), script)) < 1e-5


def test_clipping_a_gradient_of_the_share_is_refused():
    with pytest.raises(JobError, match=r"0\.weight.*tt\.clip_grad_norm_"):
        run_local(job_of(), building(), training(clip, by_hand))


def test_the_same_with_hidden_gradients():
    with pytest.raises(RuntimeError, match=r"gradient of 0\.weight was changed.*tt\.clip_grad_norm_"):
        run_local(job_of(grads=Grads.kHidden), building(), training(clip, by_hand))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_derivative_of_the_mean_is_refused_by_name():
    def gradients(t, batch):
        t.backward(t.losses(cross_entropy, *batch), create_graph=True)
        sum(p.grad.pow(2).sum() for p in t.model.parameters()).backward()

    with pytest.raises(RuntimeError, match=r"second derivative through p\.grad.*torch\.autograd\.grad"):
        run_local(job_of(), building(), training(clip, gradients))
