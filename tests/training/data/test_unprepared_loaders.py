"""A loader that is not in the job: named when a step has a batch of it, and at no other time."""

from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import topotrain as tt
from topotrain.config.job import ConfigError
from topotrain.training.data.unprepared_loaders import UnpreparedLoaders


class Script:
    """Backwards and steps of a script; `read` is a batch of a prepared loader."""

    def __init__(self, at_close: ExitStack) -> None:
        self.tally, self.in_step = SimpleNamespace(backwards=0), False
        self.parts = SimpleNamespace(tensors=[torch.nn.Parameter(torch.zeros(2)) for _ in range(2)])
        self.watch = UnpreparedLoaders(self, self, at_close)

    def read(self) -> None:
        self.in_step = True

    def train(self, *_: object) -> None:
        self.tally.backwards += 1
        self.give()

    def give(self) -> None:
        """Set a gradient without a backward."""
        self.parts.tensors[1].grad = torch.ones(2)

    def step(self) -> None:
        self.watch.before_step()
        self.in_step = False


@pytest.fixture
def script() -> Iterator[Script]:
    original = DataLoader.__iter__
    with ExitStack() as at_close:
        yield Script(at_close)
    assert DataLoader.__iter__ is original


def loader(**more: Any) -> DataLoader[Any]:
    return DataLoader(range(4), **more)


def renewed(script: Script) -> None:
    for _ in loader():
        script.train()
        script.step()


def beside(script: Script) -> None:
    for _ in loader(num_workers=1):
        script.read()
        script.train()
        script.step()


def before_the_step(script: Script) -> None:
    script.read()
    script.train()
    for _ in loader():
        script.train()
    script.step()


def without_a_backward(script: Script) -> None:
    for _ in loader():
        script.give()
        script.step()


def single(script: Script) -> None:
    next(iter(loader()))
    script.train()
    script.step()


@pytest.mark.parametrize("trains", [renewed, beside, before_the_step, without_a_backward, single])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_step_with_a_batch_of_another_loader_is_an_error(script, trains):
    with pytest.raises(ConfigError, match=r"loader = 'DataLoader of range': gives batches to train with, and was not"):
        trains(script)


def test_a_loader_to_evaluate_with_or_one_that_is_meant_is_none(script):
    meant = tt.as_is(loader())
    with torch.no_grad():
        kept = iter(loader())
    for _ in range(3):
        script.read()
        list(loader())  # without `no_grad`
        script.train()
        with torch.no_grad():
            next(kept)
        script.step()
        for _ in meant:
            script.train()
            script.step()
        for _ in loader():
            break
        script.step()  # another one with the same batch, and no backward
    # torch's iterator otherwise.
    found = iter(loader())
    assert len(found) == 4 and found._num_yielded == 0
    assert tt.as_is(x for x in "a") is not None
