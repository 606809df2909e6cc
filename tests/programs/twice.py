"""A synchronous job in which servers are killed in the middle of a backward; nothing in it depends on that.

WORKSPACE [STEP:SERVER ...]: the process in the place of server 0/SERVER is killed while the main worker computes its
gradients of step STEP; STEP:unit-R: all processes of that unit, and what has started it. Two steps before that all
workers wait until the job says that every server has two copies again.
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
kills = {int(step): who for step, _, who in (word.partition(":") for word in sys.argv[2:])}
due = ""


def entries(of: str = "processes*.json") -> list[dict[str, object]]:
    return [entry for path in workspace.glob(of) for entry in json.loads(path.read_text())]


def whole(deaths: int) -> bool:
    """With two servers each death takes one copy of both; a unit knows of those servers alone that it began with."""
    told = [entry["second"] == deaths for entry in entries() if entry["servers"]]
    return bool(told) and (any(told) if deaths and not (workspace / "processes.json").exists() else all(told))


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
    if due and steps in kills:
        unit = due.startswith("unit-")
        found = entries(due.replace("unit", "processes") + ".json") if unit else entries()
        for entry in found:
            if unit or f"server 0/{due}" in entry["roles"]:  # type: ignore[operator]
                os.kill(int(entry["pid"]), signal.SIGKILL)  # type: ignore[call-overload]
        due = ""


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
        if steps + 2 in kills:
            meet(steps + 2)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()
