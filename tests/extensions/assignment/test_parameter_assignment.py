"""`tt.assign` in a script: in an ordinary process, in a job, and before and after the job."""

import pytest
import torch
from script_job import jobs, loader, mlp, unfused

import topotrain as tt
from topotrain.config.job import ConfigError
from topotrain.extensions.assignment.assignment_client import AssignmentPlace
from topotrain.extensions.assignment.parameter_assignment import AssignmentExtension
from topotrain.extensions.assignment.script_place import ScriptPlace
from topotrain.training import context


@pytest.fixture
def job(tmp_path, monkeypatch):
    yield from jobs(tmp_path, monkeypatch)


def clamp(model):
    with tt.assign(model), torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.1, 0.1)


def test_before_prepare_and_after_the_job_the_parameters_are_the_script_s(job):
    here = job()
    model = mlp()
    clamp(model)
    model, *_ = tt.prepare(model, unfused(model), loader())
    assert max(float(p.detach().abs().max()) for p in model.parameters()) < 0.11
    seen = []

    def metric():
        before = model[0].bias.detach().clone()
        with tt.assign(model), torch.no_grad():
            model[0].bias.fill_(5.0)
        seen.append(float(model[0].bias.detach().mean()))
        with tt.assign(model), torch.no_grad():
            model[0].bias.copy_(before)
        return 1.0

    tt.report(metric=metric)
    here.finish()
    assert seen == [5.0]


@pytest.mark.parametrize(
    "wrong", [3, "model", [torch.zeros(2)], torch.zeros(2)], ids=["number", "name", "list", "tensor"]
)
def test_what_is_no_parameter_is_refused_also_in_an_ordinary_process(wrong):
    with pytest.raises(ConfigError, match="must be modules, parameters, or lists of parameters"), tt.assign(wrong):
        pass


def test_an_evaluation_and_a_job_with_tables_are_refused(job):
    here = job()
    model = mlp()
    tt.prepare(model, unfused(model), loader())
    context.use()
    with context.outside_step(), pytest.raises(RuntimeError, match="in an evaluation"), tt.assign(model):
        pass
    here.context.tables = object()
    with pytest.raises(ConfigError, match="tables or sparse weights"), tt.assign(model):
        pass
    here.context.tables = None
    here.finish()


def test_places_are_those_of_the_loader(job):
    here = job()
    model = mlp()
    _, _, batches = tt.prepare(model, unfused(model), loader())
    context.use()
    (extension,) = (each for each in here.context.extensions if isinstance(each, AssignmentExtension))
    worker = here.context.worker
    place, found = ScriptPlace(here.context, worker), []
    for _ in tt.epochs(2):
        found += [place.next(), place.next()]
        for number, _ in enumerate(batches):
            if number in (0, 3):
                found += [place.next(), place.next()]
    found.append(place.next())
    first, second = (worker.batches.last[0] & 0xFFFF_FFFF | epoch << 32 for epoch in (0, 1))
    expected = [(-1, 0), (first, 0), (first, 3), (-2, 0), (second, 0), (second, 3)]
    assert found == [AssignmentPlace(*at, number) for at in expected for number in (0, 1)] + [AssignmentPlace(-3, 0, 0)]
    assert extension.scope is not None
    assert place.state_dict() == {"between": {"-1": 2, "-2": 2, "-3": 1}}


def test_a_fresh_process_knows_what_is_repeated(job):
    here = job()
    model = mlp()
    tt.prepare(model, unfused(model), loader())
    context.use()
    place = ScriptPlace(here.context, here.context.worker)
    place.load_state_dict({"between": {"-1": 2}})
    assert [place.next().repeated for _ in range(3)] == [True, True, False]
    assert place.state_dict() == {"between": {"-1": 3}}
