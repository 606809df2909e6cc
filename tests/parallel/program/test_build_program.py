"""The cut graph: layouts, what travels, sizes that depend on the batch; and the same without any memory."""

import copy

import pytest
import split_workers
import torch
from split_workers import Block
from torch import nn
from torch.nn import functional as f
from torch.utils.checkpoint import checkpoint

from topotrain.config.job import ConfigError
from topotrain.parallel.capture.capture_model import capture
from topotrain.parallel.capture.device_scopes import place, scope
from topotrain.parallel.placement.assign_modules import Assignment
from topotrain.parallel.program.build_program import program
from topotrain.parallel.program.split_program import (
    LocationKind,
    ResultRef,
    StepKind,
    SymbolicShape,
    ValueLocation,
)

BATCH, WHOLE, SAME, OWN = (
    ValueLocation(where) for where in (LocationKind.BATCH, LocationKind.WHOLE, LocationKind.SAME, LocationKind.OWN)
)


def at(worker):
    return ValueLocation(LocationKind.AT, worker=worker)


def features(dim):
    return ValueLocation(LocationKind.FEATURE, dim)


def cut(model, *args, blocks=(), samples=None, training=True, **kwargs):
    return split_workers.cut(model, blocks, args, 2, samples, training, **kwargs)[0]


def layouts(made):
    return {step.name: step.layout for step in made.steps}


def moves(made):
    return [(made.steps[e.value].name, e.source, e.target) for e in made.edges]


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.3)
        self.fc = nn.Linear(36, 5)

    def forward(self, x):
        x = f.max_pool2d(f.relu(self.norm(self.conv(x))), 2)
        x = x.view(x.size(0), -1)
        return self.fc(f.dropout(self.drop(x), 0.1, training=self.training))


def test_by_features():
    made = cut(mlp(), torch.randn(4, 6), blocks=[Block("^[02]$", 1)])
    assert layouts(made) == {
        "input_1": BATCH,
        "_0": features(1),
        "_1": features(1),
        "_2": features(1),
        "_3": features(1),
        "_4": BATCH,
    }
    assert moves(made) == [("input_1", BATCH, WHOLE), ("_1", features(1), WHOLE), ("_3", features(1), BATCH)]
    made = cut(Cnn(), torch.randn(4, 3, 8, 8), blocks=[Block("conv|norm|fc", 1)])
    by_features = [step.name for step in made.steps if step.layout == features(1)]
    assert by_features == ["conv", "norm", "relu", "max_pool2d", "fc"]
    assert [step.name for step in made.steps if step.random] == ["drop", "dropout"]


def test_a_value_travels_once_to_each_layout():
    class Fan(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            return sum(part(x) for part in self.parts)

    made = cut(Fan(), torch.randn(4, 4), blocks=[Block("[012]$", location=1)])
    assert [move for move in moves(made) if move[0] == "x"] == [("x", BATCH, at(1))]
    refs = [step.args[0] for step in made.steps if step.kind is StepKind.MODULE]
    assert refs == [ResultRef(0, 0)] * 3 + [ResultRef(0)]


def test_nothing_is_allocated_and_parts_may_be_missing():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 20, 1 << 20), nn.BatchNorm1d(1 << 20), nn.Linear(1 << 20, 4))
    found = capture(model)
    assignments = {"0": Assignment(1), "1": Assignment(1), "2": Assignment(-1, 1)}
    made = []
    for rows in (1 << 20, 1 << 19):
        model[0].weight = nn.Parameter(torch.empty(rows, 1 << 20, device="meta"))
        made.append(program(found, assignments, model, (torch.empty(2, 1 << 20, device="meta"),), {}, 2, 2))
    whole, part = made
    assert part == whole and part.steps[1].shape == SymbolicShape((0, 1 << 20), "float32", 0)


def test_chance_and_model_are_left_alone():
    model, x = Cnn(), torch.randn(4, 3, 8, 8)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    cut(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(model.state_dict(), before)


class Asks(nn.Module):
    """A model whose forward is given."""

    def __init__(self, forward):
        super().__init__()
        self.fc, self.told = nn.Linear(4, 4), forward

    def forward(self, x):
        return self.told(self, x)


@pytest.mark.parametrize(
    ("forward", "told"),
    [
        (lambda self, x: self.fc(x) if len(x) > 2 else x, "decides .* by the number of samples"),
        (lambda self, x: [self.fc(x[i]) for i in range(x.size(0))], "counts in Python .* by the number of samples"),
        (lambda self, x: self.fc(x) / x.sum().item(), "uses a tensor's values"),
        (lambda self, x: self.fc(x[x > 0]), "uses a tensor's values"),
        (lambda self, x: self.fc(x) @ self.fc(x).T, "several of its dimensions grow"),
        (lambda self, x: self.fc(x) + torch.randn(4), "draws random numbers"),
        (lambda self, x: x.view(-1, 2)[: len(x) * len(x)], "not linear in the number of samples"),
        (lambda self, x: x[: len(x) // 2], "not a multiple of the number of samples"),
        (lambda self, x: x if x.size(0) % 2 == 0 else -x, "decides .* by the number of samples"),
    ],
)
def test_what_cannot_be_cut_is_said_with_its_line(forward, told):
    with pytest.raises(ConfigError, match=told) as error:
        cut(Asks(forward), torch.randn(4, 4))
    assert error.value.where == f"{__file__}:{forward.__code__.co_firstlineno}"


@pytest.mark.parametrize(
    ("forward", "told"),
    [
        (lambda self, x: self.fc(x - x.mean()), "its own share of the batch"),
        (lambda self, x: self.fc(torch.cat([x, x])), "are not contiguous"),
        (lambda self, x: self.fc(x.view(-1, 2, 2).transpose(0, 1).reshape(-1, 2).view(-1, 4)), "are interleaved"),
        (lambda self, x: self.fc(x + torch.arange(len(x))[:, None]), "depend on the position"),
    ],
)
def test_what_cannot_travel_is_said_with_its_line(forward, told):
    scoped = Asks(lambda self, x: forward(self, x))
    if "own share" in told:
        scoped = Asks(lambda self, x: self.fc(x.mean(0)))
    with pytest.raises(ConfigError, match=told) as error:
        cut(scoped, torch.randn(4, 4), blocks=[Block("fc", location=1)])
    assert error.value.where.startswith(f"{__file__}:")


def test_what_is_written_over_must_not_travel():
    def in_place(self, x):
        y = self.fc(x)
        torch.relu_(y)
        with scope("/job:worker/task:1"):
            return y * 2

    def summed(self, x):
        kept = y = self.fc(x)
        y += x
        with scope("/job:worker/task:1"):
            return kept * 2

    for forward in (in_place, summed):
        with pytest.raises(ConfigError, match="writes to fc"):
            cut(Asks(forward), torch.randn(4, 4))

    def alone(self, x):
        kept = y = self.fc(x)
        y += x
        return kept * 2

    # A sum into a value is no new value.
    assert [step.name for step in cut(Asks(alone), torch.randn(4, 4)).steps] == ["x", "fc", "iadd", "mul"]


def test_a_whole_module_may_do_what_it_likes():
    class Wild(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            parts = [self.fc(row) for row in x]
            return torch.stack(parts), {"rows": len(parts)}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.wild = place(Wild(), "/job:worker/task:1")

        def forward(self, x):
            y, _ = self.wild(x)
            return y.relu()

    made = cut(Net(), torch.randn(4, 4))
    assert layouts(made)["wild"] == layouts(made)["relu"] == at(1)


def test_a_scope_found_too_late():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            if x.size(1) != 4:
                raise ValueError("four features")
            with scope("/job:worker/task:1"):
                return self.fc(x)

    with pytest.raises(ConfigError, match=r"found too late.*ended at .*\.py:\d+"):
        cut(Late(), torch.randn(4, 4))
    with scope("/job:worker/task:1"):
        model = Late()
    assert layouts(cut(model, torch.randn(4, 4)))["fc"] == at(1)


@pytest.mark.filterwarnings("ignore:None of the inputs")  # of the first look, without gradients
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_dropout_in_an_activation_checkpoint_is_refused(reentrant):
    """Its masks are drawn ahead for the whole batch, and computing it again in the backward draws other ones."""

    class Checkpointed(nn.Module):
        def __init__(self, p):
            super().__init__()
            self.fc, self.drop = nn.Linear(4, 4), nn.Dropout(p)

        def forward(self, x):
            return checkpoint(lambda y: self.drop(self.fc(y)), x, use_reentrant=reentrant)

    def model(p):
        return nn.Sequential(nn.Linear(4, 4), place(Checkpointed(p), "/job:worker/task:1"))

    with pytest.raises(ConfigError, match=r"dropout inside an activation checkpoint"):
        cut(model(0.5), torch.randn(4, 4))
    cut(model(0.5), torch.randn(4, 4), training=False)
    cut(model(0.0), torch.randn(4, 4))
