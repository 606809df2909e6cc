"""Trains a little, and the main worker prints so many lines of 100 bytes: `talk.py LINES [forever]`."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

lines, forever = int(sys.argv[1]), sys.argv[2:] == ["forever"]
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(16, 4), torch.zeros(16, 2)), batch_size=4)
model, optimizer, loader = tt.prepare(model, optimizer, loader)
print(f"pid {os.getpid()}", flush=True)
for _ in tt.epochs(1_000_000 if forever else 2):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    if tt.is_main():
        for number in range(lines):
            print(f"{number:099d}")
