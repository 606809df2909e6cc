"""Scripts that change parameters between steps: jobs compute what the plain script computes."""

import copy
import re
from contextlib import nullcontext, suppress
from itertools import cycle
from pathlib import Path

import pytest
import torch
from in_process_job import (
    Cnn,
    Transformer,
    WorkerHandle,
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
    vectors,
)
from pairwise import pairwise
from torch import nn

import topotrain.training.parameters.flat_parameters
from topotrain.config.job import Apply, ConfigError, Grads, Pull
from topotrain.core.client.client import JobError
from topotrain.extensions.assignment.assignment_scope import AssignmentScope
from topotrain.extensions.assignment.script_place import ScriptPlace
from topotrain.training.parameters.device_copy import ImmediateCopier
from topotrain.training.parameters.device_parameters import DeviceParameters


def assigning(t, parameters=()):
    """`tt.assign`, which knows of only one worker per process."""
    if not isinstance(t, WorkerHandle):
        return nullcontext()
    scope = t.notes.get("scope")
    if scope is None:
        apart = t.topology.worker_groups > 1
        scope = t.notes["scope"] = AssignmentScope(t.worker, ScriptPlace(None, t.worker), apart)
        t.worker.attach(scope)
    return scope.change(list(parameters) or list(t.model.parameters()))


def a_step(t, batch, loss=cross_entropy):
    t.optimizer.zero_grad()
    t.backward(t.losses(loss, *batch))
    t.optimizer.step()


def clamp_each_step(t):
    """As the critic of a WGAN."""
    for batch in vectors(8):
        a_step(t, batch)
        with assigning(t), torch.no_grad():
            for p in t.model.parameters():
                p.clamp_(-0.2, 0.2)
    bound = max(float(p.detach().abs().max()) for p in t.model.parameters())
    assert bound == torch.tensor(0.2).item()


def average_loaded_back(t):
    """An exponential moving average of the weights, loaded at the end of each "epoch"."""
    average = {name: value.clone() for name, value in t.model.state_dict().items()}
    for number, batch in enumerate(vectors(9)):
        a_step(t, batch)
        for name, value in t.model.state_dict().items():
            average[name].lerp_(value, 0.3)
        if number % 3 == 2:
            with assigning(t):
                t.model.load_state_dict(average)


def initialised_anew(t):
    for number, batch in enumerate(vectors(8)):
        if number == 4:
            # A generator of its own: the workers of these jobs are threads of one process.
            dice = torch.Generator().manual_seed(7)
            with assigning(t, t.model[2].parameters()):
                nn.init.xavier_uniform_(t.model[2].weight, generator=dice)
                nn.init.zeros_(t.model[2].bias)
        a_step(t, batch)


def nothing_changed(t):
    for batch in vectors(4):
        a_step(t, batch)
        with assigning(t):
            pass


def several_in_a_row(t):
    with assigning(t), torch.no_grad():
        t.model[0].weight.mul_(0.5)
    with assigning(t), torch.no_grad():
        t.model[0].bias.fill_(-0.0)
        t.model[0].weight.mul_(3)
    for batch in vectors(4):
        a_step(t, batch)


def changed_while_gradients_add_up(t):
    """Gradients that the script has not cleared stay."""
    for number, batch in enumerate(vectors(6)):
        t.backward(t.losses(cross_entropy, *batch))
        t.optimizer.step()
        if number % 2:
            with assigning(t), torch.no_grad():
                t.model[2].weight.clamp_(-0.1, 0.1)


SCRIPTS = [
    clamp_each_step,
    average_loaded_back,
    initialised_anew,
    nothing_changed,
    several_in_a_row,
    changed_while_gradients_add_up,
]
TWO_BY_TWO = {"nworkers_per_group": 2, "nservers_per_group": 2}


@pytest.mark.parametrize(
    ("script", "layout", "shared"),
    pairwise(SCRIPTS, ["allreduce", "in-memory"], [False, True]),
)
def test_a_synchronous_job_equals_the_reference_and_the_plain_script(script, layout, shared):
    job, build = job_of(layout), building(mlp, adam if layout == "allreduce" else sgd)
    result = run_local(job, build, script, shared)
    assert result.same_bits(reference(job, build, script))
    assert result.distance(plain(build, script)) < 1e-6
    # The optimizers of the servers have taken no step for an assignment, and the workers have counted none.
    steps = {server.steps._steps_of[0] for server in result.servers}
    assert steps == {result.workers[0].worker.tally.steps}


@pytest.mark.parametrize(
    "changes",
    [
        {"grads": Grads.kHidden},
        {"pull": Pull.kLazy},
        {"max_staleness": 0},
        {"algorithm": "kRing", "nservers_per_group": 3},
        {"algorithm": "kTree", "nservers_per_group": 3, "grads": Grads.kHidden},
    ],
    ids=str,
)
def test_other_synchronous_settings_have_the_bits_of_the_reference(changes):
    separate = "algorithm" in changes
    job = job_of("allreduce" if separate else "sandblaster", **changes)
    result = run_local(job, building(), clamp_each_step)
    if separate:  # sums in an order of their own
        assert result.distance(reference(job, building(), clamp_each_step)) < 1e-6
    else:
        assert result.same_bits(reference(job, building(), clamp_each_step))


def test_values_are_exact_where_the_pulls_are_compressed():
    run_local(job_of(compression="kInt8"), building(), clamp_each_step)


def test_over_the_transport_of_real_processes(tmp_path: Path):
    job = job_of("sandblaster", **TWO_BY_TWO, transport="kTcp")
    result = run_hosted(job, building(), clamp_each_step, tmp_path)
    assert result.same_bits(reference(job, building(), clamp_each_step))


def test_buffers_and_tied_weights_are_loaded_too():
    def script(t):
        batches = images(4)
        before = copy.deepcopy(t.model.state_dict())
        for batch in batches:
            a_step(t, batch)
        with assigning(t):
            t.model.load_state_dict(before)
        # A buffer is this worker's own, and loaded here.
        assert torch.equal(t.model.norm.running_mean, before["norm.running_mean"])
        for batch in batches:
            a_step(t, batch)

    job = job_of()
    assert run_local(job, building(Cnn), script).same_bits(reference(job, building(Cnn), script))

    def tied(t):
        for batch in tokens(4):
            a_step(t, batch)
            with assigning(t), torch.no_grad():
                t.model.out.weight.mul_(0.9)

    build = building(Transformer, adam)
    assert run_local(job, build, tied).same_bits(reference(job, build, tied))


def test_parameters_on_a_device_keep_their_memory(monkeypatch):
    """The CPU in the role of a device: its parameters are copies of what the servers see."""

    def mirror(tensors, views, apart):
        return DeviceParameters(tensors, views, {tensor.device: ImmediateCopier() for tensor in tensors})

    monkeypatch.setattr(topotrain.training.parameters.flat_parameters, "mirror_for", mirror)

    def checked(t):
        before = [p.data_ptr() for p in t.model.parameters()]
        average_loaded_back(t)
        assert before == [p.data_ptr() for p in t.model.parameters()]

    assert run_local(job_of(), building(), checked).same_bits(reference(job_of(), building(), average_loaded_back))


# --- several groups --------------------------------------------------------------------------------------------------

APART = {
    "downpour": {"nworker_groups": 2, "nworkers_per_group": 2, "nservers_per_group": 2, "server_worker_separate": True},
    "hogwild": {"nworker_groups": 3, "nserver_groups": 3, "sync_freq": 1},
    "ring": {"nworker_groups": 3, "nserver_groups": 3, "sync_freq": 1, "agreement": "kRingAverage"},
    "bounded": {"nworker_groups": 2, "max_staleness": 1, "server_worker_separate": True},
    "local steps": {"nworker_groups": 2, "n_push": 3, "n_fetch": 3, "server_worker_separate": True},
}


@pytest.mark.parametrize(("name", "shared"), list(zip(APART, cycle([False, True]), strict=False)))
def test_changes_of_one_group_reach_the_others(name, shared):
    """The other groups make no step, so nothing but the assignment moves the values."""

    def script(t):
        if t.me.group == 0:
            with assigning(t), torch.no_grad():
                t.model[0].weight.fill_(3.0)
                t.model[2].bias[1] = -2.0

    result = run_local(job_of("one", **APART[name]), building(), script, shared)
    start = plain(building(), lambda t: None).values
    if name == "ring":  # at the end of the job the values of all groups are averaged
        weight = (3.0 + 2 * start["0.weight"]) / 3
        assert torch.allclose(result.values["0.weight"], weight, atol=1e-6)
        return
    assert torch.allclose(result.values["0.weight"], torch.full((25, 12), 3.0), atol=1e-6)
    expected = start["2.bias"].clone()
    expected[1] = -2.0
    assert torch.allclose(result.values["2.bias"], expected, atol=1e-6)


# --- what is refused -------------------------------------------------------------------------------------------------


def only_one_enters(t):
    for batch in vectors(3):
        a_step(t, batch)
        if t.me.index == 0:
            with assigning(t), torch.no_grad():
                t.model[0].weight.zero_()


def one_scope_less(t):
    for _ in range(2 - (t.me.index == 1)):
        with assigning(t):
            pass
    a_step(t, vectors(1)[0])


def between_backward_and_step(t):
    t.backward(t.losses(cross_entropy, *vectors(1)[0]))
    with assigning(t):
        pass


def step_inside(t):
    with assigning(t):
        t.optimizer.step()


def backward_inside(t):
    with assigning(t):
        t.backward(t.losses(cross_entropy, *vectors(1)[0]))


def scope_inside(t):
    with assigning(t), assigning(t):
        pass


def not_given(t):
    with assigning(t, [t.model[0].weight]), torch.no_grad():
        t.model[2].weight.zero_()


def foreign(t):
    with assigning(t, [nn.Parameter(torch.zeros(3))]):
        pass


def other_shape(t):
    with assigning(t):
        t.model[0].bias.data = torch.zeros(3)


HIDDEN = {"grads": Grads.kHidden}


@pytest.mark.parametrize(
    ("script", "kind", "words", "changes"),
    [
        # An error, and no hang.
        (only_one_enters, JobError, "worker.*tt.assign|tt.assign.*worker", {}),
        (only_one_enters, JobError, "worker.*tt.assign|tt.assign.*worker", HIDDEN),
        (one_scope_less, JobError, "tt.assign", {}),
        (between_backward_and_step, RuntimeError, r"after backward\(\) and before step\(\)", {}),
        (step_inside, RuntimeError, r"optimizer.step\(\) inside tt.assign", {}),
        (backward_inside, RuntimeError, "tt.assign with a backward inside", {}),
        (scope_inside, RuntimeError, "tt.assign inside tt.assign", {}),
        (not_given, RuntimeError, "parameter 2.weight was changed inside tt.assign, which was not given it", {}),
        (foreign, ConfigError, "is none of the model that tt.prepare was given", {}),
        (other_shape, RuntimeError, "parameter 0.bias must keep its shape", {}),
        (nothing_changed, ConfigError, "apply = kOnArrival: must be kAtStep", {**HIDDEN, "apply": Apply.kOnArrival}),
        (
            nothing_changed,
            ConfigError,
            "cluster.backup = 1: must be 0",
            {**HIDDEN, "backup": 1, "per_worker_batch": True},
        ),
    ],
)
def test_what_is_refused(script, kind, words, changes):
    with pytest.raises(kind, match=re.compile(words, re.DOTALL)):
        run_local(job_of(**changes), building(), script)


@pytest.mark.parametrize("shared", [False, True])
def test_the_first_worker_of_the_group_decides(shared):
    """Workers draw other random numbers. As after a broadcast from rank 0, all have the values of one."""

    def script(t):
        with assigning(t):
            nn.init.constant_(t.model[2].weight, 0.1 + t.me.index)
            if t.me.index == 1:
                nn.init.constant_(t.model[2].bias, 0.7)
        assert bool((t.model[2].weight == 0.1).all()) and not bool((t.model[2].bias == 0.7).any())

    assert bool((run_local(job_of(), building(), script, shared).values["2.weight"] == 0.1).all())


def changed_before(t):
    with torch.no_grad():
        t.model[2].weight.zero_()
    with assigning(t):
        pass
    nothing_changed(t)


def data_replaced_inside(t):
    with assigning(t):
        t.model[0].bias.data = torch.full((25,), 0.5)
    nothing_changed(t)


def filled_in_place(t):
    with torch.no_grad():
        t.model[0].bias.fill_(0.5)
    nothing_changed(t)


def error_inside(t):
    before = t.model[0].weight.detach().clone()
    with suppress(ZeroDivisionError), assigning(t), torch.no_grad():
        t.model[0].weight.zero_()
        raise ZeroDivisionError
    assert torch.equal(before, t.model[0].weight)
    nothing_changed(t)


@pytest.mark.parametrize(
    ("script", "same_as"),
    [(changed_before, changed_before), (data_replaced_inside, filled_in_place), (error_inside, nothing_changed)],
)
def test_what_counts_is_what_the_parameters_hold_at_the_end_of_the_scope(script, same_as):
    """An error inside leaves the values as they were."""
    for shared in (False, True):
        assert run_local(job_of(), building(), script, shared).same_bits(reference(job_of(), building(), same_as))
