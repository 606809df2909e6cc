"""The script of the jobs whose files are kept in this folder: some of them were written by earlier releases."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
x = torch.randn(48, 6)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
model, optimizer, loader = tt.prepare(model, optimizer, loader)
for _ in tt.epochs(int(sys.argv[1])):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    scheduler.step()
tt.report(size=lambda: float(sum(p.detach().abs().sum() for p in model.parameters())))
