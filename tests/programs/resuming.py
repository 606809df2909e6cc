"""Programs whose result shows whether a job went on where it was: all that a training has, or one cell per sample.

As long as the file `--hold` is there, the main worker stops behind step `--at`, for somebody to kill it.
"""

import argparse
import threading
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

SAMPLES, BATCH = 96, 4


class Ledger(nn.Module):
    """The gradient of the loss is -1 in the cell of every sample of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(SAMPLES))

    def loss(self, number: Tensor, *_: Tensor) -> Tensor:
        return -self.cells[number].sum()


class Net(nn.Module):
    """Dropout draws random numbers, and a batch norm has statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Dropout(0.3), nn.ReLU(), nn.Linear(40, 1))

    def loss(self, _: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x).squeeze(1), y)


class Words(Net):
    """A part of what goes in is looked up: in a table on the servers, and in a weight whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        rule = tt.kvstore.Adagrad(lr=0.3, lr_decay=0.01)
        self.served = tt.Embedding(None, 6, init="normal 0 1", optimizer=rule, name="served")
        self.weight = nn.Embedding(40, 6, sparse=True)

    def loss(self, number: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(number, x + self.served(number % 40 * 7919) + self.weight(number % 30), y)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["ledger", "net", "words"])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--hold", type=Path, default=Path("nothing"))
    parser.add_argument("--at", type=int, default=30)
    given = parser.parse_args()
    torch.manual_seed(5)
    model = {"ledger": Ledger, "net": Net, "words": Words}[given.kind]()
    if given.kind == "ledger":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    elif given.kind == "words":
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 6), torch.randn(SAMPLES))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    gamma = 1.0 if given.kind == "ledger" else 0.7
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=gamma)
    steps, still = 0, threading.Event()
    for _ in tt.epochs(given.epochs):
        for batch in loader:
            optimizer.zero_grad()
            model.loss(*batch).backward()
            still.wait(0.01)  # computing, in place of a larger model
            optimizer.step()
            steps += 1
            if steps == given.at:
                print("holding" if given.hold.exists() else "there", flush=True)
                if given.hold.exists() and tt.is_main():
                    still.wait()
        schedule.step()
        if given.kind == "words":  # a table's rate is its own
            model.served.optimizer.param_groups[0]["lr"] *= 0.7
