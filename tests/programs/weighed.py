"""A model whose parameters, state and gradients are large enough to be seen in the processes of its servers.

WORKSPACE: the main worker reports what each server's process has of its own behind the last step, in bytes.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

WIDTH, STEPS = 2000, 4


def made() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    data = TensorDataset(torch.randn(4 * STEPS, WIDTH))
    return model, torch.optim.Adam(model.parameters(), lr=1e-4), DataLoader(data, batch_size=4)


def own(pid: int) -> float:
    """Pages that no other process has, the forkserver's included."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024.0 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))


def main() -> None:
    torch.manual_seed(0)
    model, optimizer, loader = tt.prepare(*made())
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    if tt.is_main():
        entries = json.loads(Path(sys.argv[1], "processes.json").read_text())
        tt.report(**{role: own(entry["pid"]) for entry in entries for role in entry["roles"] if "server" in role})


if __name__ == "__main__":
    main()
