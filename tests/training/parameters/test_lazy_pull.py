"""`pull: kLazy`: the same values, waited for by whoever needs them first; clear errors where it cannot work."""

import pytest
from in_process_job import (
    Cnn,
    adam,
    building,
    cross_entropy,
    images,
    job_of,
    mlp,
    reference,
    run_local,
    sgd,
    usual_loop,
    vectors,
)
from pairwise import pairwise

from topotrain.config.job import Apply, Grads, Pull

LAZY = {"pull": Pull.kLazy}
HIDDEN = {"grads": Grads.kHidden}
ON_ARRIVAL = {"apply": Apply.kOnArrival, "grads": Grads.kHidden}
PLACES = [("mlp", "sandblaster"), ("cnn", "allreduce"), ("mlp", "one")]
MODELS = {"mlp": (mlp, vectors, sgd), "cnn": (Cnn, images, adam)}


@pytest.mark.parametrize(
    ("model", "layout", "more", "shared"),
    [(*place, more, shared) for place, more, shared in pairwise(PLACES, [{}, HIDDEN, ON_ARRIVAL], [False, True])],
)
def test_the_values_are_those_of_the_step(model, layout, more, shared):
    make, batches, optimizer = MODELS[model]
    job, build, script = job_of(layout, **LAZY, **more), building(make, optimizer), usual_loop(batches(6))
    assert run_local(job, build, script, shared).same_bits(reference(job, build, script))


def test_a_gradient_that_is_written_over_too_early_is_an_error():
    def script(trainer):
        for batch in vectors(3):
            trainer.backward(trainer.losses(cross_entropy, *batch))
            trainer.optimizer.step()
            trainer.optimizer.zero_grad(set_to_none=False)

    with pytest.raises(RuntimeError, match="changed after step"):
        run_local(job_of(**LAZY), building(), script)
