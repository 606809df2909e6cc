"""Handwritten digits with SGD and momentum, from a start trained for two epochs without momentum."""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import topotrain as tt

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from digits import accuracy, read_digits


def build() -> nn.Module:
    """A small perceptron."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    train, test = read_digits()
    model, loss_of = build(), nn.CrossEntropyLoss()
    warm_up(model, train, options.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=options.momentum)
    loader = DataLoader(train, batch_size=options.batch, shuffle=True)
    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    for _ in tt.epochs(10):
        for images, labels in loader:
            optimizer.zero_grad()
            loss_of(model(images), labels).backward()
            optimizer.step()
    tt.report(accuracy=lambda: accuracy(model, test))


def warm_up(model: nn.Module, train: torch.utils.data.TensorDataset, batch: int) -> None:
    """Two epochs of plain SGD in this process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        for images, labels in DataLoader(train, batch_size=batch, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
