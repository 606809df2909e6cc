"""The small model where `tt.device()` says; the device and the scaler's scale are printed."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

device = tt.device()
generator = torch.Generator().manual_seed(4)
x = torch.randn(96, 12, generator=generator)
data = TensorDataset(x, x[:, :4].argmax(dim=1))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
model, optimizer, loader, scaler = tt.prepare(model, optimizer, DataLoader(data, batch_size=12, shuffle=True), scaler)


def accuracy() -> float:
    with torch.no_grad():
        return float((model(x.to(device)).argmax(1).cpu() == data.tensors[1]).float().mean())


for _ in tt.epochs(20):
    for a, b in loader:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16, enabled=device.type == "cuda"):
            loss = nn.functional.cross_entropy(model(a.to(device)), b.to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
print(f"on {next(model.parameters()).device}")
tt.report(accuracy=accuracy)
