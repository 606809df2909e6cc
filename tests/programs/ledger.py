"""A ledger: one cell per sample. Whatever happens to the processes, a sample that counted n times has n in its cell.

The gradient of the sum is -1 in the cell of every sample of the batch; SGD with a rate of 1 and `reduce: kSum` adds 1.
All numbers are small integers, so the sums are exact in float32.
"""

import argparse
import select
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt


class Ledger(nn.Module):
    def __init__(self, cells: int) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(cells))

    def forward(self, numbers: Tensor) -> Tensor:
        return -self.cells[numbers].sum()


class Fragmented(Ledger):
    """Three ledgers of the same samples, each a parameter of its own."""

    def __init__(self, cells: int) -> None:
        super().__init__(cells)
        self.second = nn.Parameter(torch.zeros(cells))
        self.third = nn.Parameter(torch.zeros(cells))

    def forward(self, numbers: Tensor) -> Tensor:
        return super().forward(numbers) - self.second[numbers].sum() - self.third[numbers].sum()


class Kept(nn.Module):
    """Keeps cells, and passes on what it was given; a sample is a row with a one in its own place."""

    def __init__(self, cells: int) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(cells))

    def forward(self, rows: Tensor) -> Tensor:
        return torch.cat([rows, rows[:, : len(self.cells)] * self.cells], 1)


class Halves(nn.Module):
    """Two ledgers, one on each of two workers."""

    def __init__(self, cells: int) -> None:
        super().__init__()
        with tt.device("/job:worker/task:0"):
            self.first = Kept(cells)
        with tt.device("/job:worker/task:1"):
            self.second = Kept(cells)

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(self.first(rows))


def wait_for(condition: Callable[[], object]) -> None:
    while not condition():
        select.select([], [], [], 0.01)


def train(samples: int, epochs: int, after: Callable[[int], None], make: type[Ledger] = Ledger) -> None:
    """Fill a ledger in batches of four; `after` is told the number of steps so far behind each."""
    torch.manual_seed(3)
    model = make(samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(torch.arange(samples)), batch_size=4, shuffle=True)
    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    steps = 0
    for _ in tt.epochs(epochs):
        for (numbers,) in loader:
            optimizer.zero_grad()
            model(numbers).backward()
            optimizer.step()
            steps += 1
            after(steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=240)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--step-s", type=float, default=0.0, help="how long a step takes at least")
    parser.add_argument("--on", help="a file: once it exists, steps take no time")
    parser.add_argument("--slow", type=int, default=-1, help="the worker whose steps take --factor times as long")
    parser.add_argument("--factor", type=float, default=4.0)
    parser.add_argument("--sick", type=int, default=-1, help="the worker whose gradients are NaN from its 5th step on")
    parser.add_argument("--halves", action="store_true", help="a model that is split over two workers")
    given = parser.parse_args()
    torch.manual_seed(3)
    model: nn.Module = Halves(given.samples) if given.halves else Ledger(given.samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = TensorDataset(torch.arange(given.samples))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    steps = 0
    for _ in tt.epochs(given.epochs):
        for (numbers,) in loader:
            steps += 1
            optimizer.zero_grad()
            if given.halves:
                rows = nn.functional.one_hot(numbers, given.samples).float()
                (-model(rows)[:, given.samples :].sum()).backward()
            else:
                sick = tt.rank() == given.sick and steps >= 5
                (model(numbers) * (float("nan") if sick else 1.0)).backward()
            # computing, in place of a larger model
            if not (given.on and Path(given.on).exists()):
                time.sleep(given.step_s * (given.factor if tt.rank() == given.slow else 1.0))
            optimizer.step()
