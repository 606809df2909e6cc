"""What is recorded of a step, by a script whose parts take known times."""

from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from topotrain.tools.probe import batch_sizes, step_recorder
from topotrain.tools.probe.batch_sizes import BatchWatch
from topotrain.tools.probe.measured_program import step_fields
from topotrain.tools.probe.step_recorder import StepRecorder, StepTimes, medians, spread, synchronize
from topotrain.training.parameters.prepared_objects import sort_objects

FORWARD_S, BACKWARD_S, REST_S, OPTIMIZER_S = 0.01, 0.03, 0.02, 0.015


class Clock:
    """A clock that only the script's parts move."""

    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


CLOCK = Clock()


class Slow(torch.autograd.Function):
    """Takes its time in both directions."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        CLOCK.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        CLOCK.sleep(BACKWARD_S)
        return gradient


class SlowModel(nn.Module):
    """The gradient of `last` is there at once, that of `first` after the wait."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.idle = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Slow.apply(self.first(x)))


class SlowSgd(torch.optim.SGD):
    def step(self, closure=None):  # type: ignore[no-untyped-def]
        CLOCK.sleep(OPTIMIZER_S)
        return super().step(closure)


@pytest.fixture
def plain_backward() -> None:
    """The recorder replaces torch's function, as its process does nothing else."""
    before = torch.autograd.backward
    yield
    torch.autograd.backward = before


@pytest.fixture
def simulated_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=lambda: CLOCK.now)
    monkeypatch.setattr(step_recorder, "time", clock)
    monkeypatch.setattr(batch_sizes, "time", clock)


@pytest.mark.usefixtures("plain_backward", "simulated_clock")
@pytest.mark.parametrize("base_was_used", [False, True])
def test_the_parts_of_a_step(base_was_used: bool) -> None:
    if base_was_used:
        # From then on torch calls the hooks of a step for the base class, too.
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    recorder = StepRecorder(BatchWatch())
    model = SlowModel()
    optimizer, loader = SlowSgd(model.parameters(), lr=0.1), DataLoader(TensorDataset(torch.zeros(12, 2)), batch_size=3)
    recorder.prepared(sort_objects((model, optimizer, loader)))
    for (x,) in loader:
        optimizer.zero_grad()
        CLOCK.sleep(REST_S)
        model(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(x)  # an evaluation is no part of a forward
    found = medians(recorder.steps[1:])
    assert [step.samples for step in recorder.steps] == [3, 3, 3, 3]
    for name, least in (("forward", FORWARD_S), ("backward", BACKWARD_S), ("optimizer", OPTIMIZER_S)):
        assert getattr(found, name) == pytest.approx(least), name
    # An evaluation is the script's own time.
    assert found.other == pytest.approx(REST_S + FORWARD_S)
    ready = dict(zip([p.name for p in recorder.parts.parameters], recorder.ready(), strict=True))
    assert ready["last.weight"] < 0.3 < 0.7 < ready["first.weight"] <= 1.0
    assert ready["idle.weight"] == 1.0


@pytest.mark.usefixtures("plain_backward", "simulated_clock")
def test_the_parts_of_a_step_end_when_the_work_on_their_devices_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [0.0]
    monkeypatch.setattr(CLOCK, "sleep", lambda seconds: left.append(seconds))  # calls return at once

    def wait(devices: Iterable[torch.device]) -> None:
        assert set(devices) == {torch.device("cpu")}
        CLOCK.now += sum(left)
        left.clear()

    monkeypatch.setattr(step_recorder, "synchronize", wait)
    recorder, model = StepRecorder(BatchWatch()), SlowModel()
    optimizer = SlowSgd(model.parameters(), lr=0.1)
    recorder.prepared(sort_objects((model, optimizer)))
    for _ in range(4):
        CLOCK.sleep(REST_S)
        model(torch.zeros(3, 2)).sum().backward()
        optimizer.step()
    found = medians(recorder.steps[1:])
    assert found.samples == 3
    assert (found.forward, found.backward, found.optimizer) == pytest.approx((FORWARD_S, BACKWARD_S, OPTIMIZER_S))
    ready = dict(zip([p.name for p in recorder.parts.parameters], recorder.ready(), strict=True))
    assert ready["last.weight"] < 0.3 < 0.7 < ready["first.weight"] <= 1.0
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    synchronize([torch.device("cpu"), torch.device("cuda", 1)])
    assert waited == [torch.device("cuda", 1)]


def test_waiting_for_a_core_is_in_the_mean() -> None:
    """A process that shares its core makes most of its short steps undisturbed, and waits in a few of them."""
    steps = [StepTimes(1, 0.001, 0.002, 0.0, 0.5)] * 9 + [StepTimes(1, 0.001, 0.032, 0.0, 0.5)]
    found = step_fields(steps, ())
    assert found["batch"]["forward_s"] + found["batch"]["backward_s"] == pytest.approx(0.003)
    assert found["computing"] == pytest.approx(0.006)


def test_a_single_long_step_is_no_spread() -> None:
    steps = [StepTimes(1, 0.01, 0.0, 0.0, 0.0)] * 30
    assert spread(steps) == spread([*steps, StepTimes(1, 1.0, 0.0, 0.0, 0.0)]) == pytest.approx(0.0, abs=1e-9)
    uneven = [StepTimes(1, 0.01 + 0.001 * (number % 7), 0.0, 0.0, 0.0) for number in range(70)]
    # The standard deviation of 0 to 6 is 2.
    assert spread(uneven) == pytest.approx(0.002 / 0.013, rel=0.3)


seconds = st.floats(1e-6, 10.0)


def computing_line(whole_s: float, samples: int, part_s: float, fewer: int) -> tuple[float, float]:
    """The fixed seconds of a batch, and those of each sample."""
    times = [[StepTimes(size, 0.25 * s, 0.75 * s, 0.0, 0.0)] for size, s in ((samples, whole_s), (fewer, part_s))]
    batch = step_fields(*times)["batch"]
    return batch["fixed_s"], batch["per_sample_s"]


def test_a_line_through_two_batches() -> None:
    assert computing_line(0.010, 40, 0.004, 10) == pytest.approx((0.002, 0.0002))
    assert computing_line(0.010, 40, 0.004, 0) == (0.0, 0.0)  # steps without a batch are none of a smaller one


@given(seconds, seconds, st.integers(2, 4096), st.data())
def test_whatever_was_measured_the_larger_batch_is_on_the_line(
    whole: float, part: float, samples: int, data: st.DataObject
) -> None:
    fixed, per_sample = computing_line(whole, samples, part, data.draw(st.integers(1, samples - 1)))
    assert min(fixed, per_sample) >= 0
    assert fixed + per_sample * samples == pytest.approx(whole)
