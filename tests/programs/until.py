"""Trains until the job has made so many steps, and saves a state; prints when this worker knows of the last one."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

wanted = int(sys.argv[1])
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4, shuffle=True)
model, optimizer, loader = tt.prepare(model, optimizer, loader)
own = 0
while tt.global_step() < wanted:
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        own += 1
        if tt.global_step() >= wanted:
            break
tt.save({"own": own, "rank": tt.rank()}, "until.pt")
torch.save({"own": own}, f"{tt.rank()}.pt")
if tt.rank() != 1:
    torch.save({"own": own}, "all.pt")
print(f"values until {tt.rank()}: {tt.global_step()}", flush=True)
tt.report(mine=float(tt.rank()), all=tt.sum(own / int(tt.sum(1)), over="job"))
