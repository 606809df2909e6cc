"""Writes down which memory its parameters lie in: the inode of the mapping, and the first byte in it that they use."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt
from topotrain.training.context import current, use


def place(address: int) -> str:
    """Piece of shared memory, and byte in it."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, start, _, number = line.split()[:5]
            lo, hi = (int(end, 16) for end in span.split("-"))
            if lo <= address < hi:
                return f"{number}:{int(start, 16) + address - lo}"
    return "none"


torch.manual_seed(0)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
model, optimizer, loader = tt.prepare(model, optimizer, DataLoader(data, batch_size=8))
use()
found = {place(min(p.data_ptr() for p in model.parameters()))}
here = current()
assert here is not None
(here.workspace / f"map-{tt.rank()}").write_text(" ".join(sorted(found)))
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
