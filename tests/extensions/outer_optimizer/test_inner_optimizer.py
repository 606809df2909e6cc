"""The script's optimizer in a job with an outer one: torch's own, with its hooks, state, schedules and scaler."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from in_process_job import cross_entropy, mlp, plain, run_local, usual_loop, vectors
from island_jobs import Islands, adamw, assert_near, building, job, script

from topotrain.config.job import ConfigError
from topotrain.extensions.outer_optimizer.inner_optimizer import plain_step

BATCHES = vectors(9)


def hooked(t: Any) -> None:
    """Hooks run once for each step, and the state is here."""
    calls: list[str] = []
    t.optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    usual_loop(BATCHES)(t)
    assert len(calls) == 9
    assert [float(each["step"]) for each in t.optimizer.state_dict()["state"].values()] == [9.0] * 4


def loaded(t: Any) -> None:
    """A state that was loaded counts."""
    torch.manual_seed(1)
    model = mlp()
    before = adamw(model.parameters())
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    before.step()
    t.optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
    usual_loop(BATCHES)(t)


def scheduled(t: Any) -> None:
    """A schedule of the script, made before `prepare` or after it."""
    steps = t.more[0] if t.more else torch.optim.lr_scheduler.StepLR(t.optimizer, step_size=3, gamma=0.1)
    for batch in BATCHES:
        usual_loop([batch])(t)
        steps.step()


def with_schedule() -> tuple[Any, ...]:
    model = mlp()
    optimizer = adamw(model.parameters())
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)


def scaled(t: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for batch in BATCHES:
        t.optimizer.zero_grad()
        scaler.scale(t.losses(cross_entropy, *batch)[0]).backward()
        scaler.step(t.optimizer)
        scaler.update()


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.003, fused=True)


def sick(t: Any) -> None:
    """A gradient that is not finite is left out of the worker's own steps."""
    for number, batch in enumerate(BATCHES):
        if number == 3 and not hasattr(t, "worker"):
            continue
        t.optimizer.zero_grad()
        t.backward([loss * (float("nan") if number == 3 else 1.0) for loss in t.losses(cross_entropy, *batch)])
        t.optimizer.step()
    assert not hasattr(t, "worker") or t.worker.tally.skipped == 1


@pytest.mark.parametrize(
    ("train", "build"),
    [
        (hooked, building()),
        (loaded, building()),
        (scheduled, with_schedule),
        (scheduled, building()),
        (scaled, building()),
        (scaled, building(inner=fused)),
        (sick, building()),
    ],
)
def test_one_worker_with_the_mean_is_the_plain_script(train: Callable[[Any], None], build: Any) -> None:
    """Its rounds change nothing but the last bits."""
    found = run_local(job(1, 2, "mean"), build, train).values
    assert_near(found, plain(build, train).values)


def test_values_that_the_script_changes_between_steps_are_told_like_a_step() -> None:
    """An average of weights, or a bound of them: with gradients on servers it is an error."""

    def run(t: Any) -> None:
        for batch in BATCHES:
            usual_loop([batch])(t)
            with torch.no_grad():
                for p in t.model.parameters():
                    p.clamp_(-0.1, 0.1)

    found = run_local(job(1, 3, "mean"), building(), run).values
    assert max(float(value.abs().max()) for value in found.values()) < 0.1001


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(ConfigError, match="optimizer = 'LBFGS': must be an optimizer with a step"):
        plain_step(torch.optim.LBFGS)


def test_frozen_parameters_and_those_of_no_optimizer_stay() -> None:
    def build() -> tuple[Any, ...]:
        model = mlp()
        model[0].bias.requires_grad_(False)
        return model, adamw([model[0].weight, model[0].bias, model[2].weight])

    found, begun = run_local(job(), build, script(vectors(3 * 8), 3)).values, Islands().values
    for name in ("0.bias", "2.bias"):
        assert torch.equal(found[name], begun[name]), name
    assert not torch.equal(found["0.weight"], begun["0.weight"])
