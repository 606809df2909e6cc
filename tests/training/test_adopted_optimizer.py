"""The user's optimizer stays the user's: schedulers, scaler, closure, hooks, state."""

import copy
import pickle
from collections import defaultdict
from functools import wraps

import pytest
import torch
from in_process_job import (
    adagrad,
    adam,
    building,
    cross_entropy,
    job_of,
    mlp,
    plain,
    reference,
    run_local,
    sgd,
    usual_loop,
    vectors,
)
from pairwise import pairwise
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR
from training_loops import backward, clip_norm, each_step, scaled

from topotrain.config.job import Grads, Pull, Updater
from topotrain.core.client.client import JobError
from topotrain.core.server.parameter_shard import OptimizerState

BATCHES = vectors(8)


def same(job, build, script):
    result = run_local(job, build, script)
    assert result.same_bits(reference(job, build, script))
    assert result.distance(plain(build, script)) < 1e-5
    return result


def test_the_object_keeps_its_identity_class_and_groups():
    def build():
        model = mlp()
        optimizer = adam(model)
        return model, optimizer, optimizer, optimizer.param_groups

    def script(t):
        assert t.optimizer is t.more[0] and t.optimizer.param_groups is t.more[1]
        assert isinstance(t.optimizer, torch.optim.Adam) and type(t.optimizer).__name__ == "Adam"
        assert repr(t.optimizer).startswith("Adam (")
        with pytest.raises(RuntimeError, match=r"add_param_group after tt.prepare.*requires_grad_\(False\)"):
            t.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})

    run_local(job_of(), build, script)


# --- hyper-parameters --------------------------------------------------------------------------------------------


def two_groups(model):
    return torch.optim.SGD(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.01, "weight_decay": 0.1}],
        lr=0.05,
        momentum=0.9,
    )


def test_hyperparameters_of_each_group_may_change_at_any_step():
    @each_step()
    def script(t, step, batch):
        backward(t, batch)
        first, second = t.optimizer.param_groups
        first["lr"] = 0.1 / (1 + step)
        second["weight_decay"], second["momentum"] = 0.01 * step, 0.5 + 0.05 * step
        second["nesterov"] = step > 4

    same(job_of(), building(mlp, two_groups), script)


def test_a_tensor_learning_rate_changes_in_place():
    @each_step()
    def script(t, step, batch):
        backward(t, batch)
        if step:
            t.optimizer.param_groups[0]["lr"].mul_(0.5)

    build = building(mlp, lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01)))
    assert run_local(job_of(), build, script).distance(plain(build, script)) < 1e-5


SCHEDULERS = {
    "step": lambda o: StepLR(o, 2, 0.5),
    "cosine": lambda o: CosineAnnealingLR(o, 8),
    "one cycle": lambda o: OneCycleLR(o, 0.1, total_steps=10),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0),
}


def stepped(t, scheduler):
    for batch in BATCHES:
        t.optimizer.zero_grad()
        losses = t.losses(cross_entropy, *batch)
        t.backward(losses)
        t.optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))


@pytest.mark.parametrize(
    ("before", "after"), [("step", None), ("plateau", None), (None, "one cycle"), (None, "plateau"), ("step", "cosine")]
)
def test_schedulers_built_before_prepare_and_after_it_work(before, after):
    """Warnings are errors here: torch warns if it does not see optimizer.step() called before scheduler.step()."""

    def build():
        model = mlp()
        optimizer = sgd(model)
        return model, optimizer, before and SCHEDULERS[before](optimizer)

    def script(t):
        later = after and SCHEDULERS[after](t.optimizer)
        stepped(t, t.more[0] or later)
        if before and later:
            later.step()

    same(job_of(), build, script)


def test_the_updaters_clip_norm_is_torchs():
    for grads in Grads:
        job = job_of(grads=grads, updater=Updater(clip_norm=0.05))
        assert run_local(job, building(), usual_loop(BATCHES)).distance(plain(building(), clip_norm)) < 1e-5


# --- loss scaling ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "overflow_at", "unscale"), pairwise(["sandblaster", "one"], [None, 0, 3], [False, True])
)
def test_grad_scaler(layout, overflow_at, unscale):
    script = scaled(overflow_at, unscale)
    scales = []

    def noting(t):
        script(t)
        scales.append(t.model.scales)

    result = run_local(job_of(layout), building(), noting)
    reference_ = reference(job_of(layout), building(), noting)
    assert all(s == scales[-1] for s in scales)
    assert result.same_bits(reference_)
    if overflow_at is not None:
        before = scales[0][overflow_at - 1] if overflow_at else 2.0**10
        assert scales[0][overflow_at] == before / 2
    else:
        assert scales[0][-1] > 2.0**10


def test_a_scaler_with_hidden_gradients_is_for_a_group_of_one_which_sees_all_there_is():
    with pytest.raises(RuntimeError, match="use grads: kVisible"):
        run_local(job_of(grads=Grads.kHidden), building(), scaled())
    hidden = run_local(job_of("one", grads=Grads.kHidden), building(), scaled(overflow_at=3))
    assert hidden.same_bits(reference(job_of("one"), building(), scaled(overflow_at=3)))


def test_an_overflow_between_pushes_is_left_out():
    """n_push > 1: the worker steps by itself, and must not step on an overflow."""

    def build():
        model = nn.Linear(70, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    def script(t):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(6):
            t.optimizer.zero_grad()
            losses = t.losses(lambda m, x: -m(x).sum(), torch.ones(1, 70))
            t.backward([scaler.scale(loss) * (float("inf") if step == 2 else 1.0) for loss in losses])
            scaler.step(t.optimizer)
            scaler.update()

    result = run_local(job_of("one", n_push=2), build, script)
    assert torch.equal(result.values["weight"], torch.full((1, 70), 5.0))


# --- state -------------------------------------------------------------------------------------------------------

STATEFUL = {
    "sgd": sgd,
    "plain sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "adam": adam,
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, amsgrad=True),
    "adagrad": adagrad,
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.001, momentum=0.5, centered=True),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "nadam": lambda m: torch.optim.NAdam(m.parameters()),
    "radam": lambda m: torch.optim.RAdam(m.parameters()),
    "asgd": lambda m: torch.optim.ASGD(m.parameters()),
    "rprop": lambda m: torch.optim.Rprop(m.parameters()),
}


def alike(mine, theirs):
    """Two state_dicts: the same keys, shapes and dtypes, and nearly the same numbers."""
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for index, entry in theirs["state"].items():
        assert mine["state"][index].keys() == entry.keys()
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                found = mine["state"][index][key]
                assert (found.shape, found.dtype, found.stride()) == (value.shape, value.dtype, value.stride()), key
                torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-7)
            else:
                assert mine["state"][index][key] == pytest.approx(value)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_is_what_plain_torch_has_and_goes_on_where_it_was_taken(name):
    """Another job loads it, before or after it begins: the same bits as going on without a break."""
    build, job, taken, states = building(mlp, STATEFUL[name]), job_of("allreduce"), {}, []

    def through(t):
        usual_loop(BATCHES[:3])(t)
        state = copy.deepcopy(t.optimizer.state_dict())
        if getattr(t, "me", None) is None or t.me.index == 0:
            taken.setdefault("model", copy.deepcopy(t.model.state_dict()))
            states.append(state)
        usual_loop(BATCHES[3:])(t)

    def restored():
        model, optimizer = build()
        model.load_state_dict(taken["model"])
        return model, optimizer

    def loading_after(t):
        t.optimizer.load_state_dict(states[0])
        usual_loop(BATCHES[3:])(t)

    def loaded_before():
        model, optimizer = restored()
        optimizer.load_state_dict(copy.deepcopy(states[0]))
        return model, optimizer

    whole = run_local(job, build, through)
    assert whole.distance(plain(build, through)) < 1e-4
    alike(*states)
    # Plain torch goes on with it, too.
    assert plain(loaded_before, usual_loop(BATCHES[3:])).distance(whole) < 1e-4
    if list(STATEFUL).index(name) % 2:
        assert run_local(job, restored, loading_after).same_bits(whole)
    else:
        assert run_local(job, loaded_before, usual_loop(BATCHES[3:])).same_bits(whole)


@pytest.mark.parametrize("groups", [{"nserver_groups": 2}, {"nserver_groups": 1}])
def test_every_server_group_starts_with_the_state_that_the_optimizer_brings(groups):
    """Once each: with one server group for both worker groups, the second must not load over the first one's steps."""

    def build():
        model, optimizer = building(mlp, adam)()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()  # a run before this one
        optimizer.zero_grad()
        return model, optimizer

    loads = []
    load = OptimizerState.load

    def counted(self, part):
        loads.append((part.bucket, part.piece, part.key))
        load(self, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OptimizerState, "load", counted)
        job = job_of(nworker_groups=2, nworkers_per_group=1, nservers_per_group=1, **groups)
        result = run_local(job, build, lambda t: None)
    assert len(loads) == groups["nserver_groups"] * len(set(loads))
    for server in result.servers:
        units = server.state.known.units
        state = {(key, name): value for unit in units for key, name, value in unit.update.state()}
        assert state
        assert all(float(value) == 1.0 for (_, name), value in state.items() if name == "step")
        assert all(bool((value != 0).all()) for (_, name), value in state.items() if name == "exp_avg")


# --- a state that the script changes -----------------------------------------------------------------------------


def of_one_layer(optimizer, model):
    for p in model[0].parameters():
        del optimizer.state[p]


def zeroed(optimizer, model):
    for entry in optimizer.state.values():
        entry["exp_avg"].zero_()
        entry["exp_avg_sq"].data.zero_()


def scaled_by_hand(optimizer, model):
    """What `state_dict` returns is the state itself, as in torch."""
    for entry in optimizer.state_dict()["state"].values():
        entry["exp_avg"].mul_(0.5)
    optimizer.state[model[2].bias]["step"] = torch.tensor(7.0)


CHANGES = {
    "cleared": lambda optimizer, model: setattr(optimizer, "state", defaultdict(dict)),
    "emptied": lambda optimizer, model: optimizer.state.clear(),
    "of one layer": of_one_layer,
    "zeroed": zeroed,
    "unloaded": lambda optimizer, model: optimizer.load_state_dict({**optimizer.state_dict(), "state": {}}),
    "scaled by hand": scaled_by_hand,
}


@pytest.mark.parametrize(("change", "pull"), [*zip(CHANGES, [*Pull] * 3, strict=True)])
def test_a_state_that_the_script_changes_is_the_servers(change, pull):
    def script(t):
        usual_loop(BATCHES[:3])(t)
        CHANGES[change](t.optimizer, t.model)
        usual_loop(BATCHES[3:])(t)

    build = building(mlp, adam)
    expected, without = plain(build, script), plain(build, usual_loop(BATCHES))
    assert expected.distance(without) > 1e-3
    assert run_local(job_of("two by two", pull=pull), build, script).distance(expected) < 1e-5


def test_what_was_read_is_as_in_torch_and_may_be_copied():
    found = {}

    def script(t):
        usual_loop(BATCHES[:2])(t)
        optimizer, first = t.optimizer, t.model[0].weight
        copied = copy.deepcopy(optimizer)
        found[getattr(t, "me", None)] = (
            len(optimizer.state),
            first in optimizer.state,
            nn.Parameter(torch.ones(1)) in optimizer.state,
            sorted(optimizer.state[first]),
            float(optimizer.state[first]["step"]),
            type(optimizer),
            type(copied) is type(optimizer) and sorted(next(iter(copied.state.values()))),
            len(pickle.loads(pickle.dumps(optimizer)).state_dict()["state"]),
        )
        usual_loop(BATCHES[2:4])(t)

    build = building(mlp, adam)
    run_local(job_of(), build, script)
    plain(build, script)
    assert len(found) == 4
    assert len(set(map(repr, found.values()))) == 1


def test_a_change_of_a_state_before_a_step_or_on_one_worker_is_refused():
    def script(t):
        usual_loop(BATCHES[:2])(t)
        entry = t.optimizer.state[t.model[0].weight]
        usual_loop(BATCHES[2:3])(t)
        entry["exp_avg"].zero_()
        usual_loop(BATCHES[3:4])(t)

    with pytest.raises(RuntimeError, match=r"optimizer.state that was read before the last step has been changed"):
        run_local(job_of("one"), building(mlp, adam), script)

    def on_one(t):
        usual_loop(BATCHES[:2])(t)
        if t.me.index == 1:
            t.optimizer.state.clear()
        usual_loop(BATCHES[2:3])(t)

    words = r"disagree about the optimizer's hyper-parameters .* changes of optimizer.state"
    with pytest.raises(JobError, match=words):
        run_local(job_of(), building(mlp, adam), on_one)


# --- wrappers, and the end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adam", "rprop"])
def test_a_wrapper_around_step_runs_whenever_it_was_made(name):
    calls = []

    def wrap(optimizer, who):
        inner = optimizer.step

        @wraps(inner)
        def step(*args, **kwargs):
            calls.append(who)
            return inner(*args, **kwargs)

        optimizer.step = step

    def build():
        model = mlp()
        optimizer = STATEFUL[name](model)
        optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
        optimizer.register_step_post_hook(lambda *_: calls.append("behind"))
        scheduler = StepLR(optimizer, 2, 0.5)
        wrap(optimizer, "before")
        return model, optimizer, scheduler

    def script(t):
        wrap(t.optimizer, "after")
        for batch in BATCHES[:3]:
            t.optimizer.zero_grad()
            losses = t.losses(cross_entropy, *batch)
            t.backward(losses)
            assert t.optimizer.step(lambda losses=losses: losses[0]) is losses[0]
            t.more[0].step()

    expected = plain(build, script)
    once = list(calls)
    calls.clear()
    assert run_local(job_of("one"), build, script).distance(expected) < 1e-5
    assert calls == once == ["after", "before", "hook", "behind"] * 3


def test_at_the_end_the_optimizer_is_the_script_s_again():
    def script(t):
        optimizer = t.optimizer
        # As the job's end does; the harness has its own.
        usual_loop(BATCHES[:2])(t)
        t.notes["adopted 0"].keep_state()
        t.notes["adopted 0"].release()
        assert "step" not in vars(optimizer)
        assert "add_param_group" not in vars(optimizer)
        assert type(optimizer.state) is defaultdict
        before = t.model[0].weight.detach().clone()
        optimizer.step()
        assert not torch.equal(before, t.model[0].weight)
        assert all(float(entry["step"]) == 3 for entry in optimizer.state.values())

    run_local(job_of("one"), building(mlp, adam), script)
