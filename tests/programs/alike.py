"""The training of `resuming.py net`, in which each worker writes down what it has behind each step.

FOLDER EPOCHS [VICTIM STEP]: worker number N adds lines to the file alike-N, with a digest of the values and of the
optimizer's state. In the first life of worker number VICTIM it is killed behind its step STEP.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
from resuming import BATCH, SAMPLES, Net
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

folder, epochs, *rest = sys.argv[1:]
victim, at = map(int, rest) if rest else (-1, 0)
torch.manual_seed(5)
model = Net()
optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
data = TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 6), torch.randn(SAMPLES))
loader = DataLoader(data, batch_size=BATCH, shuffle=True)
model, optimizer, loader = tt.prepare(model, optimizer, loader)


def digest() -> str:
    found = hashlib.sha256()
    states = optimizer.state_dict()["state"].values()
    for tensor in (*model.parameters(), *(value for state in states for value in state.values())):
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


steps, lines = 0, Path(folder, f"alike-{tt.rank()}")
with lines.open("a") as file:
    file.write("start\n")
    for _ in tt.epochs(int(epochs)):
        for batch in loader:
            optimizer.zero_grad()
            model.loss(*batch).backward()
            optimizer.step()
            steps += 1
            file.write(f"{digest()}\n")
            file.flush()
            if tt.rank() == victim and steps == at and lines.read_text().count("start") == 1:
                os.kill(os.getpid(), signal.SIGKILL)
