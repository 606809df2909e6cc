"""`tt.prepare` with several models and optimizers, in one call and in several."""

import copy
import io
from dataclasses import replace

import pytest
import torch
from in_process_job import adam, cross_entropy, mlp, sgd
from safetensors.torch import load_file
from script_job import job as job  # a fixture
from script_job import loader
from torch import nn
from torch.utils.data import DataLoader

import topotrain as tt
from topotrain.config.job import Cluster, ConfigError, LRGen, Shard, Updater
from topotrain.extensions.resume.lr_schedulers import OptimizerRates
from topotrain.extensions.resume.worker_state import WorkerState
from topotrain.parallel.api.dry_run import PreparedArguments
from topotrain.training import context, finish_job


def pair():
    torch.manual_seed(3)
    body, head = nn.Linear(12, 9), nn.Linear(9, 5)
    # What plain torch takes on the CPU; a job would choose fused kernels, whose last bits are others.
    one = torch.optim.Adam(body.parameters(), lr=0.01, fused=False)
    return body, head, one, torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9, fused=False)


def play(body, head, one, two, batches, scaler=None):
    """Two steps of the head for each of the body, and the body leaves gradients in the head."""
    for _ in tt.epochs(2):
        for number, (x, y) in enumerate(batches):
            for optimizer in (two, one) if number % 2 else (two,):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(head(torch.tanh(body(x))), y)
                (loss if scaler is None else scaler.scale(loss)).backward()
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()


def values(*models):
    return {f"{k}.{name}": v.clone() for k, m in enumerate(models) for name, v in m.state_dict().items()}


def plain(scaler=None):
    made = pair()
    play(*made, loader(), scaler)
    return values(*made[:2])


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def at_once(body, head, one, two, scaler):
    body, head, one, two, batches, *_ = tt.prepare(body, head, one, two, loader(), *([scaler] if scaler else []))
    return body, head, one, two, batches


def one_after_another(body, head, one, two, scaler):
    tt.prepare(body, one)
    head, two, batches = tt.prepare(head, two, loader())
    return body, head, one, two, batches


@pytest.mark.parametrize(
    ("prepare", "scale", "pull"),
    [
        (at_once, 0, "kStep"),
        (at_once, 0, "kLazy"),
        (at_once, 64.0, "kStep"),
        (one_after_another, 0, "kStep"),
    ],
)
def test_a_job_of_one_worker_has_the_plain_scripts_bits(job, tmp_path, prepare, scale, pull):
    here, scaler = job(pull=pull), torch.amp.GradScaler("cpu", scale) if scale else None
    body, head, one, two, batches = prepare(*pair(), scaler)
    assert len(batches) == 5 and batches.batch_size == 8 and here.context.worker is None
    play(body, head, one, two, batches, scaler)
    here.finish()
    expected = plain(torch.amp.GradScaler("cpu", scale) if scale else None)
    assert same(values(body, head), expected)
    assert same(load_file(tmp_path / "final.safetensors"), expected) or prepare is not at_once


def test_a_second_optimizer_over_other_parameters_of_the_same_model(job):
    here = job()
    model = mlp()
    first, second = sgd(model[0]), adam(model[2])
    tt.prepare(model, first)
    found = tt.prepare(second)
    assert found is second
    cross_entropy(model, torch.ones(2, 12), torch.ones(2, dtype=torch.int64)).backward()
    before = [p.clone() for p in model.parameters()]
    second.step()
    assert [torch.equal(p, q) for p, q in zip(model.parameters(), before)] == [True, True, False, False]
    first.step()
    here.finish()
    assert here.context.worker.tally.steps == 2


def test_what_the_parameters_are_at_the_first_use_are_the_initial_values(job):
    """Drawn anew, and a state of both loaded, in place and by assignment."""
    made = pair()
    play(*made, loader())
    state, of_head = made[2].state_dict(), copy.deepcopy(made[1].state_dict())

    def start(body, head, one):
        torch.manual_seed(9)
        body.reset_parameters()
        head.load_state_dict(of_head, assign=True)
        one.load_state_dict(copy.deepcopy(state))

    expected = pair()
    start(*expected[:3])
    play(*expected, loader())
    here = job()
    body, head, one, two, batches = tt.prepare(*pair(), loader())
    start(body, head, one)
    # The parameters of the second optimizer are no longer those of the model.
    two.param_groups[0]["params"] = list(head.parameters())
    play(body, head, one, two, batches)
    here.finish()
    expected[3].param_groups[0]["params"] = list(expected[1].parameters())
    assert here.context.worker.tally.steps == 14


def uses(body, one, batches):
    return {
        "forward": lambda: body(torch.ones(1, 12)),
        "evaluation": lambda: torch.inference_mode()(body)(torch.ones(1, 12)),
        "batch": lambda: next(iter(batches)),
        "epochs": lambda: len(tt.epochs(1)),
        "state": lambda: body.state_dict(),
        "state of the optimizer": lambda: one.state_dict(),
        "weight": lambda: tt.weight(1),
    }


@pytest.mark.parametrize("use", uses(None, None, None))
def test_the_job_begins_at_the_first_use(job, use):
    here = job()
    body, head, one, two = pair()
    copied = copy.deepcopy(body)
    body, one, batches = tt.prepare(body, one, loader())
    torch.save(body, io.BytesIO())
    assert here.context.worker is None
    uses(body, one, batches)[use]()
    assert here.context.worker is not None
    with pytest.raises(ConfigError, match=r"tt.prepare = 'SGD and Linear': comes too late: the job began when"):
        tt.prepare(head, two)
    # What is left in the model is the model's own.
    assert copied._forward_pre_hooks == body._forward_pre_hooks
    body(torch.ones(1, 12)).sum().backward()
    one.step()
    finish_job.close(here.context, finished=False)


def test_loaders_may_come_in_several_calls_and_anew_in_each_epoch(job):
    def script() -> dict[str, torch.Tensor]:
        body, head, one, two = pair()
        body, one, first, kept = tt.prepare(body, one, loader(), tt.as_is(loader()))
        head, two, second = tt.prepare(head, two, loader(batch_size=10))
        assert isinstance(kept, DataLoader) and tt.prepare(first) is first and len(second) == 4
        for _ in tt.epochs(2):
            third, _ = tt.prepare(loader(batch_size=20), one)
            for batches in (zip(first, second), zip(third, kept)):
                for (x, y), (more, _) in batches:
                    one.zero_grad()
                    two.zero_grad()
                    (nn.functional.cross_entropy(head(body(x)), y) + head(body(more)).square().mean()).backward()
                    one.step()
                    two.step()
        return values(body, head)

    expected = script()
    here = job()
    assert same(script(), expected)
    with pytest.raises(ConfigError, match="comes too late"):
        tt.prepare(mlp(), loader())
    here.finish()


SERVED = Cluster(server_worker_separate=True)
ISLAND = replace(SERVED, sync_freq=3, outer=Updater(type="kSGD", learning_rate=LRGen(type="kFixed", base_lr=1.0)))


@pytest.mark.parametrize("cluster", [SERVED, ISLAND], ids=["served", "island"])
def test_a_parameter_may_be_in_several_optimizers(job, cluster):
    """The last layer first, and then all; each optimizer has a state of its own."""

    def trained():
        torch.manual_seed(3)
        model = mlp()
        phases = torch.optim.Adam(model[2].parameters(), lr=0.02), torch.optim.SGD(model.parameters(), 0.1, 0.9)
        model, *phases, batches = tt.prepare(model, *phases, loader(shuffle=False))
        for epoch in tt.epochs(4):
            optimizer = phases[(0, 1, 0, 1)[epoch]]
            if epoch == 3:
                optimizer.state.clear()
            for x, y in batches:
                optimizer.zero_grad()
                cross_entropy(model, x, y).backward()
                optimizer.step()
        return model, phases

    context.forget()
    expected = values(trained()[0])
    here = job(cluster=cluster)
    model, phases = trained()
    assert [len(optimizer.state) for optimizer in phases] == [2, 4]
    here.finish()
    torch.testing.assert_close(values(model), expected, rtol=0, atol=1e-5)


def test_leases_and_tables_do_not_go_with_several_optimizers(job):
    body, head, one, two = pair()
    job(shard=Shard.kLease)
    with pytest.raises(ConfigError, match=r"shard = 'kLease': must be kAuto or kStatic with several optimizers"):
        tt.prepare(body, head, one, two, loader())
    table = nn.Embedding(4, 3, sparse=True)
    tt.prepare(body, head, table, one, two)
    with pytest.raises(ConfigError, match=r"'Adam and SGD': must be one optimizer, .*: rows of a Embedding"):
        tt.epochs(1).__len__()


def test_schedulers_of_one_class_are_told_apart_by_their_optimizers():
    one, two = pair()[2:]
    rates = OptimizerRates((one, two), {}, None)
    decays = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (one, two)]
    for number, decay in enumerate(decays):
        for _ in range(number + 1):
            (one, two)[number].step()
            decay.step()
    rates.find()
    state = rates.pack(WorkerState(0, 0))
    assert [group["lr"] for group in state.groups] == [0.005, 0.025]
    assert sorted(state.schedulers) == ["StepLR of optimizer 0 (Adam)", "StepLR of optimizer 1 (SGD)"]


def test_a_schedulers_step_that_the_script_repeats_with_its_last_batch_is_not_made_up_for():
    for several in (False, True):
        one, two = pair()[2:]
        rates = OptimizerRates((one, two) if several else (one,), {}, None)
        decay = torch.optim.lr_scheduler.StepLR(one, 1, 0.5)
        rates.begin_pass()
        one.step()
        decay.step()
        assert rates.note_steps()
        state = rates.pack(WorkerState(0, 1))
        assert [name[:6] for name in state.within] == ["StepLR"]
        rates.restore(state, 2)
        assert decay.last_epoch == (1 if several else 2)


def test_the_plan_sees_all_models(monkeypatch):
    monkeypatch.setattr(context, "_planning", True)
    monkeypatch.setattr(context, "_unused", None)
    body, head, one, two = pair()
    tt.prepare(body, one)
    batches = tt.prepare(head, two, loader())[2]
    with pytest.raises(context.PlanRun) as seen:
        iter(batches)
    request = seen.value.request
    arguments = PreparedArguments(request.model, request.optimizers, request.loader)
    assert [(p.name, p.optimizer) for p in arguments.parts().parameters] == [
        ("0.weight", 0),
        ("0.bias", 0),
        ("1.weight", 1),
        ("1.bias", 1),
    ]
    assert arguments.momentum(None) == 0.9
    # Adam has two numbers for each of 117 elements, SGD with momentum has one for each of 50.
    assert arguments.state_factor() == pytest.approx((2 * 117 + 50) / 167)
