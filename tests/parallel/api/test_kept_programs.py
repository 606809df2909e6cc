"""What is kept of a split model's programs."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from topotrain.config.job import Job
from topotrain.parallel.api import split_forward


class Program:
    """Takes the place of a program and of its runner."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass


def test_the_programs_of_the_last_lengths_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Program]] = []

    def runner(*_: Any) -> Program:
        found = Program()
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(split_forward, "program", lambda *_, **__: None)
    monkeypatch.setattr(split_forward, "Runner", runner)
    captured: Any = SimpleNamespace(by_mode=False)
    forward = split_forward.SplitForward(nn.Linear(3, 3), Job(), captured, {}, 2)
    forward._channel = captured
    forward.sync = SimpleNamespace(generator=None)  # type: ignore[assignment]
    for length in (*range(16), *range(16)):
        forward(torch.zeros(4, 5 + length))
    assert len(made) == 16
    for length in range(100):
        forward(torch.zeros(4, 5))
        forward(torch.zeros(4, 50 + length))
    gc.collect()
    assert len(made) == 116 and sum(each() is not None for each in made) == 16
    assert made[0]() is not None  # the one that was used all the time
