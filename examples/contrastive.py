"""A loss over pairs of samples.

    python examples/contrastive.py
    topotrain run examples/conf/allreduce.conf examples/contrastive.py     # the same loss

`tt.gather` gives each worker the features of the whole batch, with gradients.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

torch.manual_seed(0)
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(40, 8), torch.randint(3, (40,)))
model, optimizer, loader = tt.prepare(model, optimizer, DataLoader(data, batch_size=16, shuffle=True))
for _ in tt.epochs(3):
    for images, labels in loader:
        optimizer.zero_grad()
        features = nn.functional.normalize(model(images), dim=1)
        both = tt.gather(torch.cat([features, labels[:, None].float()], 1), grad=True)
        features, labels = both[:, :-1], both[:, -1]
        alike = (labels[:, None] == labels).float()
        loss = (features @ features.T - alike).pow(2).mean()
        loss.backward()
        optimizer.step()
tt.report(loss=float(loss.detach()))
