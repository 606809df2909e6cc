"""A linear model of any dtype, by SGD: trained as the plain script trains it, or not at all."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float32")
parser.add_argument("--threads", type=int, default=0)
options = parser.parse_args()
if options.threads:
    torch.set_num_threads(options.threads)
dtype = getattr(torch, options.dtype)
exact = torch.complex128 if dtype.is_complex else torch.float64
chance = torch.Generator().manual_seed(3)
x = torch.randn(240, 13, generator=chance, dtype=exact)
y = x @ torch.randn(13, 11, generator=chance, dtype=exact)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(13, 11, dtype=dtype))
        self.register_buffer("seen", torch.zeros(11, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return x @ self.w


model = Linear()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(TensorDataset(x.to(dtype), y.to(dtype)), batch_size=20)
model, optimizer, loader = tt.prepare(model, optimizer, loader)
for _ in tt.epochs(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        ((model(inputs) - targets).abs().pow(2).mean() * 4).backward()
        optimizer.step()
model.eval()
tt.report(loss=lambda: float((model(x.to(dtype)) - y.to(dtype)).abs().pow(2).mean()))
