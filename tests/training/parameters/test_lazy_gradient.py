"""Means that stay at the servers until the script reads `.grad`."""

import copy
import io

import pytest
import torch
from in_process_job import building, cross_entropy, job_of, reference, run_local, vectors
from torch import nn

from topotrain.config.job import Compression, Grads
from topotrain.training.gradients.lazy_gradient import LazyGradient

BATCHES = vectors(6)


def train(t, look=lambda t: None, after=lambda t: None, clear=lambda t: t.optimizer.zero_grad()):
    for batch in BATCHES:
        clear(t)
        t.backward(t.losses(cross_entropy, *batch))
        look(t)
        t.optimizer.step()
        after(t)


def grads(t):
    return [p.grad for p in t.model.parameters()]


def wide():
    return nn.Sequential(nn.Linear(12, 4000), nn.Tanh(), nn.Linear(4000, 5))


def means_sent(script):
    """How often the means travel to all workers, more than where gradients are hidden."""
    build, model = building(wide), sum(p.numel() * 4 for p in wide().parameters())
    hidden = run_local(job_of(grads=Grads.kHidden), build, train).traffic[0]
    return (run_local(job_of(), build, script).traffic[0] - hidden) / (3 * model)


def saved(gradient):
    file = io.BytesIO()
    torch.save(gradient, file)
    file.seek(0)
    return torch.load(file)


def through_dispatch(gradient):
    with torch._C.DisableTorchFunctionSubclass():
        return gradient * 2


USES = {
    "item": lambda g: g.flatten()[1].item(),
    "numpy": lambda g: g.numpy().copy(),
    "from_dlpack": lambda g: torch.from_dlpack(g).clone(),
    "memory": lambda g: bytes(g.untyped_storage()[:8]),
    "text": str,
    "copy": copy.deepcopy,
    "saved": saved,
    "norm": lambda g: torch.linalg.vector_norm(g),
    "foreach": lambda g: torch._foreach_norm([g, g]),
    "out": lambda g: torch.add(g, 1, out=torch.empty(0)),
    "keyword": lambda g: torch.mul(input=g, other=3),
    "in place": lambda g: g.mul_(2).clone(),
    "dispatch": through_dispatch,
    "flat": lambda g: nn.utils.parameters_to_vector([g]),
    "iteration": lambda g: [row.sum() for row in g],
}


def test_any_use_is_one_of_the_mean():
    seen = []

    def script(t):
        found = []
        for use in USES.values():
            for reads in (True, False):  # a script that reads in each step gets all means at once
                t.optimizer.zero_grad()
                t.backward(t.losses(cross_entropy, *BATCHES[0]))
                gradient = grads(t)[0]
                if reads:
                    found.append((isinstance(gradient, LazyGradient), use(gradient)))
                t.optimizer.step()
        seen.append(found)

    run_local(job_of(), building(), script)
    reference(job_of(), building(), script)
    *jobs, alone = seen
    assert all(lazy for found in jobs for lazy, _ in found) and not alone[0][0]
    for found in jobs:
        for (_, value), (_, expected), name in zip(found, alone, USES, strict=True):
            if isinstance(value, str | bytes):
                assert value == expected, name
            else:
                torch.testing.assert_close(value, expected, rtol=0, atol=0, msg=name)


def test_what_describes_a_gradient_brings_none():
    def look(t):
        for p in t.model.parameters():
            g = p.grad
            assert (g.shape, g.dtype, g.device, g.stride(), len(g)) == (p.shape, p.dtype, p.device, p.stride(), len(p))
            assert (g.numel(), g.is_sparse, g.grad_fn, g.requires_grad) == (p.numel(), False, None, False)

    assert means_sent(lambda t: train(t, look)) == pytest.approx(0, abs=0.05)


def test_means_travel_when_they_are_read_and_at_once_for_a_script_that_always_does():
    kinds = []

    def look(t):
        kinds.append(isinstance(grads(t)[1], LazyGradient))
        grads(t)[1].sum()

    assert means_sent(lambda t: train(t, look)) == pytest.approx(len(BATCHES), abs=0.05)
    assert kinds.count(True) == kinds.count(False) == 3 * 3


def test_one_worker_may_read_and_the_others_need_not():
    readers = []

    def look(t):
        readers.append(t)
        if t is readers[0]:
            assert grads(t)[0].isfinite().all()

    found = run_local(job_of(), building(), lambda t: train(t, look))
    assert found.distance(run_local(job_of(), building(), train)) == 0


def test_encoded_means_are_read_as_they_were_added():
    job = job_of(compression=Compression.kFp16)
    read = run_local(job, building(), lambda t: train(t, lambda t: grads(t)[0].sum()))
    assert read.distance(run_local(job, building(), train)) == 0


def test_a_gradient_of_a_job_that_is_over_is_refused_by_name():
    kept = []

    def script(t):
        t.backward(t.losses(cross_entropy, *BATCHES[0]))
        kept.append(grads(t)[2])

    run_local(job_of(), building(), script)
    with pytest.raises(RuntimeError, match=r"the gradient of 2.weight is at the servers of a job that is over"):
        kept[-1].sum()
