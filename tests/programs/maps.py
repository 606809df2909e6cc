"""Writes down which memory its parameters lie in: the inode of the mapping, which names a piece of shared memory."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt
from topotrain.front.context import current


def inode(address: int) -> str:
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, *_, number = line.split()[:5]
            lo, hi = (int(end, 16) for end in span.split("-"))
            if lo <= address < hi:
                return number
    return "none"


torch.manual_seed(0)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
model, optimizer, loader = tt.prepare(model, optimizer, DataLoader(data, batch_size=8))
found = {inode(p.data_ptr()) for p in model.parameters()}
here = current()
assert here is not None
(here.workspace / f"map-{tt.rank()}").write_text(" ".join(sorted(found)))
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
