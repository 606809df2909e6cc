"""What the hooks send, and what the script finds in `.grad`."""

import pytest
import torch
from in_process_job import (
    Transformer,
    building,
    cross_entropy,
    job_of,
    mlp,
    plain,
    reference,
    run_local,
    sgd,
    vectors,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from topotrain.config.job import Grads
from topotrain.config.sharding import cut
from topotrain.core.client.client import JobError
from topotrain.core.model.schema import FlatBuffers, PrivateMemory
from topotrain.core.model.tensor_bits import same_bits
from topotrain.core.protocol import NO_REVISION
from topotrain.training.gradients import mean_path
from topotrain.training.gradients.push_path import PushPath
from topotrain.training.parameters.flat_parameters import ModelBuffers, describe_model
from topotrain.training.worker_stats import StepBatches

BATCH = vectors(1)[0]


def both(job, build, script):
    """Visible or not, the reference's bits where the script says so itself, else the plain script's numbers."""
    result = run_local(job, build, script)
    assert result.distance(plain(build, script)) < 1e-5
    return result


# --- what stands in .grad ----------------------------------------------------------------------------------------


def test_after_backward_grad_is_the_groups_mean_on_every_worker():
    seen = []

    def script(t):
        t.backward(t.losses(cross_entropy, *BATCH))
        seen.append([p.grad.clone() for p in t.model.parameters()])
        t.backward(t.losses(cross_entropy, *BATCH))
        for p, before in zip(t.model.parameters(), seen[-1]):
            assert torch.equal(p.grad, before + before)

    run_local(job_of(), building(), script)
    plain(building(), script)
    for first, second, third, whole in zip(*seen):
        assert torch.equal(first, second) and torch.equal(first, third)
        torch.testing.assert_close(first, whole, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("grads", "names"), [("kVisible", "grad"), ("kVisible", "grad local"), ("kHidden", "local")])
def test_in_shared_memory_a_worker_has_no_more_copies_of_the_model_than_it_needs(monkeypatch, grads, names):
    used, flat = set(), FlatBuffers.flat

    def noted(self, name, space):
        used.update(() if self._shard is not None else [name])  # a worker's
        return flat(self, name, space)

    def script(t):
        for _ in range(3):
            t.optimizer.zero_grad()
            for _ in names.split():  # with two, gradients are accumulated
                t.backward(t.losses(cross_entropy, *BATCH))
            t.optimizer.step()

    monkeypatch.setattr(FlatBuffers, "flat", noted)
    job, build = job_of(nservers_per_group=2, grads=Grads(grads)), building()
    assert run_local(job, build, script, shared=True).same_bits(reference(job, build, script))
    assert used == {"params", *names.split()}


def test_gradients_without_edits_are_looked_at_bucket_by_bucket(monkeypatch):
    looks = []

    def counted(a, b):
        looks.append(a.numel())
        return same_bits(a, b)

    monkeypatch.setattr(mean_path, "same_bits", counted)

    def build(layers):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        return model, sgd(model)

    def script(t, edits=()):
        for _ in range(2):
            t.optimizer.zero_grad()
            t.backward(t.losses(lambda m, x: m(x).pow(2).mean(), torch.ones(6, 4)))
            norm = sum(p.grad.sum() for p in t.model.parameters())  # a look that changes nothing
            assert norm.isfinite()
            for index in edits:
                list(t.model.parameters())[index].grad.mul_(0.5)
            t.optimizer.step()

    counts = []
    for layers in (4, 20):
        looks.clear()
        run_local(job_of(), lambda n=layers: build(n), script)
        counts.append(len(looks))
    assert counts[0] == counts[1] > 0
    # An edit is found, and only where there is one are single parameters looked at.
    edited = run_local(job_of(), lambda: build(20), lambda t: script(t, (7,)))
    assert edited.distance(plain(lambda: build(20), lambda t: script(t, (7,)))) < 1e-5
    assert min(looks) == 4


def test_hidden_grad_is_the_workers_own():
    seen = {}

    def script(t):
        t.backward(t.losses(cross_entropy, *BATCH))
        seen[t.me.index] = t.model[0].weight.grad.clone()
        t.optimizer.step()

    run_local(job_of(grads=Grads.kHidden), building(), script)
    assert not torch.equal(seen[0], seen[1])


def test_grad_keeps_shape_strides_and_dtype():
    def build():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2)).to(
            memory_format=torch.channels_last
        )
        return model, sgd(model)

    def script(t):
        for _ in range(3):
            t.backward(t.losses(lambda m, x: m(x).pow(2).mean(), torch.ones(6, 3, 8, 8)))
            for p in t.model.parameters():
                assert (p.grad.shape, p.grad.stride(), p.grad.dtype) == (p.shape, p.stride(), p.dtype)
            t.optimizer.step()

    result = both(job_of(), build, script)
    assert result.workers[0].model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_a_private_backward_sends_nothing_and_leaves_the_workers_own_gradient():
    seen = {}

    def script(t):
        with t.local():
            t.backward(t.losses(cross_entropy, *BATCH))
        seen[t.me.index] = t.model[0].weight.grad.clone()
        t.optimizer.zero_grad()
        t.backward(t.losses(cross_entropy, *BATCH))
        t.optimizer.step()

    def without(t):
        t.losses(cross_entropy, *BATCH)
        t.backward(t.losses(cross_entropy, *BATCH))
        t.optimizer.step()

    for grads in Grads:
        job = job_of(grads=grads)
        assert run_local(job, building(), script).same_bits(reference(job, building(), without))
        assert not torch.equal(seen[0], seen[1])


# --- what autograd can do ----------------------------------------------------------------------------------------


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
    return nn.functional.cross_entropy(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), y)


@pytest.mark.parametrize("loss", [penalized, grad_of_parameters, checkpointed, retained, functional])
@pytest.mark.parametrize("grads", list(Grads))
def test_what_autograd_can_do_in_one_backward(loss, grads):
    def script(t):
        for batch in vectors(5):
            t.optimizer.zero_grad()
            t.backward(t.losses(loss, *batch))
            t.optimizer.step()

    job = job_of(grads=grads)
    result = run_local(job, building(), script)
    assert result.same_bits(reference(job, building(), script))
    if loss is not grad_of_parameters:  # a mean of norms is no norm of a mean
        assert result.distance(plain(building(), script)) < 1e-5


def test_autograd_grad_leaves_what_stands_in_grad():
    def script(t):
        t.backward(t.losses(cross_entropy, *BATCH))
        before = [p.grad.clone() for p in t.model.parameters()]
        torch.autograd.grad(cross_entropy(t.model, *BATCH), list(t.model.parameters()))
        assert all(torch.equal(p.grad, b) for p, b in zip(t.model.parameters(), before))
        t.backward(t.losses(cross_entropy, *BATCH))
        t.optimizer.step()

    both(job_of(), building(), script)
    both(job_of(grads=Grads.kHidden), building(), script)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_backward_with_create_graph():
    def script(t):
        for batch in vectors(3):
            t.optimizer.zero_grad()
            t.backward(t.losses(cross_entropy, *batch), create_graph=True)
            t.optimizer.step()
            t.optimizer.zero_grad()

    for grads in Grads:
        both(job_of(grads=grads), building(), script)


def test_backward_towards_some_inputs_only():
    def script(t):
        for batch in vectors(4):
            t.optimizer.zero_grad()
            t.backward(t.losses(cross_entropy, *batch), inputs=list(t.model[2].parameters()))
            assert t.model[0].weight.grad is None
            t.optimizer.step()

    for grads in Grads:
        both(job_of(grads=grads), building(), script)


def reentrant(inside, model, x, y):
    """A backward inside a backward; the outer one has gradients of its own unless both layers are inside."""
    x = x.clone().requires_grad_(True)
    if inside == "all":
        return nn.functional.cross_entropy(checkpoint(model, x, use_reentrant=True), y)
    hidden = checkpoint(model[0], x, use_reentrant=True) if inside == "first" else model[0](x)
    layer = model[2] if inside == "first" else lambda v: checkpoint(model[2], v, use_reentrant=True)
    return nn.functional.cross_entropy(layer(torch.tanh(hidden)), y)


def test_reentrant_checkpointing_is_an_error_that_names_the_remedy():
    def script(t):
        t.backward(t.losses(lambda *of: reentrant("first", *of), *BATCH))
        t.optimizer.step()

    with pytest.raises(RuntimeError, match=r"use_reentrant=False"):
        run_local(job_of(), building(), script)


@pytest.mark.parametrize(("grads", "inside"), [("kVisible", "all"), ("kVisible", "last"), ("kHidden", "first")])
def test_reentrant_checkpointing_that_does_no_harm_is_right(grads, inside):
    def script(t):
        for batch in vectors(4):
            t.optimizer.zero_grad()
            t.backward(t.losses(lambda *of: reentrant(inside, *of), *batch))
            t.optimizer.step()

    both(job_of(grads=Grads(grads)), building(), script)


def test_sparse_gradients_are_an_error_that_names_the_parameter():
    def build():
        model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def script(t):
        t.backward(t.losses(lambda m, x: m(x).pow(2).mean(), torch.arange(6)))

    with pytest.raises(RuntimeError, match=r"0\.weight has a sparse gradient"):
        run_local(job_of(), build, script)


# --- an exception in the middle ----------------------------------------------------------------------------------


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

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(12, 300), nn.Linear(300, 1000)
        self.blows = False

    def forward(self, x):
        return self.last(Fuse.apply(torch.tanh(self.first(x)), self))


def blown(t, batch):
    for model in getattr(t, "_replicas", [t.model]):
        model.blows = True
    try:
        t.backward(t.losses(cross_entropy, *batch))
    except ArithmeticError:
        pass
    else:
        raise AssertionError("nothing was raised")
    finally:
        for model in getattr(t, "_replicas", [t.model]):
            model.blows = False


@pytest.mark.parametrize("grads", list(Grads))
@pytest.mark.parametrize("before", [0, 1])
def test_after_an_exception_in_backward_the_next_batch_counts_and_nothing_else(grads, before):
    """All workers give the batch up (`except RuntimeError: continue`): nothing of it may be in the next step."""

    def script(t):
        for step, batch in enumerate(vectors(6)):
            t.optimizer.zero_grad()
            for _ in range(before):
                t.backward(t.losses(cross_entropy, *batch))
            if step % 2:
                blown(t, batch)
                t.optimizer.zero_grad()
                t.backward(t.losses(cross_entropy, *vectors(1, seed=9)[0]))
            t.backward(t.losses(cross_entropy, *batch))
            t.optimizer.step()

    both(job_of(grads=grads), building(Fused), script)


def test_a_failed_backward_may_be_the_steps_last():
    def script(t):
        for step, batch in enumerate(vectors(6)):
            t.optimizer.zero_grad()
            t.backward(t.losses(cross_entropy, *batch))
            if step % 2:
                kept = [p.grad.clone() for p in t.model.parameters()]
                blown(t, batch)
                for p, gradient in zip(t.model.parameters(), kept):
                    p.grad = gradient
            t.optimizer.step()

    both(job_of(), building(Fused), script)


def test_an_exception_on_one_worker_only_is_an_error_and_no_wrong_gradient():
    def script(t):
        if t.me.index == 1:
            blown(t, BATCH)
        t.optimizer.zero_grad()
        t.backward(t.losses(cross_entropy, *BATCH))
        t.optimizer.step()

    with pytest.raises(JobError, match=r"workers \d and \d .*disagree about how often gradients were dropped.*raised"):
        run_local(job_of(), building(Fused), script)


# --- pushes that replace one another -----------------------------------------------------------------------------


class Sent:
    """Stands for the exchange of gradients: writes down what is pushed."""

    windowed = False

    def settle(self):
        pass

    def __init__(self):
        self.pushes = []
        self.model = self.values = self

    def push(self, step, ordinal, bucket, weight, present, body, fresh):
        self.pushes.append((step, ordinal, bucket.id, present, body.clone()))

    def take(self):
        pushes, self.pushes = self.pushes, []
        return pushes


def path_of(model, compare=True, eager=True, bucket_bytes=1 << 20):
    parts = describe_model(model)
    slice_map = cut(parts.parameters, 1, bucket_bytes=bucket_bytes)
    flats = FlatBuffers(slice_map, None, PrivateMemory())
    sent = Sent()
    path = PushPath(ModelBuffers(parts, slice_map, flats), sent, StepBatches(), compare, eager)
    return path, sent, slice_map


def backward(model, scale=1.0):
    (cross_entropy(model, *BATCH) * scale).backward()


def test_a_bucket_leaves_during_the_backward_that_fills_it():
    model = mlp()
    path, sent, slice_map = path_of(model, bucket_bytes=256)
    order = []
    model[2].weight.register_post_accumulate_grad_hook(lambda p: order.append(len(sent.pushes)))
    backward(model)
    assert 0 < order[0] < len(sent.pushes) == len(slice_map.buckets)
    revisions, edited, dropped = path.at_step(0)
    assert sent.pushes[len(slice_map.buckets) :] == [] and edited == dropped == 0
    assert NO_REVISION not in revisions


def test_the_number_of_backwards_is_learned():
    model = mlp()
    path, sent, _ = path_of(model)
    counts = []
    for _ in range(3):
        for _ in range(2):
            backward(model)
            counts.append(len(sent.take()))
        path.at_step(0)
        counts.append(len(sent.take()))
        path.after_step()
        model.zero_grad()
    # a wrong guess is pushed again at the step; from then on only the last backward pushes
    assert counts == [1, 0, 1, 0, 1, 0, 0, 1, 0]


def test_what_is_pushed_again_replaces_it_and_has_a_higher_revision():
    model = mlp()
    path, sent, _slice_map = path_of(model)
    backward(model)
    model[0].weight.grad.mul_(2)
    (revision,), _, _ = path.at_step(0)
    first, second = sent.take()
    assert first[1] < second[1] == revision
    expected = model[0].weight.grad.view(-1)
    assert torch.equal(second[4][: expected.numel()], expected)


def test_an_edit_back_and_forth_is_not_sent():
    model = mlp()
    path, sent, _ = path_of(model)
    backward(model)
    sent.take()
    model[0].weight.grad.mul_(2).mul_(0.5)
    path.at_step(0)
    assert sent.take() == []


def test_a_replaced_gradient_is_an_error_also_if_the_new_one_has_the_id_of_the_old():
    model = nn.Linear(3, 2, bias=False)
    path, _sent, _ = path_of(model, compare=False, eager=False)
    model(torch.ones(1, 3)).sum().backward()
    number = id(model.weight.grad)
    model.weight.grad = None
    others = [torch.ones(2, 3) for _ in range(100)]  # one of them is where the old one was
    model.weight.grad = next(other for other in others if id(other) == number)
    with pytest.raises(RuntimeError, match="the gradient of weight was changed"):
        path.at_step(0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize(("value", "edit", "sent"), [(float("nan"), None, 0), (0.0, -0.0, 1)])
def test_an_edit_is_one_of_bits(dtype, value, edit, sent):
    model = nn.Linear(3, 2, bias=False, dtype=dtype)
    path, pushes, _ = path_of(model)
    (model(torch.ones(1, 3, dtype=dtype)).real.sum() * 0 + model.weight.real.sum() * value).backward()
    pushes.take()
    if edit is not None:
        model.weight.grad = torch.full_like(model.weight, edit)
    path.at_step(0)
    assert len(pushes.take()) == sent


def test_without_a_gradient_a_bucket_has_no_revision():
    model = mlp()
    path, _sent, _slice_map = path_of(model)
    backward(model)
    model.zero_grad()
    revisions, _, _ = path.at_step(0)
    assert revisions == (NO_REVISION,)


def test_revisions_rise_per_bucket_also_in_models_of_many_buckets():
    model = nn.Linear(64, 300, bias=False)
    path, sent, slice_map = path_of(model, bucket_bytes=256)
    assert len(slice_map.buckets) == 300
    model(torch.ones(1, 64)).sum().backward()
    model.weight.grad.mul_(2)
    revisions, _, _ = path.at_step(0)
    last = {bucket: ordinal for _, ordinal, bucket, _, _ in sent.pushes}
    for _, ordinal, bucket, _, _ in sent.pushes[:300]:
        assert ordinal < last[bucket] == revisions[bucket] < NO_REVISION


def test_after_many_backwards_that_raised_the_last_gradient_still_counts():
    model = Fused()
    path, sent, slice_map = path_of(model, bucket_bytes=4096)
    model.blows = True
    for _ in range(300):
        with pytest.raises(ArithmeticError):
            backward(model)
    model.blows = False
    model.zero_grad()
    backward(model)
    revisions, _, _ = path.at_step(0)
    by_bucket = {b.id: [push for push in sent.pushes if push[2] == b.id] for b in slice_map.buckets}
    assert max(map(len, by_bucket.values())) == NO_REVISION - 1
    for number, pushes in by_bucket.items():
        ordinals = [push[1] for push in pushes]
        assert ordinals == sorted(set(ordinals)) and ordinals[-1] == revisions[number] < NO_REVISION
    for bucket in slice_map.buckets:
        for piece in bucket.pieces:
            segment = slice_map.segments[piece.segment]
            gradient = list(model.parameters())[segment.parameter].grad.view(-1)
            at = segment.start + piece.lo - segment.lo
            body = by_bucket[bucket.id][-1][4][bucket.place(piece)]
            assert torch.equal(body, gradient[at : at + piece.hi - piece.lo])


def test_a_lazy_path_pushes_only_at_the_step():
    model = mlp()
    path, sent, _ = path_of(model, eager=False)
    for _ in range(2):
        backward(model)
        assert sent.take() == []
        path.at_step(0)
        assert len(sent.take()) == 1
        path.after_step()
        model.zero_grad()


def test_a_tied_weight_is_sent_once_per_backward():
    model = Transformer()
    _path, sent, _ = path_of(model)
    words = torch.arange(12).view(2, 6)
    cross_entropy(model, words, words).backward()
    (push,) = sent.take()
    assert torch.equal(push[4][: model.embed.weight.numel()], model.embed.weight.grad.view(-1))
