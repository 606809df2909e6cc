"""Trains slowly, logs values, and speaks by `logging`: --steps, --step-s, --level of the logger "topotrain", --idle."""

import argparse
import logging
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--step-s", type=float, default=0.0)
parser.add_argument("--level", default="")
parser.add_argument("--idle", action="store_true", help="Make no step.")
options = parser.parse_args()

if options.level:
    logging.getLogger("topotrain").setLevel(options.level)
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.ones(4 * options.steps, 4), torch.zeros(4 * options.steps, 2))
model, optimizer, loader = tt.prepare(model, optimizer, DataLoader(data, batch_size=4))
print("prepared")
step = 0
for _ in tt.epochs(0 if options.idle else 1):
    for x, y in loader:
        time.sleep(options.step_s)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        step += 1
        tt.log(double=2.0 * step)
        print(f"\r{step} steps", end="", file=sys.stderr)
print("\ntrained", file=sys.stderr)
