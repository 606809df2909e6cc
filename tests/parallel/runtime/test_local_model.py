"""A model on one worker of a group: what is here, what is not, what the servers are told, and the whole again."""

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from topotrain.config.job import ConfigError
from topotrain.parallel.placement.parameter_owners import ParameterOwners, divide
from topotrain.parallel.runtime.local_model import LocalModel, localise, restore


@dataclass(frozen=True)
class At:
    dim: int = 0
    location: int | None = None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(16, 5)
        self.out = nn.Linear(5, 3)


HYBRID = {"conv": At(0), "norm": At(1), "fc": At(1), "out": At(-1, 1)}


def net(seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def localised(me: int, assignments: dict[str, At] = HYBRID, workers: int = 2) -> tuple[Net, LocalModel]:
    model, optimizer = net()
    return model, localise(model, optimizer, divide(model, assignments, workers), me)


def test_all_workers_describe_the_same_model() -> None:
    (_, a), (_, b) = localised(0), localised(1)
    assert a.parts.parameters == b.parts.parameters
    assert a.parts.buffers == b.parts.buffers
    assert [(p.name, p.shape, p.owners) for p in a.parts.parameters] == [
        ("conv.weight", (4, 1, 3, 3), ()),
        ("conv.bias", (4,), ()),
        ("norm.weight@0", (2,), (0,)),
        ("norm.weight@1", (2,), (1,)),
        ("norm.bias@0", (2,), (0,)),
        ("norm.bias@1", (2,), (1,)),
        ("fc.weight@0", (2, 16), (0,)),
        ("fc.weight@1", (3, 16), (1,)),
        ("fc.bias@0", (2,), (0,)),
        ("fc.bias@1", (3,), (1,)),
        ("out.weight", (3, 5), (1,)),
        ("out.bias", (3,), (1,)),
    ]
    assert [(b.name, b.count) for b in a.parts.buffers] == [
        ("norm.running_mean@0", 2),
        ("norm.running_mean@1", 2),
        ("norm.running_var@0", 2),
        ("norm.running_var@1", 2),
        ("norm.num_batches_tracked", 1),
    ]


@pytest.mark.parametrize("me", [0, 1])
def test_here_is_what_is_its_own(me: int) -> None:
    whole, _ = net()
    model, found = localised(me)
    rows = slice(0, 2) if me == 0 else slice(2, 5)
    assert torch.equal(model.fc.weight, whole.fc.weight[rows])
    assert torch.equal(model.fc.bias, whole.fc.bias[rows])
    assert torch.equal(model.conv.weight, whole.conv.weight)
    assert model.out.weight.is_meta == (me == 0)
    assert [t.is_meta for t in found.parts.tensors[-2:]] == [me == 0] * 2
    features = torch.randn(7, 16)
    assert torch.equal(model.fc(features), nn.functional.linear(features, whole.fc.weight[rows], whole.fc.bias[rows]))


def test_memory_of_what_is_elsewhere_is_free() -> None:
    model, optimizer = net()
    held, kept = model.out.weight, weakref.ref(model.fc.weight.untyped_storage())
    localise(model, optimizer, divide(model, HYBRID, 2), 0)
    gc.collect()
    assert held.untyped_storage().nbytes() == 0  # although the script still holds the object
    assert kept() is None or kept().nbytes() == 2 * 16 * 4
    assert model.fc.weight.untyped_storage().nbytes() == 2 * 16 * 4


def test_tied_weights_are_with_all_workers_that_use_them() -> None:
    def tied(assignments: dict[str, At], workers: int = 3) -> ParameterOwners:
        model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "mid": nn.Linear(4, 4), "out": nn.Linear(4, 7, bias=False)})
        model["out"].weight = model["embed"].weight
        return divide(model, assignments, workers)

    def owners(assignments: dict[str, At]) -> tuple[int, ...]:
        return tied(assignments).parameters[0].shares[0].owners

    assert owners({"embed": At(-1, 2), "out": At(-1, 0)}) == (0, 2)
    assert owners({"embed": At(-1, 2), "out": At(0)}) == ()
    assert owners({"embed": At(-1, 1), "out": At(-1, 1)}) == (1,)
    with pytest.raises(ConfigError, match=r"embed.weight and out.weight"):
        tied({"embed": At(1), "out": At(0)})


def test_an_assignment_of_a_container_holds_below() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    division = divide(model, {"0": At(-1, 1), "0.1": At(-1, 0)}, 2)
    assert [w.shares[0].owners for w in division.parameters] == [(1,), (1,), (0,), (0,), (), ()]


def test_fewer_features_than_workers() -> None:
    with pytest.raises(ConfigError, match=r"0\.weight has 2 features: fewer than 3 workers"):
        divide(nn.Sequential(nn.Linear(4, 2)), {"0": At(1)}, 3)


def test_state_of_the_optimizer_goes_along() -> None:
    model, optimizer = net()
    optimizer.state[model.fc.weight] = {"momentum_buffer": torch.arange(80.0).view(5, 16), "step": torch.tensor(3.0)}
    found = localise(model, optimizer, divide(model, HYBRID, 2), 0)
    second = optimizer.state[found.parts.tensors[7]]
    assert torch.equal(second["momentum_buffer"], torch.arange(32.0, 80.0).view(3, 16))
    assert second["step"] == 3


def test_whole_again() -> None:
    expected = net()[0].state_dict()
    _, other = localised(1)
    model, optimizer = net()
    original = list(model.parameters())
    groups = [id(p) for p in optimizer.param_groups[0]["params"]]
    found = localise(model, optimizer, divide(model, HYBRID, 2), 0)

    def both(name: str) -> list[torch.Tensor]:
        mine, theirs = getattr(found.parts, name), getattr(other.parts, name)
        return [b if a.is_meta else a for a, b in zip(mine, theirs, strict=True)]

    values, buffers = both("tensors"), both("buffer_tensors")
    restore(found, optimizer, [value.detach() for value in values], buffers)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == groups
    assert all(a is b for a, b in zip(model.parameters(), original, strict=True))
    assert model.state_dict().keys() == expected.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert model.fc(torch.zeros(1, 16)).shape == (1, 5)


# --- made on the meta device ---------------------------------------------------------------------------------------


def blank(me: int, workers: int = 2) -> tuple[Net, LocalModel]:
    with torch.device("meta"):
        model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, localise(model, optimizer, divide(model, HYBRID if workers > 1 else {}, workers), me, seed=3)


def test_a_model_on_the_meta_device_gets_what_is_its_own() -> None:
    whole, _ = blank(0, workers=1)
    (first, a), (second, b) = blank(0), blank(1)
    assert not any(p.is_meta for p in whole.parameters())
    assert torch.equal(torch.cat([first.fc.weight, second.fc.weight]), whole.fc.weight)
    assert torch.equal(first.conv.weight, whole.conv.weight)
    assert first.out.weight.is_meta
    assert torch.equal(second.out.weight, whole.out.weight)
    assert torch.equal(second.norm.running_var, torch.ones(2))
    assert a.parts.parameters == b.parts.parameters
    bound = 1 / 16**0.5
    assert whole.fc.weight.abs().max() <= bound
    assert whole.fc.weight.std() > bound / 3


def test_tied_weights_on_the_meta_device_are_the_first_modules() -> None:
    def make(tie: bool) -> nn.ModuleDict:
        with torch.device("meta"):
            model = nn.ModuleDict({"embed": nn.Embedding(70, 4), "out": nn.Linear(4, 70, bias=False)})
        if tie:
            model["out"].weight = model["embed"].weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        localise(model, optimizer, divide(model, {}, 1), 0)
        return model

    model = make(tie=True)
    assert model["out"].weight is model["embed"].weight
    assert torch.equal(model["embed"].weight, make(tie=False)["embed"].weight)


def test_a_module_that_cannot_fill_its_parameters() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(Scale())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"0\.by.*Scale must have a method reset_parameters"):
        localise(model, optimizer, divide(model, {}, 2), 0)
