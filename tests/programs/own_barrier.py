"""A script whose workers wait for each other in a way of their own: WHERE, FOLDER.

WHERE: after `prepare`, in the first "forward", or between "backward" and step. Reports the sum of the parameters.
"""

import sys

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

where, folder = sys.argv[1:]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(48, 8), torch.randn(48, 1)), batch_size=16)
distributed.init_process_group("gloo", init_method=f"file://{folder}/store-{where}", rank=tt.rank(), world_size=2)
model, optimizer, loader = tt.prepare(model, optimizer, loader)
if where == "prepare":
    distributed.barrier()
for x, y in loader:
    loss = nn.functional.mse_loss(model(x), y)
    if where == "forward":
        distributed.barrier()
    loss.backward()
    if where == "backward":
        distributed.barrier()
    optimizer.step()
    optimizer.zero_grad()
tt.report(total=float(sum(p.double().sum() for p in model.parameters())))
