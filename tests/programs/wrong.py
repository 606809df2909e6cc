"""Scripts that are wrong, or that end badly, each in its own way; those that do so once note it in a file."""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import topotrain as tt

how, file = sys.argv[1], Path(*sys.argv[2:])
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Subset(data, range(tt.rank(), 64, 2)) if how == "divided" else data, batch_size=16)
model, optimizer, loader = tt.prepare(model, optimizer, loader)
said = False
for epoch in tt.epochs(1_000_000 if how == "endless" else 3):
    if how == "unprepared":
        loader = DataLoader(data, batch_size=16)
    for step, (x, y) in enumerate(loader):
        if tt.rank() == 1 and step == 2:
            if how == "raise":
                raise ValueError("a fault of the program")
            if how == "interrupt":
                raise KeyboardInterrupt
            if how == "fails once" and not file.exists():
                file.touch()
                raise RuntimeError("the first life ends")
            until = time.monotonic() + 60
            while how == "stall" and epoch == 0 and not file.exists() and time.monotonic() < until:
                time.sleep(0.02)
        if how == "steps" and tt.rank() == 1 and epoch == 1:
            break
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        own = Path(f"{file}-{tt.rank()}")
        if how == "waits once" and not own.exists():
            own.touch()
            print("the first life waits", flush=True)
            while True:
                time.sleep(1)
        if how == "endless" and tt.is_main() and not said:
            print("training", flush=True)
            said = True
