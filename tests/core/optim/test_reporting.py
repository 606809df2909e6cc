"""What a job asks and tells at every step costs little, because it looks twice only where something has changed.

Here: that nothing is missed for it. What each question is about is tested where it belongs (buffers, update, worker).
"""

import json

import pytest
import torch
from torch import nn

from topotrain.config.sharding import cut
from topotrain.core.model.schema import FlatBuffers, PrivateMemory
from topotrain.core.optim import adapter
from topotrain.core.optim.adapter import HyperEncoder, UnsupportedOptimizer, hyper
from topotrain.training.parameters.flat_parameters import ModelBuffers, describe_model

# --- hyper-parameters --------------------------------------------------------------------------------------------


@pytest.fixture
def encoded(monkeypatch):
    """How often hyper-parameters were encoded."""
    calls = []

    def counted(optimizer, changes):
        calls.append(optimizer)
        return hyper(optimizer)

    monkeypatch.setattr(adapter, "hyper", counted)
    return calls


def adam(**settings):
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    return torch.optim.Adam([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5}], **settings)


def test_nothing_is_encoded_while_nothing_changes(encoded):
    optimizer = adam()
    now = HyperEncoder(optimizer)
    assert [now() for _ in range(5)] == [hyper(optimizer)] * 5
    assert len(encoded) == 1


CHANGES = {
    "rate": {"lr": 0.25},
    "betas": {"betas": (0.8, 0.9)},
    "new entry": {"initial_lr": 1.0},
    "something for nothing": {"fused": True},
    "tensor": {"lr": torch.tensor(0.125)},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("number", [0, 1])
def test_every_change_is_told(change, number):
    optimizer = adam()
    now = HyperEncoder(optimizer)
    before = now()
    optimizer.param_groups[number].update(change)
    assert now() == hyper(optimizer) != before


def test_what_disappears_is_told():
    optimizer = adam()
    optimizer.param_groups[0]["note"] = 1
    now = HyperEncoder(optimizer)
    before = now()
    optimizer.param_groups[0]["renamed"] = optimizer.param_groups[0].pop("note")
    assert now() == hyper(optimizer) != before
    del optimizer.param_groups[0]["renamed"]
    assert now() == hyper(optimizer)


@pytest.mark.parametrize("value", [torch.tensor(0.5), [0.9, 0.999]], ids=["tensor", "list"])
def test_what_changes_in_place_is_told(value, encoded):
    optimizer = adam()
    name = "lr" if isinstance(value, torch.Tensor) else "betas"
    optimizer.param_groups[1][name] = value
    now = HyperEncoder(optimizer)
    now()
    if isinstance(value, torch.Tensor):
        value.mul_(0.5)
    else:
        value[0] = 0.25
    assert json.loads(now())[1][name] in (0.25, [0.25, 0.999])
    assert len(encoded) == 2


def test_an_array_in_the_place_of_a_number_is_refused_as_ever():
    optimizer = adam()
    now = HyperEncoder(optimizer)
    now()
    optimizer.param_groups[0]["lr"] = torch.ones(2)
    with pytest.raises(UnsupportedOptimizer, match="lr"):
        now()


# --- parameters --------------------------------------------------------------------------------------------------


class Looks(ModelBuffers):
    """Counts how often it looks at every parameter one by one."""

    looks = 0

    def _check_replaced(self):
        self.looks += 1
        super()._check_replaced()


def moved(model):
    parts = describe_model(model)
    slice_map = cut(parts.parameters, 2)
    buffers = Looks(parts, slice_map, FlatBuffers(slice_map, None, PrivateMemory()))
    buffers.copy_from_model("params")
    buffers.move_model()
    return buffers


def test_parameters_that_stay_are_looked_at_once():
    buffers = moved(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    for _ in range(5):
        buffers.check()
    assert buffers.looks == 1


def test_an_exchange_after_many_quiet_steps_is_found():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    buffers = moved(model)
    weight = model[0].weight
    del model[0].weight  # a parameter may leave its place, and come back
    for _ in range(3):
        buffers.check()
    assert buffers.looks == 1
    model[0].weight = weight
    buffers.check()
    model[0].weight = nn.Parameter(torch.zeros(3, 4))
    with pytest.raises(RuntimeError, match=r"0.weight is not the one that tt.prepare saw"):
        buffers.check()
    with pytest.raises(RuntimeError, match=r"0.weight is not the one that tt.prepare saw"):  # and not forgotten
        buffers.check()
