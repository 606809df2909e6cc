"""Handwritten digits: an ordinary PyTorch script. The lines marked `# topotrain` are all that was added.

    python examples/digits.py                                         # one process, as if they were not there
    topotrain run examples/conf/downpour.conf examples/digits.py      # the same file, under a topology

The rate is a small one on purpose: with asynchronous groups a gradient may be several updates old when it is applied.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt  # topotrain


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """1,797 images of 8 x 8 pixels, normalized: 1,437 to learn from, 360 held out (always the same ones)."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=360, random_state=1, stratify=labels)
    train_x, test_x, train_y, test_y = (torch.from_numpy(part) for part in parts)
    mean, std = train_x.mean(), train_x.std()

    def dataset(x: Tensor, y: Tensor) -> TensorDataset:
        return TensorDataset(((x - mean) / std).float().reshape(-1, 1, 8, 8), y.long())

    return dataset(train_x, train_y), dataset(test_x, test_y)


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """The share of `data` that `model` names correctly, between 0 and 1."""
    images, labels = data.tensors
    model.eval()
    right = (model(images).argmax(dim=1) == labels).float().mean().item()
    model.train()
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to read digits.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="samples per step, over all workers of a group together")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    train, test = read_digits()
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.rate)
    loader = DataLoader(train, batch_size=options.batch, shuffle=True)
    loss_of = nn.CrossEntropyLoss()

    model, optimizer, loader = tt.prepare(model, optimizer, loader)  # topotrain
    for _ in tt.epochs(options.epochs):  # topotrain (optional: range() would do)
        for images, labels in loader:
            optimizer.zero_grad()
            loss_of(model(images), labels).backward()
            optimizer.step()

    tt.report(accuracy=lambda: accuracy(model, test))  # topotrain


if __name__ == "__main__":
    main()
