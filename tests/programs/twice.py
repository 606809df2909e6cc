"""A synchronous job in which servers are killed in the middle of a backward; nothing in it depends on that.

WORKSPACE [STEP:SERVER ...]: the process in the seat of server 0/SERVER is killed while the main worker computes its
gradients of step STEP. Before that all workers wait until the job says that every server has two copies again.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from ledger import wait_for
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

workspace = Path(sys.argv[1])
kills = {int(step): f"server 0/{server}" for step, _, server in (word.partition(":") for word in sys.argv[2:])}
due = ""


def entries() -> list[dict[str, object]]:
    path = workspace / "processes.json"
    return json.loads(path.read_text()) if path.exists() else []


def whole(deaths: int) -> bool:
    """With two servers each death takes one copy of both."""
    servers = [entry for entry in entries() if entry["servers"]]
    return bool(servers) and all(entry["second"] == deaths for entry in servers)


def meet(step: int) -> None:
    """All workers are between two steps."""
    global due
    met = workspace / f"met-{step}"
    if tt.is_main():
        deaths = sum(other < step for other in kills)
        wait_for(lambda: whole(deaths))
        due = kills[step]
        met.touch()
    wait_for(met.exists)


def kill(gradient: torch.Tensor) -> None:
    global due
    if due:
        (pid,) = (entry["pid"] for entry in entries() if due in entry["roles"])  # type: ignore[operator]
        due = ""
        os.kill(int(pid), signal.SIGKILL)  # type: ignore[call-overload]


torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
data = TensorDataset(torch.randn(192, 16), torch.randint(0, 4, (192,)))
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = tt.prepare(model, optimizer, loader)
model[1].weight.register_hook(kill)
steps = 0
for _ in range(2):
    for inputs, targets in loader:
        steps += 1
        if steps in kills:
            meet(steps)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()
