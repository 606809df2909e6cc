"""What the hooks send, and what the script finds in `.grad`."""

import pytest
import torch
from in_process_job import (
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
from training_loops import Fused, blown

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


# --- what stands in .grad ----------------------------------------------------------------------------------------


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

    def job(layers, edits=()):
        def build():
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
            return model, sgd(model)

        def script(t):
            for _ in range(2):
                t.optimizer.zero_grad()
                t.backward(t.losses(lambda m, x: m(x).pow(2).mean(), torch.ones(6, 4)))
                assert sum(p.grad.sum() for p in t.model.parameters()).isfinite()  # a look that changes nothing
                for index in edits:
                    list(t.model.parameters())[index].grad.mul_(0.5)
                t.optimizer.step()

        looks.clear()
        assert run_local(job_of(), build, script).distance(plain(build, script)) < 1e-5
        return [*looks]

    assert len(job(4)) == len(job(20)) > 0
    # Only where there is an edit are single parameters looked at.
    assert min(job(20, (7,))) == 4


def test_a_private_backward_sends_nothing_and_leaves_the_workers_own_gradient():
    seen, hidden = {}, {}

    def script(t):
        with t.local():
            t.backward(t.losses(cross_entropy, *BATCH))
        seen[t.me.index] = t.model[0].weight.grad.clone()
        t.optimizer.zero_grad()
        t.backward(t.losses(cross_entropy, *BATCH))
        hidden[t.me.index] = t.model[0].weight.grad.clone()
        t.optimizer.step()

    def without(t):
        t.losses(cross_entropy, *BATCH)
        t.backward(t.losses(cross_entropy, *BATCH))
        t.optimizer.step()

    for grads in Grads:
        job = job_of(grads=grads)
        assert run_local(job, building(), script).same_bits(reference(job, building(), without))
        assert not torch.equal(seen[0], seen[1])
    # Hidden, `.grad` is the worker's own without it, too.
    assert not torch.equal(hidden[0], hidden[1])


# --- what autograd can do ----------------------------------------------------------------------------------------


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


def test_a_hook_and_autograd_grad_of_its_parameter_are_refused():
    def build():
        model, optimizer = building()()
        model[0].weight.register_hook(lambda g: g * 2)
        return model, optimizer

    def script(t):
        torch.autograd.grad(t.losses(cross_entropy, *BATCH), list(t.model.parameters()))

    with pytest.raises(RuntimeError, match=r"parameter 0\.weight has a hook .*autograd\.grad"):
        run_local(job_of(), build, script)


def test_sparse_gradients_are_an_error_that_names_the_parameter():
    def build():
        model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def script(t):
        t.backward(t.losses(lambda m, x: m(x).pow(2).mean(), torch.arange(6)))

    with pytest.raises(RuntimeError, match=r"0\.weight has a sparse gradient"):
        run_local(job_of(), build, script)


# --- an exception in the middle ----------------------------------------------------------------------------------


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


def test_what_is_pushed_again_replaces_it_and_an_edit_back_and_forth_is_not_sent():
    model = mlp()
    path, sent, _slice_map = path_of(model)
    backward(model)
    (first,) = sent.take()
    model[0].weight.grad.mul_(2).mul_(0.5)
    path.at_step(0)
    assert sent.take() == []
    model[0].weight.grad.mul_(2)
    (revision,), _, _ = path.at_step(0)
    (second,) = sent.take()
    assert first[1] < second[1] == revision
    expected = model[0].weight.grad.view(-1)
    assert torch.equal(second[4][: expected.numel()], expected)
    # Without a gradient a bucket has no revision.
    model.zero_grad()
    assert path.at_step(0)[0] == (NO_REVISION,)


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


def test_after_many_backwards_that_raised_the_last_gradient_still_counts():
    model = Fused(40, 20)
    path, sent, slice_map = path_of(model, bucket_bytes=512)
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
