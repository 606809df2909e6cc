"""Two layers; the words of the command line say what was edited since a snapshot: batch, data, frozen or excluded."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

edit = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
if edit in ("frozen", "excluded"):
    model[0].requires_grad_(False)
trained = model[2] if edit == "excluded" else model
optimizer = torch.optim.Adam(trained.parameters(), lr=0.01)
samples = torch.randn(80 if edit == "data" else 64, 4)
data = TensorDataset(samples, (samples.sum(1) > 0).long())
loader = DataLoader(data, batch_size=16 if edit == "batch" else 8, shuffle=True)
model, optimizer, loader = tt.prepare(model, optimizer, loader)
for _ in tt.epochs(3):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
