"""A ledger, see ledger.py, of whose job one process is killed once.

WORKSPACE VICTIM KILLER STEP [back] [snapshot] [late] [freeze]: VICTIM ("server 0/0") is killed when worker number
KILLER has done STEP steps. With `back` the main worker waits at its second step until the killer has made a step in its
next life; with `snapshot` the killer waits for a snapshot of the job before it kills; `late`: it kills only when
everything is trained, and the result is about to be saved; `freeze`: it stops VICTIM, and lets it be.
"""

import json
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from ledger import Ledger
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

EPOCHS, SAMPLES = 3, 96
workspace, victim, killer, at, *wishes = sys.argv[1:]
kills = tt.rank() == int(killer)
killed, back = Path(workspace, "killed"), Path(workspace, "back")


def wait_for(condition: Callable[[], object]) -> None:
    while not condition():
        select.select([], [], [], 0.01)


def kill() -> None:
    processes = Path(workspace, "processes.json")
    wait_for(processes.exists)
    if "snapshot" in wishes:
        wait_for(lambda: list(Path(workspace).glob("manifests/*/manifest.json")))
    killed.touch()
    entries = json.loads(processes.read_text())
    number = signal.SIGSTOP if "freeze" in wishes else signal.SIGKILL
    os.kill(next(entry["pid"] for entry in entries if victim in entry["roles"]), number)


def measured() -> float:
    if kills and not killed.exists():
        kill()
    return 1.0


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
        if kills and killed.exists():
            back.touch()
        elif kills and steps == int(at) and "late" not in wishes:
            kill()
        if "back" in wishes and tt.is_main() and steps == 2:
            wait_for(back.exists)
if "late" in wishes:
    tt.report(trained=measured)
