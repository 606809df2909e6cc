"""`schedule: k1F1B`: the same gradients as with GPipe, and fewer activations alive."""

import copy
import weakref
from typing import Any

import pytest
import torch
from split_workers import (
    BATCH,
    NUMBER,
    OWN,
    WHOLE,
    Cut,
    GroupMailboxes,
    MailboxChannel,
    at,
    make_runner,
    mean_gradients,
    rows,
    together,
)
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

from topotrain.config.job import ConfigError, Schedule
from topotrain.parallel.program.split_program import Program
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


class Stage(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(into, out)
        self.forget()

    def forget(self) -> None:
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = Mark.apply(torch.tanh(self.linear(x)), self.alive)
        self.most = max(self.most, len(self.alive))
        return result


class Pipe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(Stage(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return F.mse_loss(x, y)


def pipe(workers: int, loss_at: Any, first: Any = None) -> Program:
    cut = Cut(workers)
    x, y = cut.input("x", rows(4)), cut.input("y", rows(4))
    for k in range(3):
        place = first if first and k == 0 else at(k % workers)
        x = cut.module(f"stages.{k}", place, rows(4), cut.move(x, place))
    loss = cut.call(
        F.mse_loss, OWN if loss_at == BATCH else loss_at, NUMBER, cut.move(x, loss_at), cut.move(y, loss_at)
    )
    return cut.program(loss if loss_at == BATCH else cut.move(loss, WHOLE))


def shares_of(*counts: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 4, generator=generator), torch.randn(n, 4, generator=generator)) for n in counts]


def run(program: Program, counts: tuple[int, ...], schedule: Schedule, micros: int) -> tuple[list[float], list[Pipe]]:
    shares = shares_of(*counts)
    models = [copy.deepcopy(Pipe()) for _ in counts]
    for model in models:
        for stage in model.stages:
            stage.forget()
    mailboxes = GroupMailboxes(len(counts))

    def work(channel: MailboxChannel) -> float:
        weight = float(counts[channel.me])
        runner = make_runner(program, models[channel.me], channel, lambda: weight, micros, schedule)
        loss = runner(*shares[channel.me])
        assert all(p.grad is None for p in models[channel.me].parameters())  # until the script says so
        (0.5 * loss).backward()
        return loss.item()

    told = together(len(counts), work, mailboxes)
    assert not any(len(store) for store in mailboxes.stores)
    return told, models


CASES = [
    (pipe(3, at(2)), (8, 8, 8)),
    (pipe(3, BATCH), (8, 8, 8)),
    (pipe(3, at(0)), (4, 7, 5)),
    (pipe(2, at(0)), (6, 6)),  # worker 0 has the first stage and the last
    (pipe(2, at(1), first=BATCH), (5, 6)),
    (pipe(2, BATCH, first=BATCH), (5, 5)),
]


@pytest.mark.parametrize(("program", "counts"), CASES)
@pytest.mark.parametrize("micros", [1, 4])
def test_gradients_are_those_of_the_whole_model(program, counts, micros):
    told, models = run(program, counts, Schedule.k1F1B, micros)
    model, shares = Pipe(), shares_of(*counts)
    loss = model(*(torch.cat([share[k] for share in shares]) for k in range(2)))
    (0.5 * loss).backward()
    weighted = sum(value * count for value, count in zip(told, counts, strict=True)) / sum(counts)
    assert weighted == pytest.approx(loss.item(), rel=2e-6)
    found = mean_gradients(models, counts)
    for name, parameter in model.named_parameters():
        assert (found[name] - parameter.grad).abs().max() <= 2e-6, name


def test_fewer_activations_are_alive():
    _, all_forward = run(CASES[0][0], (8, 8, 8), Schedule.kGPipe, 8)
    _, in_turn = run(CASES[0][0], (8, 8, 8), Schedule.k1F1B, 8)
    assert [all_forward[k].stages[k].most for k in range(3)] == [8, 8, 8]
    assert all(in_turn[k].stages[k].most <= 3 - k for k in range(3))
    assert [in_flight(CASES[0][0], k) for k in range(3)] == [3, 2, 1]


def test_it_needs_a_model_that_returns_its_loss():
    cut = Cut(1)
    program = cut.program(cut.module("0", at(0), rows(4), cut.input("x", rows(4))))
    with pytest.raises(ConfigError, match="schedule = 'k1F1B': needs a forward that returns the loss"):
        make_runner(
            program,
            nn.Sequential(nn.Linear(4, 4)),
            MailboxChannel(GroupMailboxes(1), 0),
            lambda: 1.0,
            2,
            Schedule.k1F1B,
        )


def test_without_gradients_it_only_goes_forward():
    program, counts = CASES[0]
    shares, model = shares_of(*counts), Pipe()

    def work(channel: MailboxChannel) -> float:
        with torch.no_grad():
            return make_runner(program, copy.deepcopy(model), channel, lambda: 8.0, 4, Schedule.k1F1B)(
                *shares[channel.me]
            ).item()

    expected = model(*(torch.cat([share[k] for share in shares]) for k in range(2))).item()
    assert together(3, work) == pytest.approx([expected] * 3, rel=2e-6)
