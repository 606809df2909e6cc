"""A validation over all workers decides when to stop.

    python examples/early_stopping.py
    topotrain run examples/conf/allreduce.conf examples/early_stopping.py     # the same figures

The learning rate, the file of the best parameters and the last epoch are the same on all workers.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

torch.manual_seed(0)
x = torch.randn(93, 6)
y = x.sum(1, keepdim=True).sin()
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
loader = DataLoader(TensorDataset(x[:60], y[:60]), batch_size=12, shuffle=True)
model, optimizer, loader = tt.prepare(model, optimizer, loader)
best, waited, epochs = float("inf"), 0, 0
for epoch in tt.epochs(30):
    epochs = epoch + 1
    model.train()
    total, seen = 0.0, 0
    for a, b in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(a), b)
        loss.backward()
        optimizer.step()
        total, seen = total + loss.item() * len(a), seen + len(a)
    training = tt.sum(total) / tt.sum(seen)  # of all samples, and not of the share
    model.eval()
    part = slice(60 + tt.rank() % tt.sum(1), None, tt.sum(1))  # every worker validates a part
    with torch.no_grad():
        mine = nn.functional.mse_loss(model(x[part]), y[part]).item()
    validation = tt.mean(mine, weight=len(x[part]))
    schedule.step(validation)
    waited = 0 if validation < best else waited + 1
    if validation < best:
        best = validation
        tt.save(tt.state_dict(model), "best.pt")
    if waited == 6:  # the same epoch on all workers
        break
tt.report(best=best, training=training, epochs=epochs)
