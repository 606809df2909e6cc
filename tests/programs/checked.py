"""A script for `topotrain check`: its variant makes it differ from plain Python in one way."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

variant = sys.argv[1]
torch.manual_seed(0)
x = torch.randn(48, 6)
y = x.sum(1, keepdim=True).sin()
middle = {"dropout": nn.Dropout(0.3), "norm": nn.BatchNorm1d(16)}.get(variant, nn.Tanh())
model = nn.Sequential(nn.Linear(6, 16), middle, nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(x, y), batch_size=12)
other = DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True)
model, optimizer, loader = tt.prepare(model, optimizer, loader)
if variant == "hook":
    # Of activations, which are those of a worker's share. Hooks of parameters are given the group's mean.
    middle.register_full_backward_hook(lambda module, inputs, outputs: tuple(g.clamp(-0.002, 0.002) for g in inputs))


def loss_of(a, b):
    out = model(a)
    if variant == "sum":
        return F.mse_loss(out, b, reduction="sum")
    if variant == "pairs":
        return (torch.cdist(out, out) - torch.cdist(b, b)).square().mean()
    if variant == "random":
        return F.mse_loss(model(a + 0.1 * torch.randn_like(a)), b)
    if variant == "unstable":
        return F.mse_loss((50 * out).sin(), b)  # a step multiplies rounding by some ten
    return F.mse_loss(out, b)


for _ in tt.epochs(2):
    for a, b in other if variant == "loader" else loader:
        optimizer.zero_grad()
        loss = loss_of(a, b)
        loss.backward()
        optimizer.step()
tt.report(loss=float(loss) if variant == "share" else (lambda: float(loss_of(x, y))))
if variant == "fails":
    raise ValueError("the script's own error")
