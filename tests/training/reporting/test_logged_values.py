"""`tt.log`: what a script logs is reported now and then, and all of it at the end; without a job nothing happens."""

import numpy as np
import pytest
import torch
from in_process_job import mlp, sgd
from script_job import job as job
from script_job import loader, train

import topotrain as tt
from topotrain.config.job import ConfigError
from topotrain.core.events import MOST_LOGGED_NAMES, Event, Logged, Notice
from topotrain.training import finish_job
from topotrain.training.reporting.logged_values import INTERVAL_S, LoggedValues, numbers
from topotrain.training.worker_stats import WorkerStats


class Sink:
    def __init__(self) -> None:
        self.told: list[Logged] = []
        self.notices: list[Notice] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, Notice):
            self.notices.append(event)
            return
        assert isinstance(event, Logged)
        self.told.append(event)


class OnDevice:
    """Stands for a tensor on a device: it counts how often it was read."""

    def __init__(self, value: float) -> None:
        self.value, self.read = value, 0

    def __float__(self) -> float:
        self.read += 1
        return self.value


# --- an ordinary process -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("0.5", "'0.5'"),
        (None, "None"),
        ([1.0], "[1.0]"),
        (1j, "1j"),
        (torch.zeros(2), "a tensor of (2,), torch.float32"),
        (torch.tensor(1j), "a tensor of (), torch.complex64"),
        (torch.zeros(2, device="meta"), "a tensor of (2,), torch.float32"),
        (10**400, ""),
    ],
)
def test_what_is_no_number_is_named_with_what_is_one(value: object, shown: str) -> None:
    with pytest.raises(ConfigError, match="must be a number, or a tensor with one element") as error:
        tt.log(fine=1.0, wrong=value)  # type: ignore[arg-type]
    assert "tt.log wrong" in str(error.value) and shown in str(error.value)


# --- how often ---------------------------------------------------------------------------------------------------


def test_the_last_values_are_sent_four_times_a_second() -> None:
    sink, tally = Sink(), WorkerStats(started=100.0)
    logged = LoggedValues(sink, "worker 0/1")
    for step in range(1, 1001):
        tally.add_steps(1)
        logged.add({"loss": float(step), **({"first": 7.0} if step == 2 else {})}, tally, 100 + step / 100)
    assert len(sink.told) == pytest.approx(10 / INTERVAL_S, abs=2)
    assert sink.told[0] == Logged("worker 0/1", pytest.approx(0.01), 1, {"loss": 1.0})
    # A value that was logged in between is there, and beside it the last one of the other name.
    assert sink.told[1].values == {"loss": float(sink.told[1].step), "first": 7.0}
    assert all("first" not in each.values for each in sink.told[2:])
    logged.send()
    assert (sink.told[-1].step, sink.told[-1].values) == (1000, {"loss": 1000.0})
    logged.send()
    assert len(sink.told) == len({each.step for each in sink.told})


def test_a_tensor_on_a_device_is_read_only_when_it_is_sent() -> None:
    sink = Sink()
    logged, kept = LoggedValues(sink, "worker 0/0"), [OnDevice(float(number)) for number in range(5)]
    for number, value in enumerate(kept):
        logged.add({"x": value}, None, 10 + 0.01 * number)  # type: ignore[dict-item]
    logged.send_due(10.1)
    assert [value.read for value in kept] == [1, 0, 0, 0, 0]
    logged.send_due(10 + INTERVAL_S)
    assert [value.read for value in kept] == [1, 0, 0, 0, 1]
    assert [each.values for each in sink.told] == [{"x": 0.0}, {"x": 4.0}]


def test_all_kinds_of_numbers_are_taken_and_a_tensor_of_a_device_is_copied() -> None:
    given = {"a": 1, "b": np.float32(0.5), "c": torch.tensor([[2.0]], requires_grad=True), "d": True}
    assert numbers(given) == {"a": 1.0, "b": 0.5, "c": 2.0, "d": 1.0}
    total = torch.zeros((), device="meta")
    kept = numbers({"total": total})["total"]
    assert isinstance(kept, torch.Tensor) and kept is not total and not kept.requires_grad


def test_the_number_of_names_is_limited() -> None:
    sink = Sink()
    logged = LoggedValues(sink, "worker 0/0")
    # In each call some names are new: the limit is one of names, not of calls.
    for call in range(6):
        logged.add({f"n{number}": float(call) for number in range(20 * call, 20 * call + 20)}, None, 100.0 * call)
    logged.add({"n0": 7.0, "more": 1.0}, None, 1000.0)
    kept = {name for event in sink.told for name in event.values}
    assert kept == {f"n{number}" for number in range(MOST_LOGGED_NAMES)} and sink.told[-1].values == {"n0": 7.0}
    (notice,) = sink.notices
    assert notice == Notice("worker 0/0", "tt.log n100: is left out: a worker may log 100 names")


# --- in a job ----------------------------------------------------------------------------------------------------


def test_a_script_s_values_are_reported_with_their_step(job) -> None:
    here = job()
    torch.manual_seed(3)
    model = mlp()
    model, optimizer, batches = tt.prepare(model, sgd(model), loader())
    tt.log(before=1)
    train(model, optimizer, batches)
    tt.log(loss=torch.tensor(0.5), accuracy=0.25)
    tt.log(accuracy=0.75)
    here.finish()
    found = here.heard(Logged)
    assert (found[0].values, found[0].step, found[0].time) == ({"before": 1.0}, 0, 0.0)
    last: dict[str, float] = {}
    for event in found:
        last |= event.values
    assert last == {"before": 1.0, "loss": 0.5, "accuracy": 0.75}
    assert (found[-1].who, found[-1].step) == ("worker 0/0", 10) and found[-1].time > 0


def test_a_script_that_fails_leaves_its_last_values(job) -> None:
    here = job()
    model = mlp()
    tt.prepare(model, sgd(model), loader())
    tt.log(loss=1.0)
    tt.log(loss=2.0)
    tt.log(loss=3.0)
    finish_job.close(here.context, finished=False)
    assert [event.values for event in here.heard(Logged)] == [{"loss": 1.0}, {"loss": 3.0}]
