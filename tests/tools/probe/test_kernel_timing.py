"""The times of kernels are plausible beside the same work done plainly, for any optimizer that servers run."""

import time

import pytest
import torch
from torch import nn

from topotrain.config.job import ConfigError
from topotrain.parallel.api.dry_run import PreparedArguments
from topotrain.tools.probe.kernel_timing import time_kernels, time_optimizer


def model(width: int = 1024) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, 8, bias=False))


def plain_step_s(optimizer: torch.optim.Optimizer) -> float:
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            tensor.grad = torch.full_like(tensor, 1e-3)
    times = []
    for _ in range(7):
        began = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return min(times)


@pytest.mark.parametrize(
    ("cls", "settings", "state"),
    [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 1), (torch.optim.Adam, {}, 2), (torch.optim.Adafactor, {}, None)],
)
def test_an_update_takes_about_as_long_as_the_plain_optimizer(cls, settings, state) -> None:  # type: ignore[no-untyped-def]
    made = model()
    optimizer = cls(made.parameters(), **settings)
    before = [p.detach().clone() for p in made.parameters()]
    found = time_optimizer(PreparedArguments(made, (optimizer,), None))
    # The script's own values and state stay as they are.
    assert all(torch.equal(a, b) for a, b in zip(before, made.parameters(), strict=True)) and not optimizer.state
    elements = sum(p.numel() for p in made.parameters())
    whole = found.fixed_s + found.element_s * elements
    # The machine may be busy, and the product may choose a faster kernel.
    assert plain_step_s(optimizer) / 30 < whole < 30 * plain_step_s(optimizer)
    assert found.name == cls.__name__
    assert state is None or found.state_factor == state
    assert found.momentum == settings.get("momentum", 0.0)


def test_of_a_small_model_the_elements_cost_something_too() -> None:
    made = model(8)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    assert time_optimizer(PreparedArguments(made, (optimizer,), None)).element_s > 0


def test_an_optimizer_that_servers_cannot_run_is_refused() -> None:
    made = model(8)
    optimizer = torch.optim.LBFGS(made.parameters())
    with pytest.raises(ConfigError, match="LBFGS"):
        time_optimizer(PreparedArguments(made, (optimizer,), None))


def test_bytes_cost_more_in_a_sum_of_all_than_nothing() -> None:
    threads = torch.get_num_threads()
    found = time_kernels()
    assert torch.get_num_threads() == threads
    # Between 0.1 and 1000 GB/s, and an operation takes less than a millisecond.
    assert 1e-12 < found.byte_s < 1e-8 and 1e-12 < found.copy_byte_s < 1e-8
    assert 0 < found.operation_s < 1e-3
