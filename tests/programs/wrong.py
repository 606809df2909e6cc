"""Scripts that are wrong, or that end badly, each in its own way."""

import os
import signal
import sys
import time

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, Subset, TensorDataset

import topotrain as tt

how = sys.argv[1]
samples = {"no_samples": 0, "few_samples": 7}.get(how, 64)
torch.manual_seed(0)
data = TensorDataset(torch.randn(samples, 6), torch.randint(0, 3, (samples,)))
model = nn.Linear(6, 4 if how == "schema" and tt.rank() == 1 else 3)
optimizer = torch.optim.LBFGS(model.parameters()) if how == "lbfgs" else torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Subset(data, range(tt.rank(), 64, 2)) if how == "divided" else data, batch_size=16)
weights, probe = nn.Linear(3, 3), nn.Linear(6, 3)
own, of_probe = torch.optim.SGD(weights.parameters(), lr=0.1), torch.optim.SGD(probe.parameters(), lr=0.1)
if how == "no_prepare":
    register_optimizer_step_pre_hook(lambda *_: None)
    optimizer.step()
    sys.exit(0)
model, optimizer, loader = tt.prepare(model, optimizer, loader)
said = False
for epoch in tt.epochs(1_000_000 if how in ("endless", "die") else 3):
    if how == "twice" and epoch == 1:
        tt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if how == "unprepared":
        loader = DataLoader(data, batch_size=16)
    if how == "leave" and tt.is_main() and epoch == 1:
        break
    for step, (x, y) in enumerate(loader):
        if how == "raise" and tt.rank() == 1 and step == 2:
            raise ValueError("a fault of the program")
        if how == "interrupt" and tt.rank() == 1 and step == 2:
            raise KeyboardInterrupt
        if how == "stall" and tt.rank() == 1 and (epoch, step) == (0, 2):
            until = time.monotonic() + 60
            while not os.path.exists(sys.argv[2]) and time.monotonic() < until:
                time.sleep(0.02)
        if how == "exit" and tt.rank() == 1 and step == 2:
            sys.exit(3)
        if how == "die" and tt.rank() == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "backwards" and tt.rank() == 1 and step == 2:
            nn.functional.cross_entropy(model(x), y).backward()
        if how == "steps" and tt.rank() == 1 and epoch == 1:
            break
        if how == "rate" and tt.rank() == 1 and step == 2:
            optimizer.param_groups[0]["lr"] = 0.7
        if how == "edit" and step == 2:
            with torch.no_grad():
                model.weight.mul_(0.9)
        optimizer.zero_grad()
        out = model(x)
        nn.functional.cross_entropy(weights(out) if how == "weights" else out, y).backward()
        optimizer.step()
        if how == "weights":
            own.step()
            # Of whole batches, between two steps: that is the script's own.
            nn.functional.cross_entropy(probe(data.tensors[0]), data.tensors[1]).backward()
            of_probe.step()
        if how == "endless" and tt.is_main() and not said:
            print("training", flush=True)
            said = True
