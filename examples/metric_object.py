"""A metric of torchmetrics over all workers.

    python examples/metric_object.py
    topotrain run examples/conf/allreduce.conf examples/metric_object.py     # the same error

Each worker updates it with its share, and `tt.sum` adds up its states.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

import topotrain as tt

torch.manual_seed(0)
x = torch.randn(93, 6)
y = x.sum(1, keepdim=True).sin()
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x[:60], y[:60]), batch_size=12, shuffle=True)
held_out = DataLoader(TensorDataset(x[60:], y[60:]), batch_size=8)
model, optimizer, loader = tt.prepare(model, optimizer, loader)
metric = MeanSquaredError()
for _ in tt.epochs(2):
    for a, b in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()
    metric.reset()
    with torch.no_grad():
        for a, b in tt.split(held_out):
            metric.update(model(a), b)
    for name, state in metric.metric_state.items():  # those of this metric are sums; `tt.gather` is for lists
        setattr(metric, name, tt.sum(state))
    error = float(metric.compute())
tt.report(error=error)
