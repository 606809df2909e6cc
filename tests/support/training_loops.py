"""Training loops of many forms, which a job must carry out as the plain script does."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from in_process_job import cross_entropy, mlp, vectors
from torch import nn

LOSSES = (lambda m, x, y: m(x).pow(2).mean(), cross_entropy)


def each_step(steps: int = 8, size: int = 12) -> Callable[[Any], Any]:
    """Make a loop of a function that does what is between `zero_grad` and `step`, given (trainer, step, batch)."""

    def made(inside: Any) -> Any:
        @wraps(inside)
        def script(t: Any) -> None:
            for number, batch in enumerate(vectors(steps, size)):
                t.optimizer.zero_grad()
                inside(t, number, batch)
                t.optimizer.step()

        return script

    return made


def backward(t, batch, loss=cross_entropy, factor=1.0):
    t.backward([each * factor for each in t.losses(loss, *batch)])


def other(step):
    """A batch beside that of the step."""
    return vectors(1, seed=step + 1)[0]


@each_step()
def accumulate(t, step, batch):
    backward(t, batch, factor=0.5)
    backward(t, other(step), factor=0.5)


def accumulate_unevenly(t):
    """How many backwards a step has changes from step to step."""
    for step, batch in enumerate(vectors(12)):
        t.backward(t.losses(cross_entropy, *batch))
        if step in (0, 3, 4, 8, 9, 11):
            t.optimizer.step()
            t.optimizer.zero_grad()


@each_step()
def two_losses(t, step, batch):
    for loss in LOSSES:
        t.backward(t.losses(loss, *batch))


@each_step()
def retained_graph(t, step, batch):
    losses = t.losses(cross_entropy, *batch)
    t.backward(losses, retain_graph=True)
    t.backward([loss * 0.5 for loss in losses])


def keep_zeros(t):
    for batch in vectors(8):
        t.optimizer.zero_grad(set_to_none=False)
        t.backward(t.losses(cross_entropy, *batch))
        t.optimizer.step()


def never_zero(t):
    for batch in vectors(8):
        t.backward(t.losses(cross_entropy, *batch))
        t.optimizer.step()


def skipped_steps(t):
    for step, batch in enumerate(vectors(9)):
        t.optimizer.zero_grad()
        t.backward(t.losses(cross_entropy, *batch))
        if step % 3:
            t.optimizer.step()


@each_step(9)
def alternating_parts(t, step, batch):
    """Parameters without a gradient in some steps: momentum must not move them then."""
    if step % 3 == 1:
        t.backward(t.losses(lambda m, x, y: nn.functional.cross_entropy(m[2](m[0](x).detach()), y), *batch))
    else:
        backward(t, batch)


def a_step_without_backward(t):
    for step, batch in enumerate(vectors(6)):
        if step != 3:
            t.backward(t.losses(cross_entropy, *batch))
        t.optimizer.step()
        if step == 4:
            t.optimizer.zero_grad()


ALWAYS = [
    accumulate,
    accumulate_unevenly,
    two_losses,
    retained_graph,
    keep_zeros,
    never_zero,
    skipped_steps,
    alternating_parts,
    a_step_without_backward,
]


@each_step()
def clip_norm(t, step, batch):
    backward(t, batch)
    assert float(nn.utils.clip_grad_norm_(t.model.parameters(), 0.05)) > 0.05


@each_step()
def clip_value(t, step, batch):
    backward(t, batch)
    nn.utils.clip_grad_value_(t.model.parameters(), 0.01)


def edit(t):
    """In place, by a new tensor, through .data, to None, and out of nothing."""
    weight, bias, last = t.model[0].weight, t.model[0].bias, t.model[2].bias
    for step, batch in enumerate(vectors(8)):
        t.optimizer.zero_grad()
        t.backward(t.losses(cross_entropy, *batch))
        if step % 2:
            weight.grad[3:5] *= 0.5
            bias.grad = bias.grad.sign() * 0.01
        elif step % 4:
            weight.grad = None
            last.grad.data.add_(1e-3)
        else:
            weight.grad.data.mul_(2)
        t.optimizer.step()
    t.optimizer.zero_grad()
    bias.grad = torch.ones_like(bias)
    t.optimizer.step()


@each_step(6)
def edit_between_backwards(t, step, batch):
    backward(t, batch)
    t.model[0].weight.grad.mul_(0.5)
    t.model[2].bias.grad = None
    backward(t, other(step))


def put_back(t):
    """What was kept is changed and set again; and the gradient of one parameter is given to another."""
    for step, batch in enumerate(vectors(6)):
        t.optimizer.zero_grad()
        t.backward(t.losses(cross_entropy, *batch))
        kept = [p.grad for p in t.model.parameters()]
        kept[0].add_(1)
        for p, g in zip(t.model.parameters(), kept, strict=True):
            p.grad = g
        if step % 2:
            first, second = t.model[0].bias, t.model[2].bias
            second.grad = second.grad.clone() + first.grad[:5]
            t.model[0].weight.grad = None
        t.optimizer.step()
        assert all(g.isfinite().all() for g in kept)
        if step == 3:
            t.optimizer.step()  # of the same gradients


EDITS = [clip_norm, clip_value, edit, edit_between_backwards, put_back]


def scaled(overflow_at=None, unscale=False):
    """GradScaler on the CPU; in one step the loss is infinite on one sample, so on one worker only."""

    def script(t):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
        scales = []
        for step, (x, y) in enumerate(vectors(8)):
            if step == overflow_at:
                x = x.clone()
                x[0, 0] = 1e38
            t.optimizer.zero_grad()
            losses = t.losses(lambda m, x, y: m[0](x).pow(2).sum() * 1e-3 + cross_entropy(m, x, y), x, y)
            t.backward([scaler.scale(loss) for loss in losses])
            if unscale:
                scaler.unscale_(t.optimizer)
                nn.utils.clip_grad_norm_(t.model.parameters(), 0.5)
            scaler.step(t.optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        t.model.scales = scales

    return script


# --- several optimizers -------------------------------------------------------------------------------------------


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


def play(t, judge_steps=1, steps=12):
    """The usual loop of a GAN: `fool` leaves gradients in the discriminator, too."""
    opt_g, opt_d = t.optimizer
    for number, batch in enumerate(vectors(steps)):
        opt_d.zero_grad()
        backward(t, batch, real)
        backward(t, batch, fake)
        opt_d.step()
        if number % judge_steps == judge_steps - 1:
            opt_g.zero_grad()
            backward(t, batch, fool)
            opt_g.step()


def one_backward_and_two_steps(t):
    """An actor and a critic over common layers: one backward, then a step of each optimizer."""
    for batch in vectors(12):
        for optimizer in t.optimizer:
            optimizer.zero_grad()
        backward(t, batch)
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


def head_and_all():
    """The last layer is trained first, and then all; two of the optimizers are of one class."""
    model = mlp()
    return model, (
        torch.optim.Adam(model[2].parameters(), lr=0.01),
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        torch.optim.Adam([{"params": [model[0].bias]}, {"params": [model[2].weight], "lr": 0.02}], lr=0.01),
    )


def in_phases(t):
    """Each step takes the gradients of its own parameters, and changes the state of its own optimizer."""
    for optimizer, batch in zip([t.optimizer[each] for each in (0, 0, 0, 1, 1, 1, 2, 0, 1, 2, 2, 1)], vectors(12)):
        optimizer.zero_grad()
        backward(t, batch)
        optimizer.step()


# --- a backward that fails ---------------------------------------------------------------------------------------


class Fuse(torch.autograd.Function):
    """Blows in backward where a module's flag says so, after the last layer's gradients are through."""

    @staticmethod
    def forward(ctx, x, model):
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.model.blows:
            raise ArithmeticError("blown")
        return grad, None


class Fused(nn.Module):
    """Large enough that the last layer's bucket has left before the fuse blows."""

    def __init__(self, width=300, out=1000):
        super().__init__()
        self.first, self.last = nn.Linear(12, width), nn.Linear(width, out)
        self.blows = False

    def forward(self, x):
        return self.last(Fuse.apply(torch.tanh(self.first(x)), self))


def blown(t, batch):
    t.model.blows = True
    with pytest.raises(ArithmeticError):
        backward(t, batch)
    t.model.blows = False
