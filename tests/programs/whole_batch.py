"""A loss over pairs of samples, and batch statistics: both need the whole batch on every worker.

With an argument, the main worker saves its state there.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6, momentum=None)
)
model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
data = TensorDataset(torch.randn(43, 1, 6, 6), torch.randint(3, (43,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(data, batch_size=7, shuffle=True)  # the last batch has one sample
model, optimizer, loader = tt.prepare(model, optimizer, loader)
for _ in tt.epochs(3):
    for number, (x, labels) in enumerate(loader):
        optimizer.zero_grad()
        model.train(number % 7 != 6)  # no statistics of a single sample
        features = nn.functional.normalize(model(x), dim=1)
        both = tt.gather(torch.cat([features, labels[:, None].float()], 1), grad=True)
        every, known = both[:, :-1], both[:, -1]
        alike = (known[:, None] == known).float()
        (every @ every.T - alike).pow(2).mean().backward()
        optimizer.step()
if len(sys.argv) > 1 and tt.is_main():
    torch.save(model.state_dict(), sys.argv[1])
