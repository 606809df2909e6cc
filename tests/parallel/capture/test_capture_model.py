"""A forward as a graph: whose lines, whose scopes, and clear words for what cannot be captured."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as f

from topotrain.config.job import ConfigError
from topotrain.parallel.capture.capture_model import capture
from topotrain.parallel.capture.device_scopes import scope


def line_in(model, text):
    """ "file:line" of the first line of a model's class that holds a text."""
    lines, start = inspect.getsourcelines(type(model))
    return f"{__file__}:{start + next(n for n, line in enumerate(lines) if text in line)}"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, x, twice=None):
        x = self.body(x)
        if twice is not None:
            x = x + twice
        with scope("/job:worker/task:1"):
            x = self.head(x)  # the head
        return x * self.scale + self.shift


def test_nodes_leaves_lines_and_scopes():
    model = Net()
    found = capture(model)
    nodes = {node.name: node for node in found.graph.nodes}
    assert [n.target for n in found.graph.nodes if n.op == "call_module"] == ["body.0", "body.1", "head"]
    assert [n.target for n in found.graph.nodes if n.op == "get_attr"] == ["scale", "shift"]
    assert [n.target for n in found.graph.nodes if n.op == "placeholder"] == ["x"]
    assert nodes["head"].meta["device"] == "/job:worker/task:1"
    assert nodes["head"].meta["line"] == line_in(model, "# the head")
    assert nodes["body_0"].meta["device"] == ""
    assert found.leaves == ("body.0", "body.1", "head")
    assert not found.unfinished and not found.by_mode
    assert found.stored["head.weight"].shape == (2, 4)


def refused(forward, **more):
    model = type("Model", (nn.Module,), {"forward": forward, **more})()
    with pytest.raises(ConfigError) as told:
        capture(model)
    return told.value


def decides(self, x):
    if x.sum() > 0:
        return x
    return -x


def writes(self, x):
    x[:, 0] = 0
    return x


def without_names(self, *inputs):
    return inputs[0]


def mistyped(self, x):
    return self.haed(x)


@pytest.mark.parametrize(
    ("forward", "words", "line"),
    [
        (decides, ("decides", "the same for all data"), 1),
        (lambda self, x: [x for _ in range(x.sum())], ("range",), 0),
        (writes, ("torch.where",), 1),
        (without_names, ("*inputs",), 0),
        (mistyped, ("haed",), 1),
    ],
)
def test_what_cannot_be_captured_is_refused_at_its_line(forward, words, line):
    error = refused(forward)
    assert all(word in str(error) for word in words)
    assert error.where == f"{__file__}:{forward.__code__.co_firstlineno + line}"


def test_decisions_on_sizes_wait_for_an_example():
    class Checked(nn.Module):
        def forward(self, x):
            assert x.size(1) <= 8
            return x

    class Looped(nn.Module):
        def forward(self, x):
            return sum(row for row in x)

    assert "iterates over" in capture(Looped()).unfinished
    found = capture(Checked())
    assert line_in(Checked(), "assert") in found.unfinished


def test_the_mode_may_be_handed_on_or_looked_at():
    class Handed(nn.Module):
        def forward(self, x):
            return f.dropout(x, 0.5, self.training)

    class Looked(nn.Module):
        def forward(self, x):
            return x * 2 if self.training else x

    handed, looked = Handed(), Looked().eval()
    assert capture(handed).by_mode and not capture(Net()).by_mode
    assert [n.kwargs["training"] for n in capture(handed, False).graph.nodes if n.op == "call_function"] == [False]
    assert capture(looked).by_mode
    assert len(capture(looked, training=True).graph.nodes) == 3
    assert len(capture(looked, training=False).graph.nodes) == 2
    assert handed.training is True and looked.training is False


def test_nothing_stays_behind():
    zeros, before = torch.zeros, set(globals())
    model = Net()
    keys = set(model.__dict__)
    refused(lambda self, x: 1 if x else 2)
    capture(model)
    assert torch.zeros is zeros
    assert set(globals()) == before
    assert set(model.__dict__) == keys and model.training is True
