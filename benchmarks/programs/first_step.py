"""A script that trains a little, and writes the time of its first optimizer step: `first_step.py --marks FOLDER`.

The same file runs alone and in a job, where each worker writes a file of its own.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--marks", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(1)
    model = nn.Linear(32, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(64, 32), torch.randint(10, (64,)))
    loader = DataLoader(data, batch_size=16)
    loss_of = nn.CrossEntropyLoss()
    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    mark = options.marks / str(os.getpid())
    for _ in tt.epochs(1):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), labels).backward()
            optimizer.step()
            # The values of the step are there when the next one needs them.
            float(model.weight.detach().sum())
            if not mark.exists():
                mark.write_text(str(time.time()))


if __name__ == "__main__":
    main()
