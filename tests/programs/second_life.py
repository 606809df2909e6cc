"""Worker 1 fails in its first life, which it notes in the file that the command line names."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

lived = Path(sys.argv[1])
torch.manual_seed(0)
model = nn.Linear(6, 3)
data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = tt.prepare(model, optimizer, DataLoader(data, batch_size=16))
for _ in tt.epochs(2):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if tt.rank() == 1 and not lived.exists():
            lived.touch()
            raise RuntimeError("the first life ends")
