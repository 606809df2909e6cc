"""A loop of accelerate with two models, a frozen third one and a validation; each is prepared by a call of its own."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from topotrain.compat.integrations.accelerate import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
options = parser.parse_args()
torch.manual_seed(4)
x = torch.randn(46, 5)
y = x.prod(1, keepdim=True)
accelerator = Accelerator(cpu=True)
teacher = accelerator.prepare(nn.Linear(5, 1).requires_grad_(False))
learner, critic = (nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 1)) for _ in range(2))
learner = accelerator.prepare(learner)
optimizer = accelerator.prepare(torch.optim.SGD(learner.parameters(), lr=0.1, momentum=0.9))
loader = accelerator.prepare(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True))
critic, other = accelerator.prepare(critic, torch.optim.Adam(critic.parameters(), lr=0.01))
rows = accelerator.prepare(DataLoader(TensorDataset(x, y), batch_size=20))
found = []
for _ in range(3):
    for a, b in loader:
        other.zero_grad()
        accelerator.backward((critic(a) - (learner(a) - b).square().detach()).square().mean())
        other.step()
        optimizer.zero_grad()
        predicted = learner(a)
        accelerator.backward((predicted - b).square().mean() + 0.1 * (predicted - teacher(a)).square().mean())
        optimizer.step()
    with torch.no_grad():
        found.append(torch.stack([(learner(a) - b).square().sum() for a, b in rows]).sum())
accelerator.save({**nn.ModuleList([learner, critic]).state_dict(), "validation": torch.stack(found)}, options.out)
