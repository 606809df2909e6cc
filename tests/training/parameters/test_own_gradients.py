"""Gradients that no backward of the group has made, and the script's hooks on parameters."""

from functools import partial

import in_process_job
import pytest
import torch
from in_process_job import building, cross_entropy, job_of, plain, run_local, vectors
from torch import nn
from torch.func import functional_call, grad, vmap

from topotrain.config.job import Grads


@pytest.fixture(autouse=True, params=[False, True], ids=["sent", "shown"])
def _memory(request, monkeypatch):
    monkeypatch.setitem(globals(), "run_local", partial(in_process_job.run_local, shared=request.param))


def share(t, batch):
    (found,) = t.losses(lambda model, *given: given, *batch)
    return found


def by_autograd(t):
    for batch in vectors(5, 14):
        t.optimizer.zero_grad()
        parameters = list(t.model.parameters())
        x, y = share(t, batch)
        for p, g in zip(parameters, torch.autograd.grad(cross_entropy(t.model, x, y), parameters)):
            p.grad = g
        t.optimizer.step()


def per_sample(t):
    """DP-SGD without noise: each sample's gradient is clipped."""

    def loss(params, x, y):
        return nn.functional.cross_entropy(functional_call(t.model, params, (x[None],)), y[None])

    for batch in vectors(4, 14):
        t.optimizer.zero_grad(set_to_none=False)
        x, y = share(t, batch)
        free = {n: p.detach() for n, p in t.model.named_parameters()}
        each = vmap(grad(loss), in_dims=(None, 0, 0))(free, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        for name, p in t.model.named_parameters():
            mean = (each[name] * (0.5 / norms).clamp(max=1).view(-1, *[1] * p.dim())).mean(0)
            if p.grad is None:
                p.grad = mean
            else:
                p.grad.copy_(mean)
        t.optimizer.step()


def mixed(t):
    """By hand for the bias, before a backward for all; and a parameter that only the hand reaches."""
    bias, last = t.model[0].bias, t.model[2].bias
    for batch in vectors(5, 14):
        t.optimizer.zero_grad()
        x, y = share(t, batch)
        (bias.grad,) = torch.autograd.grad(t.model(x).pow(2).mean(), [bias])
        last.requires_grad_(False)
        cross_entropy(t.model, x, y).backward()
        last.requires_grad_(True)
        (last.grad,) = torch.autograd.grad(t.model(x).abs().mean(), [last])
        t.optimizer.step()


@pytest.mark.parametrize("script", [by_autograd, per_sample, mixed], ids=lambda f: f.__name__)
def test_a_gradient_that_no_backward_made_is_reduced_at_the_step(script):
    result = run_local(job_of(), building(), script)
    assert result.distance(plain(building(), script)) < 1e-5


@pytest.mark.parametrize("script", [by_autograd, mixed], ids=lambda f: f.__name__)
def test_the_same_with_hidden_gradients(script):
    assert run_local(job_of(grads=Grads.kHidden), building(), script).distance(plain(building(), script)) < 1e-5


# --- hooks -------------------------------------------------------------------------------------------------------


def clip(p):
    p.grad.clamp_(-0.01, 0.01)


def hooked(where, kind):
    calls = []

    def register(model):
        if kind == "tensor":
            for p in model.parameters():
                p.register_hook(lambda g: calls.append(1) or g.clamp(-0.01, 0.01))
        else:
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(clip)

    def build():
        model, optimizer = building()()
        if where == "before":
            register(model)
        return model, optimizer

    def script(t):
        if where == "after":
            register(t.model)
            if hasattr(t, "worker"):
                t.worker.path.look()  # as where a backward begins (`loss_watch`)
        for step, batch in enumerate(vectors(6, 14)):
            t.optimizer.zero_grad()
            t.backward(t.losses(cross_entropy, *batch))
            if step % 2:
                t.backward(t.losses(lambda m, x, y: m(x).pow(2).mean(), *batch))
            t.optimizer.step()

    return build, script


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("kind", ["tensor", "post"])
def test_hooks_on_parameters_get_the_mean_of_the_group(where, kind):
    build, script = hooked(where, kind)
    assert run_local(job_of(), build, script).distance(plain(build, script)) < 1e-5


def test_a_hook_and_autograd_grad_of_its_parameter_are_refused():
    def build():
        model, optimizer = building()()
        model[0].weight.register_hook(lambda g: g * 2)
        return model, optimizer

    with pytest.raises(RuntimeError, match=r"parameter 0\.weight has a hook .*autograd\.grad"):
        run_local(job_of(), build, by_autograd)


def test_an_optimizer_of_each_parameter_in_its_hook():
    def build():
        model = building()()[0]
        return model, [torch.optim.SGD([p], lr=0.05, momentum=0.9) for p in model.parameters()]

    def script(t):
        def step(p, optimizer):
            optimizer.step()
            optimizer.zero_grad()

        for p, optimizer in zip(t.model.parameters(), t.optimizer):
            p.register_post_accumulate_grad_hook(partial(step, optimizer=optimizer))
        for batch in vectors(4, 14):
            t.backward(t.losses(cross_entropy, *batch))

    assert run_local(job_of(), build, script).distance(plain(build, script)) < 1e-5
