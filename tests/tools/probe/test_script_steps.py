"""What is measured of a script's steps: its parts by a clock of the test, and a loader with batches of two sizes."""

from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from topotrain.tools.probe import script_steps
from topotrain.tools.probe.measured_program import step_fields
from topotrain.tools.probe.script_steps import BatchWatch, StepRecorder, StepTimes, medians, spread, watch_batches
from topotrain.training.parameters.prepared_objects import sort_objects

FORWARD_S, BACKWARD_S, REST_S, OPTIMIZER_S = 0.01, 0.03, 0.02, 0.015
CLOCK = SimpleNamespace(now=0.0, left=[], waits=False)
"""The time, and the seconds of work that is not done yet. waits: calls return at once, as on a GPU."""


def work(seconds: float) -> None:
    CLOCK.left.append(seconds)
    if not CLOCK.waits:
        done(())


def done(devices: Iterable[torch.device]) -> None:
    assert set(devices) <= {torch.device("cpu")}
    CLOCK.now += sum(CLOCK.left)
    CLOCK.left.clear()


class Slow(torch.autograd.Function):
    """Takes its time in both directions."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        work(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        work(BACKWARD_S)
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
        work(OPTIMIZER_S)
        return super().step(closure)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("loads", [True, False])
def test_the_parts_of_a_step(waits: bool, loads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # From here on torch calls the hooks of a step for the base class, too.
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)  # the recorder replaces it
    monkeypatch.setattr(script_steps, "time", SimpleNamespace(perf_counter=lambda: CLOCK.now))
    monkeypatch.setattr(script_steps, "synchronize", done)
    CLOCK.now, CLOCK.left, CLOCK.waits = 100.0, [], waits
    recorder, model = StepRecorder(BatchWatch()), SlowModel()
    optimizer, loader = SlowSgd(model.parameters(), lr=0.1), DataLoader(TensorDataset(torch.zeros(12, 2)), batch_size=3)
    recorder.prepared(sort_objects((model, optimizer, loader) if loads else (model, optimizer)))
    for (x,) in loader:
        optimizer.zero_grad()
        work(REST_S)
        model(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(x)  # an evaluation is the script's own time
    assert [step.samples for step in recorder.steps] == [3, 3, 3, 3]
    found = medians(recorder.steps[1:])
    assert (found.forward, found.backward, found.optimizer) == pytest.approx((FORWARD_S, BACKWARD_S, OPTIMIZER_S))
    assert found.other == pytest.approx(REST_S + FORWARD_S)
    ready = dict(zip([p.name for p in recorder.parts.parameters], recorder.ready(), strict=True))
    assert ready["last.weight"] < 0.3 < 0.7 < ready["first.weight"] <= ready["idle.weight"] == 1.0


def test_work_on_other_devices_than_the_cpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    script_steps.synchronize([torch.device("cpu"), torch.device("cuda", 1)])
    assert waited == [torch.device("cuda", 1)]


# --- figures of several steps ---------------------------------------------------------------------------------------


def test_waiting_for_a_core_is_in_the_mean_and_a_single_long_step_is_no_spread() -> None:
    # A process that shares its core makes most of its short steps undisturbed, and waits in a few of them.
    found = step_fields([StepTimes(1, 0.001, 0.002, 0.0, 0.5)] * 9 + [StepTimes(1, 0.001, 0.032, 0.0, 0.5)], ())
    assert found["batch"]["forward_s"] + found["batch"]["backward_s"] == pytest.approx(0.003)
    assert found["computing"] == pytest.approx(0.006)
    steps = [StepTimes(1, 0.01, 0.0, 0.0, 0.0)] * 30
    assert spread(steps) == spread([*steps, StepTimes(1, 1.0, 0.0, 0.0, 0.0)]) == pytest.approx(0.0, abs=1e-9)
    uneven = [StepTimes(1, 0.006 + 0.001 * (number % 7), 0.0, 0.0, 0.004) for number in range(70)]
    assert spread(uneven) == pytest.approx(0.002 / 0.013, rel=0.3)  # the standard deviation of 0 to 6 is 2


def computing_line(whole_s: float, samples: int, part_s: float, fewer: int) -> tuple[float, float]:
    """The fixed seconds of a batch, and those of each sample."""
    times = [[StepTimes(size, 0.25 * s, 0.75 * s, 0.0, 0.0)] for size, s in ((samples, whole_s), (fewer, part_s))]
    batch = step_fields(*times)["batch"]
    return batch["fixed_s"], batch["per_sample_s"]


seconds = st.floats(1e-6, 10.0)


@given(seconds, seconds, st.integers(2, 4096), st.data())
def test_whatever_was_measured_the_larger_batch_is_on_the_line(
    whole: float, part: float, samples: int, data: st.DataObject
) -> None:
    fixed, per_sample = computing_line(whole, samples, part, data.draw(st.integers(1, samples - 1)))
    assert min(fixed, per_sample) >= 0
    assert fixed + per_sample * samples == pytest.approx(whole)
    assert computing_line(0.010, 40, 0.004, 10) == pytest.approx((0.002, 0.0002))
    assert computing_line(0.010, 40, 0.004, 0) == (0.0, 0.0)  # steps without a batch are none of a smaller one


# --- batches of two sizes -------------------------------------------------------------------------------------------


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(16))


def sizes(loader: DataLoader[object], watch: BatchWatch) -> list[tuple[int, int]]:
    """For each batch its samples, and the samples that the watch has counted."""
    return [(len(batch[0] if isinstance(batch, list) else batch), watch.step_over()) for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_every_second_batch_is_cut_while_it_is_asked_for(workers: int) -> None:
    loader = DataLoader(TensorDataset(torch.arange(32)), batch_size=8, num_workers=workers)
    watch = BatchWatch()
    watch_batches(loader, watch)
    assert isinstance(loader, DataLoader) and len(loader) == 4
    assert sizes(loader, watch) == [(8, 8)] * 4
    watch.let_alternate(2)
    assert sizes(loader, watch) == [(2, 2), (8, 8)] * 2
    # A pass that is left early does not spoil the next one.
    next(iter(loader))
    watch.step_over()
    assert all(samples == counted for samples, counted in sizes(loader, watch))
    watch.let_alternate(0)
    assert sizes(loader, watch) == [(8, 8)] * 4
    assert watch.full == 8 and watch.small == 2


def test_a_stream_and_a_loader_without_batches() -> None:
    for loader in (DataLoader(Numbers(), batch_size=4), DataLoader(torch.zeros(3, 5), batch_size=None)):
        watch = BatchWatch()
        watch_batches(loader, watch)
        watch.let_alternate(1)
        assert all(samples == counted for samples, counted in sizes(loader, watch))
