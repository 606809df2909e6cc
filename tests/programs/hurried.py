"""A small model whose workers have speeds of their own, and of which one may kill itself once.

--slow N: worker number N pauses at each step. --die N: worker number N kills itself at its fifth step, unless FOLDER
has the file "dead" already; the main worker waits at its eighth step until that worker has made a step in its next
life.
--chance: the gradients have random parts that no seed decides.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--slow", type=int, default=-1)
parser.add_argument("--die", type=int, default=-1)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--width", type=int, default=24)
parser.add_argument("--chance", action="store_true")
options = parser.parse_args()
dead, back = options.folder / "dead", options.folder / "back"

generator = torch.Generator().manual_seed(4)
x = torch.randn(144, 12, generator=generator)
data = TensorDataset(x, x[:, :4].argmax(dim=1))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, options.width), nn.ReLU(), nn.Linear(options.width, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
model, optimizer, loader = tt.prepare(model, optimizer, DataLoader(data, batch_size=6, shuffle=True))
steps, mortal = 0, tt.rank() == options.die
for _ in tt.epochs(options.epochs):
    for a, b in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(a), b)
        if options.chance:
            loss = loss * (1 + os.urandom(1)[0] / 256)
        loss.backward()
        steps += 1
        if mortal and steps == 5 and not dead.exists():
            dead.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if tt.rank() == options.slow:
            time.sleep(0.01)
        until = time.monotonic() + 30
        while tt.is_main() and options.die >= 0 and steps == 8 and not back.exists() and time.monotonic() < until:
            time.sleep(0.01)
        optimizer.step()
        if mortal and dead.exists():
            back.touch()
if mortal:
    back.touch()  # the others may have read all data by then
