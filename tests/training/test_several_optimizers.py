"""Several optimizers, of one model or of several, in one job: each step takes the gradients of its own parameters.

Synchronous jobs compute what the plain script computes, and what the one-process reference does bit for bit.
"""

from functools import partial

import in_process_job
import pytest
import torch
from in_process_job import LAYOUTS, cross_entropy, job_of, mlp, plain, reference, run_local, vectors
from torch import nn

from topotrain.config.job import Grads

SYNCHRONOUS = [name for name in LAYOUTS if LAYOUTS[name].get("nworker_groups", 1) == 1]


@pytest.fixture(autouse=True, params=[False, True], ids=["sent", "shown"])
def _memory(request, monkeypatch):
    """Every job here runs twice: all that it needs travels, and residents see each other's memory."""
    monkeypatch.setitem(globals(), "run_local", partial(in_process_job.run_local, shared=request.param))


# --- scripts -----------------------------------------------------------------------------------------------------


def gan():
    """A generator and a discriminator, with an optimizer of another class each."""
    make = nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 12))
    judge = nn.Sequential(nn.Linear(12, 33), nn.ReLU(), nn.Linear(33, 1))
    return nn.ModuleList([make, judge]), (
        torch.optim.Adam(make.parameters(), lr=0.01, betas=(0.5, 0.9)),
        torch.optim.SGD(judge.parameters(), lr=0.05, momentum=0.8),
    )


def real(models, x, y):
    return nn.functional.softplus(-models[1](x)).mean()


def fake(models, x, y):
    return nn.functional.softplus(models[1](models[0](x[:, :4]).detach())).mean()


def fool(models, x, y):
    return nn.functional.softplus(-models[1](models[0](x[:, :4]))).mean()


def play(t, clear_judge=True, judge_steps=1, steps=12):
    """The usual loop of a GAN: `fool` leaves gradients in the discriminator, too."""
    opt_g, opt_d = t.optimizer
    for number, batch in enumerate(vectors(steps)):
        if clear_judge:
            opt_d.zero_grad()
        t.backward(t.losses(real, *batch))
        t.backward(t.losses(fake, *batch))
        opt_d.step()
        if number % judge_steps == judge_steps - 1:
            opt_g.zero_grad()
            t.backward(t.losses(fool, *batch))
            opt_g.step()


def one_backward_and_two_steps(t):
    """An actor and a critic over common layers: one backward, then a step of each optimizer."""
    for batch in vectors(12):
        for optimizer in t.optimizer:
            optimizer.zero_grad()
        t.backward(t.losses(cross_entropy, *batch))
        for optimizer in t.optimizer:
            optimizer.step()


def parts_of_one_model():
    """Weights and biases alternate in the model, and have different optimizers."""
    model = mlp()
    weights = [p for p in model.parameters() if p.dim() > 1]
    return model, (
        torch.optim.Adam(weights, lr=0.01),
        torch.optim.SGD([p for p in model.parameters() if p.dim() == 1], lr=0.1, momentum=0.9),
    )


def clipped(t):
    """Each optimizer clips the gradients of its own parameters."""
    for batch in vectors(8):
        for number, optimizer in enumerate(t.optimizer):
            optimizer.zero_grad()
            t.backward(t.losses(cross_entropy, *batch))
            mine = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(mine, 0.1 * (number + 1))
            optimizer.step()


def scheduled(t):
    """Each optimizer has a schedule of its own."""
    first, second = t.optimizer
    decays = [
        torch.optim.lr_scheduler.StepLR(first, 3, 0.5),
        torch.optim.lr_scheduler.ExponentialLR(second, 0.9),
    ]
    for batch in vectors(8):
        for optimizer, decay in zip(t.optimizer, decays):
            optimizer.zero_grad()
            t.backward(t.losses(cross_entropy, *batch))
            optimizer.step()
            decay.step()


SCRIPTS = {
    "gan": (gan, play),
    "a gan that keeps gradients": (gan, partial(play, clear_judge=False)),
    "three steps of the judge": (gan, partial(play, judge_steps=3)),
    "one backward": (parts_of_one_model, one_backward_and_two_steps),
    "clipped": (parts_of_one_model, clipped),
    "scheduled": (parts_of_one_model, scheduled),
}


# --- equal to the plain script -----------------------------------------------------------------------------------


def check(job, build, script, bits=True):
    """The job equals the reference bit for bit, and the plain script nearly."""
    result = run_local(job, build, script)
    assert not bits or result.same_bits(reference(job, build, script))
    assert result.distance(plain(build, script)) < 1e-6
    return result


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("layout", SYNCHRONOUS)
def test_a_synchronous_job_equals_the_reference_and_the_plain_script(layout, name):
    check(job_of(layout), *SCRIPTS[name])


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "clipped"])  # hidden gradients refuse edits
@pytest.mark.parametrize("layout", [name for name in SYNCHRONOUS if LAYOUTS[name].get("nserver_groups", 1)])
def test_hidden_gradients_do_as_well(layout, name):
    # The mean of a worker's sum over several backwards has other last bits than the sum of their means.
    check(job_of(layout, grads=Grads.kHidden), *SCRIPTS[name], bits=name in ("one backward", "scheduled"))
