"""A synchronous job whose bits depend on its order of batches, dropout, BatchNorm and momentum: --epochs, --step-s.

--on: a file; once it exists, steps take no time.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--step-s", type=float, default=0.0)
parser.add_argument("--on")
options = parser.parse_args()

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data = TensorDataset(torch.randn(480, 16), torch.randint(0, 4, (480,)))
loader = DataLoader(data, batch_size=12, shuffle=True)
model, optimizer, loader = tt.prepare(model, optimizer, loader)
for _ in tt.epochs(options.epochs):
    for inputs, targets in loader:
        if not (options.on and Path(options.on).exists()):
            time.sleep(options.step_s)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
