"""`schedule: k1F1B` keeps fewer activations alive than GPipe."""

import weakref
from functools import partial
from typing import Any

import torch
from split_workers import Block, Group
from torch import nn
from torch.autograd import Function

from topotrain.config.job import Schedule
from topotrain.parallel.runtime.one_f_one_b import in_flight


class Mark(Function):
    """Lives as long as the activations that autograd keeps beside it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, alive: "weakref.WeakSet[Any]") -> torch.Tensor:
        class Kept:
            pass

        ctx.kept = Kept()
        alive.add(ctx.kept)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class Pipe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x.square().mean()


def most_alive(schedule: Schedule) -> list[int]:
    blocks = [Block(rf"stages\.{k}$", location=k) for k in range(3)]
    group = Group(Pipe(), blocks, [(torch.randn(8, 4),) for _ in range(3)], microbatches=8, schedule=schedule)
    assert [in_flight(group.program, k) for k in range(3)] == [3, 2, 1]
    alive, most = [weakref.WeakSet[Any]() for _ in range(3)], [0] * 3

    def marked(k: int, _module: nn.Module, _given: Any, output: torch.Tensor) -> torch.Tensor:
        result = Mark.apply(output, alive[k])
        most[k] = max(most[k], len(alive[k]))
        return result

    for k in range(3):
        group.models[k].stages[k].register_forward_hook(partial(marked, k))
    group.step(lambda loss, *_: loss)
    return most


def test_fewer_activations_are_alive() -> None:
    assert most_alive(Schedule.kGPipe) == [8, 8, 8]
    assert all(most <= 3 - k for k, most in enumerate(most_alive(Schedule.k1F1B)))
