"""The times of kernels are plausible, for any optimizer that servers run."""

import pytest
import torch
from torch import nn

from topotrain.config.job import ConfigError
from topotrain.parallel.api.dry_run import PreparedArguments
from topotrain.tools.probe.machine_timing import time_kernels, time_optimizer


def model(width: int = 512) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, 8, bias=False))


@pytest.mark.parametrize(
    ("width", "cls", "settings", "state"),
    [
        (8, torch.optim.SGD, {"lr": 0.1}, 0),  # so few elements cost something, too
        (512, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 1),
        (512, torch.optim.Adam, {}, 2),
        (512, torch.optim.Adafactor, {}, None),
    ],
)
def test_an_update_takes_time_and_leaves_the_script_alone(width, cls, settings, state) -> None:  # type: ignore[no-untyped-def]
    made = model(width)
    optimizer = cls(made.parameters(), **settings)
    before = [p.detach().clone() for p in made.parameters()]
    found = time_optimizer(PreparedArguments(made, (optimizer,), None))
    # The script's own values and state stay as they are.
    assert all(torch.equal(a, b) for a, b in zip(before, made.parameters(), strict=True)) and not optimizer.state
    assert 1e-12 < found.element_s < 1e-5 and 0 < found.fixed_s < 0.1
    assert found.name == cls.__name__
    assert state is None or found.state_factor == state
    assert found.momentum == settings.get("momentum", 0.0)


def test_an_optimizer_that_servers_cannot_run_is_refused() -> None:
    made = model(8)
    with pytest.raises(ConfigError, match="LBFGS"):
        time_optimizer(PreparedArguments(made, (torch.optim.LBFGS(made.parameters()),), None))


def test_bytes_cost_more_in_a_sum_of_all_than_nothing() -> None:
    threads = torch.get_num_threads()
    found = time_kernels()
    assert torch.get_num_threads() == threads
    # Between 0.1 and 1000 GB/s, and an operation takes less than a millisecond.
    assert 1e-12 < found.byte_s < 1e-8 and 1e-12 < found.copy_byte_s < 1e-8
    assert 0 < found.operation_s < 1e-3
