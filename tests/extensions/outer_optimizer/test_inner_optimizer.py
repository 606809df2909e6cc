"""The script's optimizer in a job with an outer one: torch's own, with its hooks, state, schedules and scaler."""

import copy
from itertools import cycle
from typing import Any

import pytest
import torch
from in_process_job import cross_entropy, mlp, run_local, vectors
from test_same_bits import adamw, building, job, script

from topotrain.config.job import Compression, ConfigError
from topotrain.extensions.outer_optimizer.inner_optimizer import plain_step


def one(**cluster: Any) -> Any:
    """A job of one worker, whose rounds change nothing but the last bits."""
    return job(1, **({"outer": "mean", "sync_freq": 2} | cluster))


def plain(batches: Any, inner: Any, after: Any = lambda optimizer: None) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = mlp()
    optimizer = inner(model.parameters())
    hook = after(optimizer)
    for batch in batches:
        optimizer.zero_grad()
        cross_entropy(model, *batch).backward()
        optimizer.step()
        if hook is not None:
            hook()
    return {name: value.detach() for name, value in model.named_parameters()}


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_one_worker_with_the_mean_is_the_plain_script() -> None:
    batches = vectors(11)
    found = run_local(one(), building(mlp, adamw), script(batches, 1))
    assert_close(found.values, plain(batches, adamw))


def test_hooks_run_once_for_each_step_and_the_state_is_here() -> None:
    batches, calls, states = vectors(6), [], []

    def run(t: Any) -> None:
        t.optimizer.register_step_post_hook(lambda *_: calls.append("step"))
        script(batches, 1)(t)
        states.append(t.optimizer.state_dict())

    run_local(one(), building(mlp, adamw), run)
    (state,) = states
    assert len(calls) == 6
    assert [float(each["step"]) for each in state["state"].values()] == [6.0] * 4


def test_a_loaded_state_counts() -> None:
    batches = vectors(8)
    torch.manual_seed(1)
    model = mlp()
    before = adamw(model.parameters())
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    before.step()
    state = before.state_dict()

    def load(optimizer: torch.optim.Optimizer) -> None:
        optimizer.load_state_dict(copy.deepcopy(state))

    def run(t: Any) -> None:
        load(t.optimizer)
        script(batches, 1)(t)

    found = run_local(one(), building(mlp, adamw), run).values
    assert_close(found, plain(batches, adamw, load))
    assert not torch.allclose(found["0.weight"], plain(batches, adamw)["0.weight"], atol=1e-5)


@pytest.mark.parametrize("early", [True, False], ids=["before prepare", "after prepare"])
def test_a_schedule_of_the_script_is_that_of_the_inner_optimizer(early: bool) -> None:
    batches = vectors(9)

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)

    def build() -> tuple[Any, ...]:
        model = mlp()
        optimizer = adamw(model.parameters())
        return (model, optimizer, schedule(optimizer)) if early else (model, optimizer)

    def run(t: Any) -> None:
        steps = t.more[0] if early else schedule(t.optimizer)
        for batch in batches:
            t.optimizer.zero_grad()
            t.backward(t.losses(cross_entropy, *batch))
            t.optimizer.step()
            steps.step()

    found = run_local(one(), build, run).values
    assert_close(found, plain(batches, adamw, lambda optimizer: schedule(optimizer).step))


def test_a_gradient_that_is_not_finite_is_left_out_of_the_workers_own_steps() -> None:
    batches = vectors(8)
    sick = 3

    def run(t: Any) -> None:
        for number, batch in enumerate(batches):
            t.optimizer.zero_grad()
            t.backward([loss * (float("nan") if number == sick else 1.0) for loss in t.losses(cross_entropy, *batch)])
            t.optimizer.step()
        assert t.worker.tally.skipped == 1

    found = run_local(one(), building(mlp, adamw), run).values
    assert_close(found, plain([batch for number, batch in enumerate(batches) if number != sick], adamw))


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_gives_the_steps_of_the_plain_script(fused: bool) -> None:
    batches = vectors(7)

    def inner(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.003, fused=fused)

    def train(optimizer: Any, loss_of: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for batch in batches:
            optimizer.zero_grad()
            scaler.scale(loss_of(batch)).backward()
            scaler.step(optimizer)
            scaler.update()

    found = run_local(
        one(),
        building(mlp, inner),
        lambda t: train(t.optimizer, lambda batch: t.losses(cross_entropy, *batch)[0]),
    ).values
    torch.manual_seed(1)
    model = mlp()
    train(inner(model.parameters()), lambda batch: cross_entropy(model, *batch))
    assert_close(found, dict(model.named_parameters()))


def test_values_that_the_script_changes_between_steps_are_told_like_a_step() -> None:
    """An average of weights, or a bound of them: with gradients on servers it is an error."""
    batches = vectors(4)

    def bound(model: Any) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.1, 0.1)

    def run(t: Any) -> None:
        for batch in batches:
            t.optimizer.zero_grad()
            t.backward(t.losses(cross_entropy, *batch))
            t.optimizer.step()
            bound(t.model)

    found = run_local(one(sync_freq=3), building(mlp, adamw), run).values
    assert max(float(value.abs().max()) for value in found.values()) < 0.1001


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(ConfigError, match="optimizer = 'LBFGS': must be an optimizer with a step"):
        plain_step(torch.optim.LBFGS)


def test_frozen_parameters_and_those_of_no_optimizer_stay() -> None:
    batches = vectors(3 * 8)

    def build() -> tuple[Any, ...]:
        model = mlp()
        model[0].bias.requires_grad_(False)
        return model, adamw([model[0].weight, model[0].bias, model[2].weight])

    torch.manual_seed(1)
    begun = mlp()
    found = run_local(job(), build, script(batches, 3)).values
    for name in ("0.bias", "2.bias"):
        assert torch.equal(found[name], begun.state_dict()[name]), name
    assert not torch.equal(found["0.weight"], begun.state_dict()["0.weight"])


KINDS = [kind for kind in Compression if kind is not Compression.kNone]


@pytest.mark.parametrize(("kind", "overlap"), list(zip(KINDS, cycle([0, 1]), strict=False)))
def test_compression_changes_little(kind: Compression, overlap: int) -> None:
    batches, cluster = vectors(3 * 40), {"sync_freq": 4, "fragments": 2, "overlap": overlap, "outer": "mean"}
    exact = run_local(job(**cluster), building(mlp, adamw), script(batches, 3))
    ratio = {"compression_ratio": 0.3} if kind is Compression.kTopK else {}
    short = run_local(job(**cluster, compression=kind, **ratio), building(mlp, adamw), script(batches, 3))
    # A round moves the values by 1 % of their norm and more.
    assert short.distance(exact) < (0.02 if kind in (Compression.kE3M0, Compression.kTopK) else 0.001)
    # With kTopK only pushes are short.
    most = {Compression.kE3M0: 0.5, Compression.kTopK: 0.9}.get(kind, 0.7)
    assert sum(short.traffic) < most * sum(exact.traffic)
