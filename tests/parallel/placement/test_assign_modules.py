"""Which module is computed where: blocks before tags before the batch, containers for what is below."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from topotrain.config.job import ConfigError
from topotrain.parallel.capture.capture_model import capture
from topotrain.parallel.capture.device_scopes import place, scope
from topotrain.parallel.placement.assign_modules import Assignment, assignments


@dataclass(frozen=True)
class Block:
    match: str
    partition_dim: int = 0
    location: int = -1


@dataclass(frozen=True)
class Conf:
    partition: tuple = ()


def assigned(model, *blocks, workers=2):
    return dict(assignments(model, Conf(blocks), workers, capture(model)))


def at(worker):
    return Assignment(-1, worker)


BATCH, FEATURES = Assignment(0), Assignment(1)


def net():
    return nn.Sequential(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2)
    )


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ((), {"0.0": BATCH, "1.0": BATCH, "2": BATCH}),
        # A block holds for all below, and the first one counts.
        (
            (Block(r"^0\.0$", 1), Block("^[01]$", location=1), Block("0", location=0)),
            {"0.0": FEATURES, "0.1": at(0), "1.0": at(0), "1.1": at(1), "2": BATCH},
        ),
        # A module is found by its parameters' names.
        ((Block(r"2\.weight", 1),), {"0.0": BATCH, "1.0": BATCH, "2": FEATURES}),
    ],
)
def test_blocks_and_otherwise_by_samples(blocks, expected):
    assert assigned(net(), *blocks) == expected


def test_blocks_count_more_than_tags_and_the_inner_tag_more_than_the_outer():
    model = net()
    with scope("/job:worker/task:0"):
        model[1].append(nn.Linear(8, 8))
    place(model[1], "/job:worker/task:1")
    found = assigned(model, Block("^2$", location=0))
    assert found == {"0.0": BATCH, "1": at(1), "2": at(0)}
    del model[1].topotrain_whole
    assert assigned(model) == {"0.0": BATCH, "1.0": at(1), "1.1": at(1), "1.2": at(0), "2": BATCH}
    assert assigned(model, Block("^1$", 1))["1.2"] == FEATURES


def test_what_a_scope_around_a_call_says():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            with scope("/job:worker/task:1"):
                x = self.one(x)
            return self.two(x)

    assert assigned(Net()) == {"one": at(1), "two": BATCH}

    class Twice(Net):
        def forward(self, x):
            return self.one(super().forward(x))

    with pytest.raises(ConfigError, match=r"one is called in another scope at .*\.py:\d+"):
        assigned(Twice())


def test_without_a_location_the_lightest_takes_it():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 64), nn.Linear(64, 8), nn.Linear(8, 8))
    found = assigned(model, Block("^0$", location=0), Block(r"^[123]$", -1))
    assert [found[name] for name in "0123"] == [at(0), at(1), at(0), at(1)]


def test_without_a_location_a_module_stays_together():
    found = assigned(net(), Block("^[01]", -1))
    assert found["0.0"] == found["0.1"] != found["1.0"] == found["1.1"]


def test_parameters_of_other_modules_and_ties():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            with scope("/job:worker/task:1"):
                self.position = nn.Parameter(torch.zeros(4))
            self.plain = nn.Parameter(torch.zeros(4))
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x) + self.position + self.plain)

    found = assigned(Tied(), Block("head", location=1))
    assert found == {"position": at(1), "plain": BATCH, "embed": BATCH, "head": at(1)}


def test_a_layer_of_torch_is_one_module():
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(8, 2))
    assert assigned(model, Block("^0$", location=1)) == {"0": at(1), "1": BATCH}


@pytest.mark.parametrize(
    ("block", "told"),
    [
        (Block("nothing"), r"partition\[0\]\.match = 'nothing': matches no module.*there are 0, 0\.0, 0\.1"),
        (Block("0", location=2), r"partition\[0\]\.location = 2: must be a worker of the group, 0 to 1"),
        (Block("0", location=-2), r"location = -2"),
        (Block("0", 2), r"partition\[0\]\.partition_dim = 2: must be 0, 1 or -1"),
        (Block("0", 1, 1), r"must be -1 with partition_dim: 1"),
    ],
)
def test_blocks_that_cannot_be(block, told):
    with pytest.raises(ConfigError, match=told):
        assigned(net(), block)


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (nn.MultiheadAttention(4, 2), "cannot cut nn.MultiheadAttention"),
        (nn.Conv2d(4, 4, 1, groups=2), "groups = 1"),
        (nn.Embedding(4, 4, max_norm=1.0), "max_norm"),
        (nn.Embedding(4, 4, sparse=True), "sparse"),
    ],
)
def test_modules_that_cannot_be_cut(module, told):
    with pytest.raises(ConfigError, match=told):
        assigned(nn.Sequential(nn.Identity(), module), Block("1", 1))


def test_a_block_inside_a_layer_that_stays_whole():
    with pytest.raises(ConfigError, match="inside 0, which stays whole"):
        assigned(nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16)), Block(r"linear1$", 1))


def test_a_tag_that_does_not_exist():
    model = net()
    place(model[2], "/job:worker/task:2")
    with pytest.raises(ConfigError, match="task:0 to task:1"):
        assigned(model)
