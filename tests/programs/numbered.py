"""Accumulates the gradients of two batches, by their numbers in the epoch. Args: tt or builtin.

Each process appends the numbers that it sees to numbers-RANK.txt.
"""

import builtins
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

counted = tt.enumerate if sys.argv[1] == "tt" else builtins.enumerate
torch.manual_seed(0)
x = torch.randn(60, 4)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True, drop_last=True)
model, optimizer, loader = tt.prepare(model, optimizer, loader)
numbers = Path(f"numbers-{tt.rank()}.txt")
for epoch in tt.epochs(4):
    for number, (a, b) in counted(loader, 1):
        assert [at for at, _ in tt.enumerate("ab")] == [0, 1], "that is no pass over the loader"
        with numbers.open("a") as file:
            file.write(f"{epoch} {number}\n")
        (nn.functional.mse_loss(model(a), b) / 2).backward()
        if number % 2 == 0 or number == len(loader):
            optimizer.step()
            optimizer.zero_grad()
