"""Train the grader: `topotrain run conf/downpour.conf -m orchard.train`."""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import topotrain as tt

from .fruits import fruits
from .network import Grader, accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description="Tell apples from pears.")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()

    torch.manual_seed(0)
    held_out = fruits(200, seed=2)
    model = Grader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(fruits(480, seed=1), batch_size=16, shuffle=True)
    loss_of = nn.CrossEntropyLoss()

    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    for epoch in tt.epochs(options.epochs):
        for measures, kinds in loader:
            optimizer.zero_grad()
            loss: Tensor = loss_of(model(measures), kinds)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if tt.is_main():
            print(f"epoch {epoch + 1} of {options.epochs}", flush=True)
    tt.report(accuracy=lambda: accuracy(model, held_out))


if __name__ == "__main__":
    main()
