"""Delayed Nesterov momentum: torch's bits without a delay, the paper's updates with one.

Slices of a tensor are in test_optimizer_part.py.
"""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topotrain.config.job import ConfigError, LRGen, Param, Updater, UpdaterType
from topotrain.core.optim.delayed_nesterov import DelayedNesterov
from topotrain.core.optim.updater_block import build

SHAPES = [(37, 11), (130,), (700,)]


def values(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    rng = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=rng).to(dtype)) for shape in SHAPES]


def gradients(step: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=rng).to(dtype) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        for p, gradient in zip(parameters, gradients(step, parameters[0].dtype), strict=True):
            p.grad = gradient
        optimizer.step()


def same_bits(left: Any, right: Any) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_without_a_delay_it_has_the_bits_of_torch(dtype: torch.dtype, weight_decay: float) -> None:
    ours, theirs = values(dtype), values(dtype)
    mine = DelayedNesterov(ours, lr=0.7, momentum=0.9, weight_decay=weight_decay)
    plain = torch.optim.SGD(theirs, lr=0.7, momentum=0.9, nesterov=True, weight_decay=weight_decay, foreach=False)
    train(mine, ours, range(7))
    train(plain, theirs, range(7))
    assert same_bits([p.detach() for p in ours], [p.detach() for p in theirs])
    assert same_bits(
        [mine.state[p]["momentum_buffer"] for p in ours], [plain.state[p]["momentum_buffer"] for p in theirs]
    )
    assert all("sum" not in mine.state[p] for p in ours), "a sum that is never read"


def test_an_update_is_that_of_the_paper() -> None:
    """Numbers without rounding: momentum counts in every second update, and is that of the mean."""
    value, delay, momentum, rate = torch.nn.Parameter(torch.tensor([8.0])), 2, 0.5, 0.5
    optimizer = DelayedNesterov([value], lr=rate, momentum=momentum, delay=delay)
    wanted, buffer, seen = 8.0, 0.0, []
    for step, gradient in enumerate([4.0, 8.0, -4.0, 12.0, 2.0], 1):
        value.grad = torch.tensor([gradient])
        optimizer.step()
        seen.append(gradient)
        wanted -= rate / delay * gradient
        if step % delay == 0:
            buffer = momentum * buffer + sum(seen[-delay:]) / delay
            wanted -= rate * momentum * buffer
        assert value.item() == wanted, step
    assert optimizer.state[value]["momentum_buffer"].item() == buffer == 7.0
    assert optimizer.state[value]["sum"].item() == 2.0


@given(delay=st.integers(1, 6), rounds=st.integers(1, 4), momentum=st.floats(0.1, 0.95))
def test_so_many_updates_move_as_one_with_their_mean(delay: int, rounds: int, momentum: float) -> None:
    ours, theirs = values(torch.float64), values(torch.float64)
    train(DelayedNesterov(ours, lr=0.3, momentum=momentum, delay=delay), ours, range(rounds * delay))
    plain = torch.optim.SGD(theirs, lr=0.3, momentum=momentum, nesterov=True)
    for number in range(rounds):
        seen = [gradients(step, torch.float64) for step in range(number * delay, (number + 1) * delay)]
        for index, p in enumerate(theirs):
            p.grad = torch.stack([each[index] for each in seen]).mean(0)
        plain.step()
    for mine, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-12, atol=1e-12)


def test_a_parameter_without_a_gradient_counts_no_update() -> None:
    parameters = values()
    optimizer = DelayedNesterov(parameters, lr=0.5, delay=2)
    parameters[1].grad = torch.ones_like(parameters[1])
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) if p in optimizer.state else 0.0 for p in parameters] == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"momentum": 0.0}, "momentum = 0.0"),
        ({"delay": 0}, "delay = 0"),
        ({"delay": 1.5}, "delay = 1.5"),
        ({"lr": -1.0}, "lr"),
    ],
    ids=str,
)
def test_settings_out_of_bounds(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DelayedNesterov(values(), **settings)


def test_the_block_builds_it() -> None:
    rate = LRGen(type="kFixed", base_lr=0.5)  # type: ignore[arg-type]
    block = Updater(
        type=UpdaterType.kDelayedNesterov,
        momentum=0.8,
        delay=4,
        weight_decay=0.1,
        learning_rate=rate,
        param=(Param(match="bias", lr_scale=2.0, wd_scale=0.0),),
    )
    model = torch.nn.Linear(2, 2)
    made = build(block, model.named_parameters())
    assert isinstance(made, DelayedNesterov)
    found = [(g["lr"], g["momentum"], g["delay"], g["weight_decay"]) for g in made.param_groups]
    assert found == [(0.5, 0.8, 4, 0.1), (1.0, 0.8, 4, 0.0)]
    with pytest.raises(ConfigError, match=r"updater\.delay = 0"):
        Updater(delay=0)
