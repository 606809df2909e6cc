"""A ledger, see ledger.py, whose main worker has another group leave the job and come again, and a third one join it.

WORKSPACE: at its third step worker (0,0) has group 1 leave; at its sixth it has groups 1 and 2 join, and waits until
each has made a step.
"""

import select
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from ledger import Ledger
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt
from topotrain.launch.attendance import Wish
from topotrain.launch.door import ask

EPOCHS, SAMPLES = 3, 96
workspace = Path(sys.argv[1])
left = workspace / "left"


def wait_for(condition: Callable[[], object]) -> None:
    while not condition():
        select.select([], [], [], 0.01)


torch.manual_seed(3)
model = Ledger(SAMPLES)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=4, shuffle=True)
model, optimizer, loader = tt.prepare(model, optimizer, loader)
steps = 0
for _ in tt.epochs(EPOCHS):
    for (numbers,) in loader:
        optimizer.zero_grad()
        model(numbers).backward()
        optimizer.step()
        steps += 1
        if left.exists():
            Path(workspace, f"back {tt.rank()}").touch()
        if tt.is_main() and steps == 3:
            ask(workspace, Wish("leave", 1, 60.0))
            left.touch()
        if tt.is_main() and steps == 6:
            for group in (1, 2):
                ask(workspace, Wish("join", group))
            wait_for(lambda: Path(workspace, "back 1").exists() and Path(workspace, "back 2").exists())
