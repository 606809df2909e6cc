"""What a job asks and tells at every step costs little, because it looks twice only where something has changed.

Here: that nothing is missed for it. What each question is about is tested where it belongs (buffers, update, worker).
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples
from torch import nn

from topotrain.config.sharding import cut
from topotrain.core.model.schema import FlatBuffers, PrivateMemory
from topotrain.core.optim import adapter
from topotrain.core.optim.adapter import HyperEncoder, UnsupportedOptimizer, hyper
from topotrain.training.parameters.flat_parameters import ModelBuffers, describe_model

# --- hyper-parameters --------------------------------------------------------------------------------------------


def adam():
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    return torch.optim.Adam([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5}])


def scale_in_place(group):
    """The rate is a tensor, or the betas are a list, that changes and still equals itself."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].mul_(0.5)
    if isinstance(group["betas"], list):
        group["betas"][0] *= 0.5


CHANGES = (
    lambda group: None,
    lambda group: group.update(lr=0.25),
    lambda group: group.update(lr=torch.tensor(0.125)),
    lambda group: group.update(betas=(0.8, 0.9)),
    lambda group: group.update(betas=[0.9, 0.999]),
    lambda group: group.update(initial_lr=1.0),
    lambda group: group.update(fused=True),
    lambda group: group.update(note=1),
    lambda group: group.update(renamed=group.pop("note", 2)),
    lambda group: group.pop("renamed", None),
    scale_in_place,
)


@given(changes=st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 1)), min_size=1, max_size=8))
@settings(max_examples=examples(200))
def test_every_change_is_told_whatever_changed_before(changes):
    optimizer = adam()
    now = HyperEncoder(optimizer)
    for change, number in changes:
        change(optimizer.param_groups[number])
        assert now() == hyper(optimizer)


def test_nothing_is_encoded_while_nothing_changes(monkeypatch):
    calls = []
    monkeypatch.setattr(adapter, "hyper", lambda optimizer, changes: calls.append(1) or hyper(optimizer))
    optimizer = adam()
    now = HyperEncoder(optimizer)
    assert [now() for _ in range(5)] == [hyper(optimizer)] * 5
    assert len(calls) == 1


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
