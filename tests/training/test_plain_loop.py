"""Synchronous jobs compute what the plain script computes, and what the one-process reference does bit for bit.

Each loop is run in some layouts in turn, with visible and with hidden gradients, in memory that is sent or shown.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from in_process_job import (
    Cnn,
    Transformer,
    adagrad,
    adam,
    building,
    cross_entropy,
    images,
    job_of,
    mlp,
    plain,
    reference,
    run_hosted,
    run_local,
    sgd,
    tokens,
    usual_loop,
    vectors,
)
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint
from training_loops import (
    ALWAYS,
    EDITS,
    Fused,
    backward,
    blown,
    each_step,
    gan,
    head_and_all,
    in_phases,
    one_backward_and_two_steps,
    other,
    parts_of_one_model,
    play,
)

from topotrain.config.job import Grads, Reduce

pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")


MLP = building()


@dataclass(frozen=True)
class Loop:
    """A script, and what a job of it equals.

    near: the greatest distance from the plain script; None: it computes something else. bits: the reference can run
    it. hidden: with hidden gradients it has the reference's bits, or is only near to the plain script ("near"); ""
    leaves that out.
    """

    script: Callable[[Any], None]
    build: Callable[[], tuple[Any, ...]] = MLP
    near: float | None = 1e-5
    bits: bool = True
    hidden: str = "bits"
    fields: dict[str, Any] = field(default_factory=dict)


# --- how a loss is computed --------------------------------------------------------------------------------------


def masked(model, x, y):
    """Each share divides by its own count of tokens; `weight` makes the group's mean that of all tokens."""
    losses = nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="none")
    mask = (y.flatten() < 6).float()
    return (losses * mask).sum() / mask.sum()


def token_means(t):
    for batch in tokens(8):
        t.optimizer.zero_grad()
        t.backward(t.losses(masked, *batch, weight=lambda x, y: float((y < 6).sum())))
        t.optimizer.step()


def summed(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="sum")


def penalized(model, x, y):
    """Gradient penalty: the gradient of a gradient's norm."""
    x = x.clone().requires_grad_(True)
    loss = cross_entropy(model, x, y)
    (slope,) = torch.autograd.grad(loss * len(x), x, create_graph=True)  # of each sample's own loss
    return loss + slope.pow(2).sum(1).mean()


def grad_of_parameters(model, x, y):
    """autograd.grad over parameters, first and second order, next to the step's own backward."""
    loss = cross_entropy(model, x, y)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.1 * sum(g.pow(2).sum() for g in grads)


def checkpointed(model, x, y):
    hidden = checkpoint(lambda v: torch.tanh(model[0](v)), x, use_reentrant=False)
    return nn.functional.cross_entropy(checkpoint(model[2], hidden, use_reentrant=False), y)


def retained(model, x, y):
    hidden = model[0](x)
    hidden.retain_grad()
    return nn.functional.cross_entropy(model[2](torch.tanh(hidden)), y)


def functional(model, x, y):
    return nn.functional.cross_entropy(functional_call(model, dict(model.named_parameters()), (x,)), y)


# --- how a backward is made --------------------------------------------------------------------------------------


@each_step(5)
def autograd_grad_beside(t, step, batch):
    backward(t, batch)
    before = [p.grad.clone() for p in t.model.parameters()]
    torch.autograd.grad(cross_entropy(t.model, *batch), list(t.model.parameters()))
    assert all(torch.equal(p.grad, b) for p, b in zip(t.model.parameters(), before))
    backward(t, batch)


@each_step(3)
def create_graph(t, step, batch):
    t.backward(t.losses(cross_entropy, *batch), create_graph=True)


def kept_graphs(t):
    """Means with a graph that is never used are gradients as any other."""
    for batch in vectors(4, 14):
        t.optimizer.zero_grad(set_to_none=False)
        for _ in range(2):
            t.backward(t.losses(cross_entropy, *batch), create_graph=True)
        assert all(p.grad.requires_grad for p in t.model.parameters())
        nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
        t.optimizer.step()


@each_step(4)
def some_inputs(t, step, batch):
    t.backward(t.losses(cross_entropy, *batch), inputs=list(t.model[2].parameters()))
    assert t.model[0].weight.grad is None


@each_step()
def dropped(t, step, batch):
    backward(t, batch)
    t.optimizer.zero_grad()
    backward(t, other(step))


def read_after_the_step(t):
    for batch in vectors(6):
        t.optimizer.zero_grad()
        backward(t, batch)
        t.optimizer.step()
        assert all(p.grad.sum().isfinite() for p in t.model.parameters())


def given_up(before):
    """All workers give a batch up (`except RuntimeError: continue`): nothing of it may be in the next step."""

    @each_step(6)
    def script(t, step, batch):
        for _ in range(before):
            backward(t, batch)
        if step % 2:
            blown(t, batch)
            t.optimizer.zero_grad()
            backward(t, other(step))
        backward(t, batch)

    return script


@each_step(6)
def a_failed_backward_at_last(t, step, batch):
    backward(t, batch)
    if step % 2:
        kept = [p.grad.clone() for p in t.model.parameters()]
        blown(t, batch)
        for p, gradient in zip(t.model.parameters(), kept):
            p.grad = gradient


# --- workers that make different numbers of backwards, or none ----------------------------------------------------


def share(t, batch):
    (found,) = t.losses(lambda model, *given: given, *batch)
    return found


def targets():
    """Batches of which some shares of three workers have no target, the second batch's first and the fifth's last."""
    for step, (x, y) in enumerate(vectors(6)):
        has = torch.ones(len(x))
        has[: 4 if step == 1 else 0] = 0
        has[8 if step == 4 else len(x) :] = 0
        has[5] = 0
        yield x, y, has


def without_targets(t, clip=False):
    """A loop that leaves out the backward where a share has no target, which counts with weight 0."""

    def loss(model, x, y, has):
        return nn.functional.cross_entropy(model(x), y, reduction="none").mul(has).sum() / has.sum()

    for batch in targets():
        t.optimizer.zero_grad()
        losses = t.losses(loss, *batch, weight=lambda x, y, has: float(has.sum()))
        if all(bool(loss.isfinite()) for loss in losses):
            t.backward(losses)
        if clip:
            nn.utils.clip_grad_norm_(t.model.parameters(), 0.05)
        t.optimizer.step()


@each_step(6, 14)
def microbatches(t, step, batch):
    """Shares of 5 and 4 samples are three and two microbatches of 2."""
    x, y = share(t, batch)
    for lo in range(0, len(x), 2):
        t.backward([summed(t.model, x[lo : lo + 2], y[lo : lo + 2]) / len(x)])


# --- gradients that no backward of the group has made -------------------------------------------------------------


@each_step(5, 14)
def by_autograd(t, step, batch):
    parameters = list(t.model.parameters())
    x, y = share(t, batch)
    for p, g in zip(parameters, torch.autograd.grad(cross_entropy(t.model, x, y), parameters)):
        p.grad = g


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


@each_step(5, 14)
def mixed(t, step, batch):
    """By hand for the bias, before a backward for all; and a parameter that only the hand reaches."""
    bias, last = t.model[0].bias, t.model[2].bias
    x, y = share(t, batch)
    (bias.grad,) = torch.autograd.grad(t.model(x).pow(2).mean(), [bias])
    last.requires_grad_(False)
    cross_entropy(t.model, x, y).backward()
    last.requires_grad_(True)
    (last.grad,) = torch.autograd.grad(t.model(x).abs().mean(), [last])


def hooked(before, on_tensors):
    """The script's hooks on parameters get the mean of the group."""

    def clip(p):
        p.grad.clamp_(-0.01, 0.01)

    def register(model):
        for p in model.parameters():
            if on_tensors:
                p.register_hook(lambda g: g.clamp(-0.01, 0.01))
            else:
                p.register_post_accumulate_grad_hook(clip)

    def build():
        model, optimizer = building()()
        if before:
            register(model)
        return model, optimizer

    def script(t):
        if not before:
            register(t.model)
            if hasattr(t, "worker"):
                t.worker.path.look()  # as where a backward begins (`loss_watch`)
        for step, batch in enumerate(vectors(6, 14)):
            t.optimizer.zero_grad()
            backward(t, batch)
            if step % 2:
                backward(t, batch, lambda m, x, y: m(x).pow(2).mean())
            t.optimizer.step()

    return Loop(script, build, bits=False, hidden="")


def stepping_hooks():
    """An optimizer of each parameter, in its hook."""

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
            backward(t, batch)

    return Loop(script, build, bits=False, hidden="")


# --- which parameters --------------------------------------------------------------------------------------------


class Two(nn.Module):
    """Some workers have a gradient of `a`, others of `b`, and none of `c`."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 5), nn.Linear(12, 5), nn.Linear(12, 5)

    def forward(self, x):
        return (self.a if x[0, 0] > 0 else self.b)(x)


@each_step()
def union(t, step, batch):
    backward(t, batch)
    assert t.model.c.weight.grad is None


class Mixed(nn.Module):
    """Two dtypes, and on many servers some shards have nothing at all: they must answer all the same."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(12, 5)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return self.a(x) * self.scale.float()


def frozen(trained=lambda model: model, optimizer=sgd):
    """The first layer is frozen; `trained` is what the optimizer has."""

    def build():
        model = mlp()
        model[0].requires_grad_(False)
        return model, optimizer(trained(model))

    return build


def thaw(t, name, trains):
    """Also in the replicas of the reference."""
    for model in (t.model, *getattr(t, "_replicas", ())):
        model.get_submodule(name).requires_grad_(trains)


def thawing(t):
    """A slice holds frozen and other parameters, so its last gradient is another one in each phase."""
    for step, batch in enumerate(vectors(12)):
        if step in (3, 9):
            thaw(t, "0", step == 3)
        if step in (6, 9):
            thaw(t, "2", step == 9)
        t.optimizer.zero_grad()
        backward(t, batch)
        t.optimizer.step()
        expected = [not 3 <= step < 9, 6 <= step < 9]
        assert [layer.weight.grad is None for layer in (t.model[0], t.model[2])] == expected


def thawing_in_no_group(t):
    thaw(t, "0", True)
    usual_loop(vectors(3))(t)


# --- several optimizers -------------------------------------------------------------------------------------------


def clipped(t):
    """Each optimizer clips the gradients of its own parameters."""
    for batch in vectors(8):
        for number, optimizer in enumerate(t.optimizer):
            optimizer.zero_grad()
            backward(t, batch)
            mine = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(mine, 0.1 * (number + 1))
            optimizer.step()


def scheduled(t):
    """Each optimizer has a schedule of its own."""
    rates = torch.optim.lr_scheduler
    decays = rates.StepLR(t.optimizer[0], 3, 0.5), rates.ExponentialLR(t.optimizer[1], 0.9)
    for batch in vectors(8):
        for optimizer, decay in zip(t.optimizer, decays):
            optimizer.zero_grad()
            backward(t, batch)
            optimizer.step()
            decay.step()


# --- all of them -------------------------------------------------------------------------------------------------

ODD = [batch for size in (7, 2, 11, 1, 3) for batch in vectors(2, size)]
LOOPS = {
    "mlp, sgd": Loop(usual_loop(vectors(20))),
    "transformer, adam": Loop(usual_loop(tokens(15)), building(Transformer, adam)),
    # Batch statistics are a share's, so a CNN with BatchNorm computes something else than the plain script.
    "cnn, adagrad": Loop(usual_loop(images(15)), building(Cnn, adagrad), near=None),
    # Hidden, autograd sums the step's backwards before the group does: equal, but with other last bits.
    **{loop.__name__: Loop(loop, hidden="near") for loop in (*ALWAYS, dropped, read_after_the_step)},
    **{edit.__name__: Loop(edit, hidden="") for edit in EDITS},
    "put_back, adam": Loop(EDITS[-1], building(mlp, adam), near=1e-4, hidden=""),
    "batches that do not divide": Loop(usual_loop(ODD)),
    "token means": Loop(token_means, building(Transformer)),
    "sums": Loop(usual_loop(vectors(10), summed), fields={"reduce": Reduce.kSum}),
    **{loss.__name__: Loop(usual_loop(vectors(5), loss)) for loss in (penalized, checkpointed, retained, functional)},
    # A mean of norms is no norm of a mean.
    "grad_of_parameters": Loop(usual_loop(vectors(5), grad_of_parameters), near=None),
    **{
        loop.__name__: Loop(loop, bits=False, hidden="near")
        for loop in (autograd_grad_beside, create_graph, some_inputs, without_targets, microbatches, by_autograd, mixed)
    },
    **{f"given up after {n}": Loop(given_up(n), building(Fused), bits=False, hidden="near") for n in (0, 1)},
    "a failed backward": Loop(a_failed_backward_at_last, building(Fused), bits=False, hidden=""),
    "without targets, clipped": Loop(partial(without_targets, clip=True), bits=False, hidden=""),
    "kept graphs": Loop(kept_graphs, bits=False, hidden=""),
    "per sample": Loop(per_sample, bits=False, hidden=""),
    "early hooks on tensors": hooked(True, True),
    "late hooks behind": hooked(False, False),
    "stepping hooks": stepping_hooks(),
    "union": Loop(union, building(Two, adam), near=None),
    "two dtypes": Loop(
        usual_loop(vectors(6)), building(Mixed), fields={"nservers_per_group": 6, "nservers_per_procs": 2}
    ),
    "frozen": Loop(usual_loop(vectors(5)), frozen(optimizer=adam)),
    "in no group": Loop(usual_loop(vectors(5)), frozen(lambda model: model[2])),
    "thawing": Loop(thawing, frozen(optimizer=adam)),
    "thawing in no group": Loop(thawing_in_no_group, frozen(lambda model: model[2])),
    # The mean of a worker's sum over several backwards has other last bits than the sum of their means.
    "gan": Loop(play, gan, hidden="near"),
    "three steps of the judge": Loop(partial(play, judge_steps=3), gan, hidden="near"),
    "one backward": Loop(one_backward_and_two_steps, parts_of_one_model),
    "clipped apart": Loop(clipped, parts_of_one_model, hidden=""),
    "scheduled": Loop(scheduled, parts_of_one_model),
    "phases": Loop(in_phases, head_and_all),
}
ON_SERVERS = ["sandblaster", "allreduce", "in-memory", "two by two", "one"]
MEMORY = ["shown", "sent", "sent", "kShm", "shown", "kTcp", "sent"]
"""How messages and values travel: in this process, as messages or in memory that all see, or as between processes."""


def cases() -> Iterator[tuple[str, str, Grads, str]]:
    """Each loop, by turns with hidden gradients; layouts and ways to travel have no common divisor."""
    layouts, memory = cycle(["serverless", *ON_SERVERS]), cycle(MEMORY)
    for number, (name, loop) in enumerate(LOOPS.items()):
        hides = number % 2 == 1 and bool(loop.hidden)
        layout = next(each for each in layouts if not hides or each in ON_SERVERS)
        yield name, layout, Grads.kHidden if hides else Grads.kVisible, next(memory)


@pytest.mark.parametrize(("name", "layout", "grads", "memory"), [*cases()])
def test_a_job_computes_what_the_plain_script_and_the_reference_do(name, layout, grads, memory, tmp_path):
    loop = LOOPS[name]
    job, build, script = job_of(layout, grads=grads, **loop.fields), loop.build, loop.script

    if memory.startswith("k"):
        hosted = job_of(layout, grads=grads, transport=memory, **loop.fields)
        result = run_hosted(hosted, build, script, tmp_path)
    else:
        result = run_local(job, build, script, memory == "shown")
    if loop.bits and (grads is Grads.kVisible or loop.hidden == "bits"):
        assert result.same_bits(reference(job, build, script))
    if loop.near is not None:
        assert result.distance(plain(build, script)) < loop.near
    # All workers of a group end with the same values.
    first, *others = (list(worker.model.parameters()) for worker in result.workers)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other))


@pytest.mark.parametrize("loop", ["clip_norm", "clip_value", "edit", "put_back", "clipped apart"])
def test_edits_of_hidden_gradients_are_refused_with_the_remedies(loop):
    with pytest.raises(RuntimeError, match=r"kVisible, tt.clip_grad_norm_, or updater"):
        run_local(job_of(grads=Grads.kHidden), LOOPS[loop].build, LOOPS[loop].script)
