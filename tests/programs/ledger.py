"""A ledger: one cell per sample. Whatever happens to the processes, a sample that was counted n times has n in its cell.

The gradient of the sum is -1 in the cell of every sample of the batch; SGD with a rate of 1 and `reduce: kSum` adds 1.
All numbers are small integers, so the sums are exact in float32.
"""

import argparse
import time

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


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=240)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--step-s", type=float, default=0.0, help="how long a step takes at least")
    given = parser.parse_args()
    torch.manual_seed(3)
    model = Ledger(given.samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(torch.arange(given.samples)), batch_size=given.batch, shuffle=True)
    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    for _ in tt.epochs(given.epochs):
        for (numbers,) in loader:
            optimizer.zero_grad()
            model(numbers).backward()
            time.sleep(given.step_s)  # computing, in place of a larger model
            optimizer.step()
