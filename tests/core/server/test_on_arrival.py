"""Updates on arrival: the same values as at the step, and a clear error for whatever would have to be taken back."""

import pytest
import torch
from in_process_job import (
    Cnn,
    Transformer,
    adam,
    building,
    cross_entropy,
    images,
    job_of,
    mlp,
    plain,
    reference,
    run_local,
    sgd,
    tokens,
    vectors,
)

from topotrain.config.job import Apply, Grads

ON_ARRIVAL = {"apply": Apply.kOnArrival, "grads": Grads.kHidden}
MODELS = {"mlp": (mlp, vectors, sgd), "cnn": (Cnn, images, adam), "transformer": (Transformer, tokens, sgd)}


@pytest.mark.parametrize("shared", [False, True], ids=["sent", "shown"])
@pytest.mark.parametrize(("model", "layout"), [("cnn", "allreduce"), ("transformer", "two by two"), ("mlp", "one")])
def test_the_values_are_those_of_the_step(model, layout, shared):
    """A rate that changes between two steps counts from the next backward on."""

    def script(trainer):
        for batch in batches(8):
            trainer.optimizer.zero_grad()
            trainer.backward(trainer.losses(cross_entropy, *batch))
            trainer.optimizer.step()
            trainer.optimizer.param_groups[0]["lr"] *= 0.7

    make, batches, optimizer = MODELS[model]
    job, build = job_of(layout, **ON_ARRIVAL), building(make, optimizer)
    assert run_local(job, build, script, shared).same_bits(reference(job, build, script))


@pytest.mark.parametrize("layout", [{}, {"nserver_groups": 2}], ids=["downpour", "hogwild"])
@pytest.mark.parametrize("shared", [False, True], ids=["sent", "shown"])
def test_asynchronous_groups_apply_every_gradient_once(layout, shared):
    """Each step adds 1 to every element: whoever comes when, the sum is the number of steps."""
    job = job_of("one", nworker_groups=2, reduce="kSum", **layout, **ON_ARRIVAL)

    def build():
        model = torch.nn.Linear(70, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    def script(trainer):
        for _ in range(6):
            losses = trainer.losses(lambda model, x: -model(x).sum(), torch.ones(1, 70))
            trainer.backward(losses)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()

    assert torch.equal(run_local(job, build, script, shared).values["weight"], torch.full((1, 70), 12.0))


def loop(*, before_step=lambda trainer: None, backwards=1, skips=-1):
    def script(trainer):
        for number, batch in enumerate(vectors(3)):
            for _ in range(backwards):
                trainer.backward(trainer.losses(cross_entropy, *batch))
            before_step(trainer)
            if number != skips:
                trainer.optimizer.step()
            trainer.optimizer.zero_grad()

    return script


def halve_gradients(trainer):
    for parameter in trainer.model.parameters():
        parameter.grad.mul_(0.5)


def drop_gradients(trainer):
    trainer.optimizer.zero_grad()


def change_rate(trainer):
    trainer.optimizer.param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (loop(backwards=2), "exactly one backward"),
        (loop(skips=1), "second backward"),
        (loop(before_step=halve_gradients), "not what backward"),
        (loop(before_step=drop_gradients), "not what backward"),
        (loop(before_step=change_rate), "changed between backward"),
        (loop(before_step=lambda trainer: trainer.worker.clip(1.0, 2.0)), "norm is known at step"),
    ],
)
def test_what_would_have_to_be_taken_back_is_an_error(script, words):
    with pytest.raises(RuntimeError, match=words):
        run_local(job_of(**ON_ARRIVAL), building(), script)


def test_some_parameters_without_a_gradient_are_not_updated():
    def script(trainer):
        for number, batch in enumerate(vectors(4)):
            for parameter in trainer.model[2].parameters():
                parameter.requires_grad_(number % 2 == 0)
            trainer.backward(trainer.losses(cross_entropy, *batch))
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()

    job, build = job_of("allreduce", **ON_ARRIVAL), building(mlp, adam)
    expected = plain(build, script)
    assert run_local(job, build, script).distance(expected) < 1e-5
    assert run_local(job, build, script, shared=True).distance(expected) < 1e-5
