"""The state of an inner optimizer as bytes, and what a worker that comes back does with it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from topotrain.core.events import Notice, StateTaken
from topotrain.extensions.inner_state.inner_state import InnerState, StateOfOthers


def trained(
    make: Any = torch.optim.AdamW, steps: int = 3, width: int = 5, seed: int = 0
) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(width, 2)
    optimizer: torch.optim.Optimizer = make(model.parameters(), lr=0.1)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(torch.ones(4, model.in_features)), torch.zeros(4, dtype=torch.long)).backward()
    optimizer.step()


MAKERS = (
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adafactor,
    lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9),
)


@pytest.mark.parametrize("make", MAKERS)
def test_an_optimizer_with_the_state_of_another_makes_the_same_steps(make: Any) -> None:
    model, optimizer = trained(make)
    copied = InnerState(optimizer).copy()
    assert copied is not None
    other, fresh = trained(make, steps=0, seed=1)
    other.load_state_dict(model.state_dict())
    assert InnerState(fresh).take(copied) == ""
    for _ in range(3):
        step(model, optimizer)
        step(other, fresh)
    assert torch.equal(model.weight, other.weight) and torch.equal(model.bias, other.bias)


def test_the_rate_of_the_other_worker_is_not_taken() -> None:
    copied = InnerState(trained()[1]).copy()
    _, own = trained(steps=0)
    own.param_groups[0]["lr"] = 0.25
    assert copied is not None and InnerState(own).take(copied) == ""
    assert own.param_groups[0]["lr"] == 0.25 and len(own.state) == 2


def test_a_copy_is_of_its_moment() -> None:
    model, optimizer = trained(steps=1)
    state = InnerState(optimizer)
    copied = state.copy()
    before = optimizer.state[model.weight]["exp_avg"].clone()
    step(model, optimizer)
    other, fresh = trained(steps=0)
    assert copied is not None and InnerState(fresh).take(copied) == ""
    assert torch.equal(fresh.state[other.weight]["exp_avg"], before)
    assert float(fresh.state[other.weight]["step"]) == 1


def test_a_state_of_other_parameters_is_left() -> None:
    copied = InnerState(trained(width=6)[1]).copy()
    _, own = trained(steps=0)
    assert copied is not None
    assert "other parameters" in InnerState(own).take(copied) and not own.state


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_what_is_no_state_is_left(cut: int) -> None:
    copied = InnerState(trained()[1]).copy()
    _, own = trained(steps=0)
    assert copied is not None
    assert "cannot be read" in InnerState(own).take(copied[:cut]) and not own.state


def test_a_state_that_is_no_plain_data_is_not_given() -> None:
    model, optimizer = trained()
    optimizer.state[model.weight]["object"] = object()
    assert InnerState(optimizer).copy() is None


class Asked:
    """A client with this answer."""

    def __init__(self, state: torch.Tensor | None) -> None:
        self.state, self.asked, self.answered = state, 0, 0

    def ask(self) -> None:
        self.asked += 1

    def answer(self) -> torch.Tensor | None:
        self.answered += 1
        return self.state


@pytest.mark.parametrize("living", [True, False])
def test_a_worker_that_comes_back_takes_the_state_before_its_first_step(living: bool) -> None:
    events: list[Any] = []
    superseded: list[str] = []
    here = SimpleNamespace(me="worker 1/0", emit=events.append, supersede=superseded.append)
    client = Asked(InnerState(trained()[1]).copy() if living else None)
    _, own = trained(steps=0)
    taking = StateOfOthers(here, "inner", InnerState(own), client)  # type: ignore[arg-type]
    assert client.asked == 1 and not client.answered, "it asks when it starts, and waits before its first step"
    for _ in range(3):
        taking.before_step()
    assert client.answered == 1
    if living:
        assert superseded == ["inner"] and len(own.state) == 2
        assert events == [StateTaken("worker 1/0", True)]
    else:
        assert not superseded and not own.state
        told, notice = events
        assert told == StateTaken("worker 1/0", False)
        assert isinstance(notice, Notice) and "no other worker group could give its own" in notice.text
