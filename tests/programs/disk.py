"""Trains a model, and does something to the disk meanwhile: `disk.py HOW WIDTH WORKSPACE`."""

import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

how, width, workspace = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
torch.manual_seed(0)
model = nn.Linear(width, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / width)
loader = DataLoader(TensorDataset(torch.ones(16, width), torch.zeros(16, 8)), batch_size=4)
model, optimizer, loader = tt.prepare(model, optimizer, loader)
for _ in tt.epochs(2):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if how == "fill" and tt.is_main():
            with suppress(OSError), (workspace / "filler").open("ab", buffering=0) as file:
                while file.write(bytes(1 << 16)):
                    pass
if how in ("limit", "kept") and tt.is_main():
    # A job may end before a snapshot that it has begun is whole.
    deadline = time.monotonic() + 60
    while not (workspace / "manifests" / "step-2" / "manifest.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    if how == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
