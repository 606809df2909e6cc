"""A script of which one worker is killed: an MLP with steps of a few milliseconds.

STEPS BACKWARDS FILE: the number of steps, the number of backwards in each, and a file that is made behind step 50 of
the second worker. With two backwards a step cannot be repeated, so that a death restarts the whole group.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

steps, backwards = map(int, sys.argv[1:3])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
data = TensorDataset(torch.randn(64 * steps, 256), torch.randint(10, (64 * steps,)))
model, optimizer, loader = tt.prepare(model, optimizer, DataLoader(data, 64, shuffle=True))
for number, (inputs, targets) in enumerate(loader, 1):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets) / backwards
    for left in reversed(range(backwards)):
        loss.backward(retain_graph=left > 0)
    optimizer.step()
    if number == 50 and tt.rank() == 1:
        Path(sys.argv[3]).touch()
