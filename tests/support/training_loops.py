"""Training loops of many forms, which a job must carry out as the plain script does."""

import torch
from in_process_job import (
    cross_entropy,
    vectors,
)
from torch import nn

LOSSES = (lambda m, x, y: m(x).pow(2).mean(), cross_entropy)


def accumulate(t):
    for first, second in zip(vectors(8), vectors(8, seed=1)):
        t.optimizer.zero_grad()
        t.backward([loss / 2 for loss in t.losses(cross_entropy, *first)])
        t.backward([loss / 2 for loss in t.losses(cross_entropy, *second)])
        t.optimizer.step()


def accumulate_unevenly(t):
    """How many backwards a step has changes from step to step."""
    for step, batch in enumerate(vectors(12)):
        t.backward(t.losses(cross_entropy, *batch))
        if step in (0, 3, 4, 8, 9, 11):
            t.optimizer.step()
            t.optimizer.zero_grad()


def two_losses(t):
    for batch in vectors(8):
        t.optimizer.zero_grad()
        for loss in LOSSES:
            t.backward(t.losses(loss, *batch))
        t.optimizer.step()


def retained_graph(t):
    for batch in vectors(8):
        t.optimizer.zero_grad()
        losses = t.losses(cross_entropy, *batch)
        t.backward(losses, retain_graph=True)
        t.backward([loss * 0.5 for loss in losses])
        t.optimizer.step()


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


def alternating_parts(t):
    """Parameters without a gradient in some steps: momentum must not move them then."""
    for step, batch in enumerate(vectors(9)):
        t.optimizer.zero_grad()
        if step % 3 == 1:
            t.backward(t.losses(lambda m, x, y: nn.functional.cross_entropy(m[2](m[0](x).detach()), y), *batch))
        else:
            t.backward(t.losses(cross_entropy, *batch))
        t.optimizer.step()


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


def clip_norm(t):
    norms = []
    for batch in vectors(8):
        t.optimizer.zero_grad()
        t.backward(t.losses(cross_entropy, *batch))
        norms.append(float(nn.utils.clip_grad_norm_(t.model.parameters(), 0.05)))
        t.optimizer.step()
    assert min(norms) > 0.05


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


def edit_between_backwards(t):
    for first, second in zip(vectors(6), vectors(6, seed=1)):
        t.optimizer.zero_grad()
        t.backward(t.losses(cross_entropy, *first))
        t.model[0].weight.grad.mul_(0.5)
        t.model[2].bias.grad = None
        t.backward(t.losses(cross_entropy, *second))
        t.optimizer.step()


def clip_value(t):
    for batch in vectors(8):
        t.optimizer.zero_grad()
        t.backward(t.losses(cross_entropy, *batch))
        nn.utils.clip_grad_value_(t.model.parameters(), 0.01)
        t.optimizer.step()
