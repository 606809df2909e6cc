"""What a script changes after its last step is the result if the main worker does it, and an error otherwise."""

import copy

import pytest
import torch
from in_process_job import WorkerHandle, cross_entropy, job_of, mlp, plain, run_local, sgd, vectors
from safetensors.torch import load_file
from script_job import job as job  # a fixture
from script_job import loader, train
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import topotrain as tt
from topotrain.config.job import ChangeMethod, Cluster, Job, LRGen, Updater, UpdaterType
from topotrain.config.topology import Address, Role, layout
from topotrain.core.events import Metrics
from topotrain.training.final_parameters import FINAL, tensors_of

OUTER = Updater(type=UpdaterType.kSGD, learning_rate=LRGen(type=ChangeMethod.kFixed, base_lr=1.0))
JOBS = {
    "synchronous": job_of("allreduce"),
    "no server": job_of("serverless"),
    "asynchronous": Job(cluster=Cluster(nworker_groups=2, nworkers_per_group=2, server_worker_separate=True)),
    "islands": Job(cluster=Cluster(nworker_groups=2, sync_freq=2, server_worker_separate=True, outer=OUTER)),
}


def build():
    first = parametrizations.weight_norm(nn.Linear(12, 25))
    # In training its means would be those of shares.
    model = nn.Sequential(first, nn.BatchNorm1d(25).eval(), nn.Tanh(), nn.Linear(25, 5))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def script(change, only=None):
    """Trains, and changes the model on these workers, given as (group, index); None: on all."""

    def run(trainer):
        first = copy.deepcopy(trainer.model.state_dict())
        for x, y in vectors(3):
            trainer.optimizer.zero_grad()
            trainer.backward(trainer.losses(cross_entropy, x, y))
            trainer.optimizer.step()
        me = getattr(trainer, "me", Address(Role.WORKER, 0, 0))
        if only is None or (me.group, me.index) in only:
            with torch.no_grad():
                change(trainer.model, first)
        if isinstance(trainer, WorkerHandle):
            trainer.notes["left"] = copy.deepcopy(trainer.model.state_dict())

    return run


def layer(model, first):
    model[3] = nn.Linear(25, 3)
    nn.init.ones_(model[3].weight)
    nn.init.ones_(model[3].bias)


CHANGES = {
    "load": lambda model, first: model.load_state_dict(first),
    "assign": lambda model, first: model.load_state_dict(first, assign=True),
    "half": lambda model, first: model.half(),
    "export": lambda model, first: parametrize.remove_parametrizations(model[0], "weight"),
    "layer": layer,
    "buffer": lambda model, first: setattr(model[1], "running_mean", torch.full((25,), 7.0)),
}


def result_of(found):
    (main, *_) = found.workers
    return tensors_of(main.notes["parts"])[0], main.notes["lost"]


@pytest.mark.parametrize(
    ("name", "change"),
    [*(("synchronous", change) for change in CHANGES), ("no server", "load"), ("no server", "layer")],
)
def test_the_result_is_the_plain_scripts(name, change):
    only = {(0, 0)} if name == "no server" else None
    after = script(CHANGES[change], only)
    wanted = plain(build, after).values
    values, lost = result_of(run_local(JOBS[name], build, after))
    assert values.keys() == wanted.keys() and not lost
    for key, value in wanted.items():
        torch.testing.assert_close(values[key], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", JOBS)
def test_what_only_another_worker_changes_is_refused_by_name(name):
    topology = layout(JOBS[name].cluster)
    other = (topology.worker_groups - 1, topology.workers_per_group - 1)

    def alone(model, first):
        model[3].bias.zero_()

    def otherwise(model, first):
        model[3].bias.fill_(float(torch.rand(1)))

    _, lost = result_of(run_local(JOBS[name], build, script(alone, {other})))
    assert f"parameter 3.bias was changed after the last step by worker {other[0]}/{other[1]} and not by" in lost
    _, lost = result_of(run_local(JOBS[name], build, script(otherwise, {(0, 0), other})))
    # The values of asynchronous groups differ anyway.
    assert ("in another way than by worker 0/0" in lost) if other[0] == 0 else not lost


@pytest.mark.parametrize(("name", "only"), [("asynchronous", {(0, 0)}), ("islands", None), ("islands", {(0, 0)})])
def test_the_main_workers_change_is_the_result_once(name, only):
    """Whatever other groups have trained meanwhile; a change counts in no round of islands, whole or short."""

    def change(model, first):
        model[3].weight.mul_(0.5)

    found = run_local(JOBS[name], build, script(change, only))
    values, lost = result_of(found)
    changed = found.workers[0].notes["left"]
    assert not lost and torch.equal(values["3.weight"], changed["3.weight"])


def test_a_report_is_computed_with_the_change(job):
    here = job()
    model, optimizer, batches = tt.prepare(model := mlp(), sgd(model), loader())
    first = copy.deepcopy(model.state_dict())
    train(model, optimizer, batches)
    model.load_state_dict(first)
    tt.report(far=lambda: sum(float((p.detach() - first[name]).abs().sum()) for name, p in model.named_parameters()))
    here.finish()
    assert here.heard(Metrics)[0].values == {"far": 0.0}
    assert all(torch.equal(value, first[name]) for name, value in load_file(here.context.workspace / FINAL).items())


def test_a_layer_that_is_replaced_before_a_step_is_refused_by_name(job):
    """One without parameters, or around the same ones, changes nothing that is trained."""
    here = job()
    model, optimizer, batches = tt.prepare(model := mlp(), sgd(model), loader())
    model[1] = nn.ReLU()
    model[0] = nn.Sequential(model[0])
    train(model, optimizer, batches, 1)
    model[2] = nn.Linear(25, 5)
    with pytest.raises(RuntimeError, match=r"parameter 2.weight is not the one that tt.prepare saw"):
        train(model, optimizer, batches, 1)
    model[2] = None
    here.context.worker.client.leave()
