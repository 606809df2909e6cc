"""A few steps with an optimizer that unpickles."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt
from tests.programs.unpickler import Unpickling

model = nn.Linear(3, 1)
data = DataLoader(TensorDataset(torch.ones(12, 3)), batch_size=2)
model, optimizer, loader = tt.prepare(model, Unpickling(model.parameters(), lr=0.1), data)
for (x,) in loader:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
