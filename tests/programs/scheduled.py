"""Trains with a schedule over the job, and writes each worker's progress behind every step."""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="where each worker writes")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--slow", type=int, default=-1, help="the worker whose steps take longer")
    given = parser.parse_args()
    torch.manual_seed(3)
    model: nn.Module = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(480, 4)
    loader = DataLoader(TensorDataset(x, x[:, :2] * 2), batch_size=4, shuffle=True)
    schedule = LambdaLR(optimizer, lambda _: 1 - tt.progress())
    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    seen = []
    for _ in tt.epochs(given.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            # computing, in place of a larger model
            time.sleep(0.02 if tt.rank() == given.slow else 0.002)
            optimizer.step()
            schedule.step()
            seen.append((tt.progress(), optimizer.param_groups[0]["lr"]))
    (given.folder / f"{tt.rank()}.json").write_text(json.dumps(seen))
