"""Workers of a group that make different numbers of backwards in a step."""

from functools import partial

import in_process_job
import pytest
import torch
from in_process_job import building, job_of, plain, run_local, vectors
from torch import nn

from topotrain.config.job import Apply, Grads, Pull
from topotrain.core.client.client import JobError
from topotrain.training.data.data_client import DataClient


@pytest.fixture(autouse=True, params=[False, True], ids=["sent", "shown"])
def _memory(request, monkeypatch):
    """Every job here runs twice: all that it needs travels, and residents see each other's memory."""
    monkeypatch.setitem(globals(), "run_local", partial(in_process_job.run_local, shared=request.param))


def targets(n=6, batch=12):
    """Batches of which some shares of three workers have no target, the second batch's first and the fifth's last."""
    found = []
    for step, (x, y) in enumerate(vectors(n)):
        has = torch.ones(len(x))
        has[: 4 if step == 1 else 0] = 0
        has[8 if step == 4 else len(x) :] = 0
        has[5] = 0
        found.append((x[:batch], y[:batch], has[:batch]))
    return found


def masked(model, x, y, has):
    each = nn.functional.cross_entropy(model(x), y, reduction="none")
    return each.mul(has).sum() / has.sum()


def counted(x, y, has):
    return float(has.sum())


def clipped(t, finish=lambda t: t.optimizer.step()):
    """A loop that leaves out the backward where a share has no target."""
    for batch in targets():
        t.optimizer.zero_grad()
        losses = t.losses(masked, *batch, weight=counted)
        if all(bool(loss.isfinite()) for loss in losses):
            t.backward(losses)
        finish(t)


def clip_and_step(t):
    nn.utils.clip_grad_norm_(t.model.parameters(), 0.05)
    t.optimizer.step()


@pytest.mark.parametrize("layout", ["sandblaster", "allreduce", "two by two"])
@pytest.mark.parametrize("finish", [lambda t: t.optimizer.step(), clip_and_step], ids=["plain", "clipped"])
def test_a_worker_without_a_target_counts_with_weight_0_and_needs_no_backward(layout, finish):
    result = run_local(job_of(layout), building(), partial(clipped, finish=finish))
    assert result.distance(plain(building(), partial(clipped, finish=finish))) < 1e-5
    first, *others = (list(handle.model.parameters()) for handle in result.workers)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other))


def test_the_gradient_is_the_mean_on_the_worker_without_a_backward():
    seen = {}

    def script(t):
        clipped(
            t, lambda t: (t.optimizer.step(), seen.setdefault(t.me.index, []).append(t.model[0].weight.grad.clone()))
        )

    run_local(job_of(), building(), script)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*(seen[index] for index in range(3))))


def test_hidden_gradients_need_no_backward_either():
    result = run_local(job_of(grads=Grads.kHidden), building(), clipped)
    assert result.distance(plain(building(), clipped)) < 1e-5


def test_an_applied_gradient_needs_no_backward_of_a_share_without_weight():
    job = job_of(grads=Grads.kHidden, apply=Apply.kOnArrival)
    assert run_local(job, building(), clipped).distance(plain(building(), clipped)) < 1e-5


@pytest.mark.parametrize("grads", list(Grads))
def test_microbatches_of_a_fixed_size(grads):
    """Shares of 5 and 4 samples are three and two microbatches of 2."""

    def loss(lo, whole, model, x, y):
        each = nn.functional.cross_entropy(model(x[lo : lo + 2]), y[lo : lo + 2], reduction="sum")
        return each / (len(x) if whole else 1)

    def script(t):
        for x, y in vectors(6):
            x, y = x[:14], y[:14]
            t.optimizer.zero_grad()
            (share,) = t.losses(lambda model, a, b: (a, b), x, y)
            for lo in range(0, len(share[0]), 2):
                each = nn.functional.cross_entropy(
                    t.model(share[0][lo : lo + 2]), share[1][lo : lo + 2], reduction="sum"
                )
                t.backward([each / len(share[0])])
            t.optimizer.step()

    assert run_local(job_of(grads=grads), building(), script).distance(plain(building(), script)) < 1e-5


@pytest.mark.parametrize("grads", list(Grads))
def test_a_share_that_counts_and_has_no_backward_is_refused(grads):
    def script(t):
        for step, batch in enumerate(vectors(3)):
            t.optimizer.zero_grad()
            losses = t.losses(lambda model, x, y: nn.functional.cross_entropy(model(x), y), *batch)
            if step != 1 or t.me.index != 2:
                t.backward(losses)
            t.optimizer.step()

    with pytest.raises(JobError, match=r"different batches into step 2: .*tt\.weight\(0\)"):
        run_local(job_of(grads=grads), building(), script)


def test_a_worker_that_waits_for_a_draw_of_one_that_waits_for_it_in_a_step_is_named():
    def script(t):
        data = t.worker.client.extension(DataClient)
        if t.me.index == 0:
            data.put_draw(0, 0, ((12,), tuple(range(12)), True))
        else:
            data.get_draw(0, 0)
        losses = t.losses(lambda model, x, y: nn.functional.cross_entropy(model(x), y), *vectors(1)[0])
        if t.me.index == 2:
            data.get_draw(1, 0)
        t.backward(losses)
        t.optimizer.step()

    with pytest.raises(JobError, match="worker 2 of the group is at the end of its batches"):
        run_local(job_of(), building(), script)


@pytest.mark.parametrize("grads", list(Grads))
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_batch_that_one_worker_leaves_out_is_refused_with_both_workers_batches(grads, accumulated):
    def script(t):
        for step, batch in enumerate(vectors(6)):
            losses = t.losses(lambda model, x, y: nn.functional.cross_entropy(model(x), y), *batch)
            if step == 2 and t.me.index == 1:
                continue
            t.backward(losses)
            if step % accumulated == accumulated - 1:
                t.optimizer.step()
                t.optimizer.zero_grad()

    with pytest.raises(JobError, match=r"take different batches into step \d: worker .* after batch.*\(a `continue`"):
        run_local(job_of(grads=grads), building(), script)


def test_lazy_pulls_refuse_a_late_backward():
    if run_local.keywords["shared"]:
        pytest.skip("kLazy sends values")
    with pytest.raises((RuntimeError, JobError), match="pull: kStep"):
        run_local(job_of(pull=Pull.kLazy), building(), clipped)
