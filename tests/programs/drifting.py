"""Trains with comparisons of the copies before each step; worker 1 loses a bit of its copy behind step 3."""

import torch

import topotrain as tt
from topotrain.extensions.drift import drift_check
from topotrain.training import context

drift_check.PERIOD_S, drift_check.SHARE = 0.0, float("inf")
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.Adam(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 4))
model, optimizer, loader = tt.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
for number, (x, y) in enumerate(loader):
    here = context.current()
    if number == 3 and here is not None and here.me.index == 1:
        here.worker.buffers.view("params", 0).view(torch.uint8)[0, 5] ^= 4
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
