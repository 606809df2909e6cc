"""Scopes on a worker of a job, and what tells calls of a split model apart."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import topotrain as tt
from topotrain.front import context as process
from topotrain.front.splitting import kind_of, samples_of, says_where, tagged
from topotrain.job import Cluster, ConfigError, Job, Partition
from topotrain.split import devices
from topotrain.topology import Address, Role, layout


@dataclass
class Here:
    """As much of a `Context` as a scope asks for."""

    place: Any
    me: Address
    worker: Any = None
    split: Any = None


@pytest.fixture
def as_worker() -> Iterator[Any]:
    def enter(index: int, job: Job | None = None, workers: int = 2) -> None:
        job = job or Job(cluster=Cluster(nworkers_per_group=workers))
        place = SimpleNamespace(job=job, topology=layout(job.cluster))
        process.enter(Here(place, Address(Role.WORKER, 0, index)))  # type: ignore[arg-type]

    yield enter
    process.enter(None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with tt.device("/job:worker/task:0"):
            self.first = nn.Linear(3, 4)
        with tt.device("/job:worker/task:1"):
            self.rest = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 3))


def absent(model: nn.Module) -> list[bool]:
    return [parameter.is_meta for parameter in model.parameters()]


def test_in_an_ordinary_process_a_scope_only_notes() -> None:
    torch.manual_seed(3)
    model = Net()
    assert absent(model) == [False] * 8
    assert tagged(model)
    with tt.device("/job:worker"):  # any of them
        assert not tagged(nn.Linear(2, 2))
    assert tt.place(model.first, "/job:worker/task:1") is model.first
    with pytest.raises(ConfigError, match="device"):
        tt.device("/job:worker/tusk:1").__enter__()
    assert isinstance(tt.device(), torch.device)


@pytest.mark.parametrize("me", [0, 1])
def test_on_a_worker_what_others_hold_is_given_back(as_worker: Any, me: int) -> None:
    torch.manual_seed(3)
    whole = Net()
    after = torch.rand(1)
    as_worker(me)
    torch.manual_seed(3)
    model = Net()
    assert torch.equal(torch.rand(1), after)  # all was drawn
    assert absent(model) == [me == 1] * 2 + [me == 0] * 6
    for mine, expected in zip(model.parameters(), whole.parameters(), strict=True):
        assert mine.is_meta or torch.equal(mine, expected)


def test_no_more_than_one_layer_of_others_is_there(as_worker: Any) -> None:
    as_worker(0)
    there = []

    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            made.append(self)
            there.append(sum(not p.is_meta for layer in made for p in layer.parameters()))

    made: list[nn.Module] = []
    with tt.device("/job:worker/task:1"):
        nn.Sequential(*[Layer() for _ in range(5)])
    assert there == [2] * 5
    assert all(p.is_meta for layer in made for p in layer.parameters())


def test_a_tied_weight_stays_tied(as_worker: Any) -> None:
    as_worker(0)
    embed = nn.Embedding(5, 4)
    with tt.device("/job:worker/task:1"):
        out = nn.Linear(4, 5, bias=False)
        out.weight = embed.weight
        nn.Linear(2, 2)
    assert out.weight is embed.weight
    assert not embed.weight.is_meta


def test_nothing_is_given_back_where_the_conf_decides(as_worker: Any) -> None:
    as_worker(0, Job(cluster=Cluster(nworkers_per_group=2), partition=(Partition(match="rest"),)))
    assert absent(Net()) == [False] * 8
    as_worker(0, workers=1)
    assert absent(Net()) == [False] * 8


def test_homes_on_servers_are_noted_and_nothing_given_back(as_worker: Any) -> None:
    as_worker(0)
    with tt.device("/job:ps/task:1"):
        layer = nn.Linear(2, 2)
    assert absent(layer) == [False] * 2
    assert layer.weight.topotrain_home == 1
    assert not hasattr(layer, devices.PLACE)


class Said(nn.Linear):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        with tt.device("/job:worker/task:1"):
            return torch.relu(super().forward(given))


class Asks(nn.Linear):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return super().forward(given.to(tt.device()) if given.sum() > 0 else given)


def test_a_forward_that_names_a_worker_is_noticed() -> None:
    assert says_where(nn.Sequential(Said(3, 3)))
    assert not says_where(nn.Sequential(nn.Linear(3, 3)))
    assert not says_where(Asks(3, 3))  # nor is what cannot be captured a reason to fail


def test_a_scope_that_comes_too_late(as_worker: Any) -> None:
    as_worker(0)
    process.current().worker = object()  # type: ignore[union-attr, assignment]
    with pytest.raises(ConfigError, match="too late"):
        tt.device("/job:worker/task:1").__enter__()
    with tt.device("/job:worker"):
        pass


def test_calls_of_one_kind() -> None:
    def kind(*args: Any, **kwargs: Any) -> object:
        return kind_of(args, kwargs, samples_of(args, kwargs))

    rows = torch.zeros
    assert kind(rows(4, 3)) == kind(rows(7, 3))
    assert kind(rows(3, 3)) == kind(rows(7, 3))
    assert kind(rows(4, 3)) != kind(rows(4, 5))
    assert kind(rows(4, 3)) != kind(rows(4, 3).double())
    assert kind(rows(4, 3), mask=rows(4)) == kind(rows(5, 3), mask=rows(5))
    assert kind(rows(4, 3), mask=rows(4)) != kind(rows(4, 3))
    assert kind(rows(4, 3), 2) != kind(rows(4, 3), 3)
    with pytest.raises(ConfigError, match="counts the samples"):
        kind(2)
