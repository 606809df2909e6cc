"""A script of which the second worker kills itself once, behind step 50: an MLP with steps of a few milliseconds.

--out FILE STEPS BACKWARDS: the mark of the death, the number of steps, and the number of backwards in each. With two
backwards a step cannot be repeated, so that a death restarts the whole group.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt
from benchmarks.programs.timed_steps import die_once

mark, steps, backwards = Path(sys.argv[2]), *map(int, sys.argv[3:])
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
        die_once(mark)
