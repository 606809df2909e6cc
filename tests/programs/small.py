"""A small model on a few samples, with whatever optimizer the command line names ("conf": the updater block's)."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", default="SGD")
parser.add_argument("--epochs", type=int, default=6)
options = parser.parse_args()

generator = torch.Generator().manual_seed(4)
x = torch.randn(96, 12, generator=generator)
data = TensorDataset(x, x[:, :4].argmax(dim=1))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))
if options.optimizer == "conf":
    optimizer = None
elif options.optimizer == "Muon":
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01)
else:
    optimizer = getattr(torch.optim, options.optimizer)(model.parameters(), lr=0.02)
model, optimizer, loader = tt.prepare(model, optimizer, DataLoader(data, batch_size=12, shuffle=True))


def loss() -> float:
    model.eval()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x), data.tensors[1]))


for _ in tt.epochs(options.epochs):
    for a, b in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
if tt.is_main():
    print("main says hello")
else:
    print("others are not heard")
tt.report(loss=loss, epochs=options.epochs)
