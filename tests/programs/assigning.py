"""A script that changes parameters itself: before each step, and at the begin of each epoch.

Rule: the result of a job is that of plain Python, and no change is made twice or left out, whichever process dies.
With `--hold FILE`, the main worker stops behind step `--at` as long as the file is there, for somebody to kill it. With
`--once FILE`, worker 1 kills itself in that step, right behind the change that comes before it; the file says that this
has happened. With `--job WORKSPACE`, it kills server 0/0 instead.
"""

import argparse
import json
import os
import signal
import threading
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["before"])
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--hold", type=Path, default=Path("nothing"))
parser.add_argument("--at", type=int, default=30)
parser.add_argument("--once", type=Path)
parser.add_argument("--job", type=Path)
given = parser.parse_args()


def server(job: Path) -> int:
    """The process of server 0/0."""
    entries = json.loads((job / "processes.json").read_text())
    found: int = next(entry["pid"] for entry in entries if "server 0/0" in entry["roles"])
    return found


def shrink() -> None:
    """Each time counts: values that are shrunk twice are others."""
    with tt.assign(model), torch.no_grad():
        for p in model.parameters():
            p.mul_(0.995)


torch.manual_seed(5)
model: nn.Module = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 1))
optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=False)
data = TensorDataset(torch.randn(96, 6), torch.randn(96, 1))
loader = DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = tt.prepare(model, optimizer, loader)
shrink()
steps, still = 0, threading.Event()
for _ in tt.epochs(given.epochs):
    shrink()
    for x, y in loader:
        optimizer.zero_grad()
        shrink()
        if given.once is not None and tt.rank() == 1 and steps == given.at and not given.once.exists():
            given.once.touch()
            os.kill(os.getpid() if given.job is None else server(given.job), signal.SIGKILL)
        nn.functional.mse_loss(model(x), y).backward()
        still.wait(0.005 if given.hold.name != "nothing" else 0)  # computing, in place of a larger model
        optimizer.step()
        steps += 1
        if steps == given.at:
            print("holding" if given.hold.exists() else "there", flush=True)
            if given.hold.exists() and tt.is_main():
                still.wait()
