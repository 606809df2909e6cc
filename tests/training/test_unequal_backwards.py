"""Workers of a group that make different numbers of backwards in a step: what counts, and what is refused."""

import pytest
import torch
from in_process_job import building, cross_entropy, job_of, plain, run_local, vectors

from topotrain.config.job import Apply, Grads, Pull
from topotrain.core.client.client import JobError
from topotrain.training.data.data_client import DataClient


def without_a_backward(t, seen=None):
    """The last of three workers counts with weight 0, and needs no backward."""
    last = hasattr(t, "me") and t.me.index == 2
    for batch in vectors(4):
        whole = batch if hasattr(t, "me") else [each[:8] for each in batch]
        t.optimizer.zero_grad()
        losses = t.losses(cross_entropy, *whole, weight=lambda x, y: 0.0 if last else float(len(x)))
        if not last:
            t.backward(losses)
        t.optimizer.step()
        if seen is not None:
            seen.setdefault(t.me.index, []).append(t.model[0].weight.grad.clone())


def test_the_gradient_is_the_mean_on_the_worker_without_a_backward():
    seen = {}
    run_local(job_of(), building(), lambda t: without_a_backward(t, seen))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*(seen[index] for index in range(3))))


@pytest.mark.parametrize("shared", [False, True])
def test_an_applied_gradient_needs_no_backward_of_a_share_without_weight(shared):
    job = job_of(grads=Grads.kHidden, apply=Apply.kOnArrival)
    found = run_local(job, building(), without_a_backward, shared)
    assert found.distance(plain(building(), without_a_backward)) < 1e-5


def test_lazy_pulls_refuse_a_late_backward():
    with pytest.raises((RuntimeError, JobError), match="pull: kStep"):
        run_local(job_of(pull=Pull.kLazy), building(), without_a_backward)


@pytest.mark.parametrize(("grads", "shared"), [(Grads.kVisible, False), (Grads.kHidden, True)])
def test_a_share_that_counts_and_has_no_backward_is_refused(grads, shared):
    def script(t):
        for step, batch in enumerate(vectors(3)):
            t.optimizer.zero_grad()
            losses = t.losses(cross_entropy, *batch)
            if step != 1 or t.me.index != 2:
                t.backward(losses)
            t.optimizer.step()

    with pytest.raises(JobError, match=r"different batches into step 2: .*tt\.weight\(0\)"):
        run_local(job_of(grads=grads), building(), script, shared)


def test_a_worker_that_waits_for_a_draw_of_one_that_waits_for_it_in_a_step_is_named():
    def script(t):
        data = t.worker.client.extension(DataClient)
        if t.me.index == 0:
            data.put_draw(0, 0, ((12,), tuple(range(12)), True))
        else:
            data.get_draw(0, 0)
        losses = t.losses(cross_entropy, *vectors(1)[0])
        if t.me.index == 2:
            data.get_draw(1, 0)
        t.backward(losses)
        t.optimizer.step()

    with pytest.raises(JobError, match="worker 2 of the group is at the end of its batches"):
        run_local(job_of(), building(), script)


@pytest.mark.parametrize(
    ("grads", "accumulated", "shared"),
    [(Grads.kVisible, 1, True), (Grads.kVisible, 2, False), (Grads.kHidden, 1, False), (Grads.kHidden, 2, True)],
)
def test_a_batch_that_one_worker_leaves_out_is_refused_with_both_workers_batches(grads, accumulated, shared):
    def script(t):
        for step, batch in enumerate(vectors(6)):
            losses = t.losses(cross_entropy, *batch)
            if step == 2 and t.me.index == 1:
                continue
            t.backward(losses)
            if step % accumulated == accumulated - 1:
                t.optimizer.step()
                t.optimizer.zero_grad()

    with pytest.raises(JobError, match=r"take different batches into step \d: worker .* after batch.*\(a `continue`"):
        run_local(job_of(grads=grads), building(), script, shared)
