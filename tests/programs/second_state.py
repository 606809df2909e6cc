"""A network of which one worker kills itself once, behind its fifth step. FOLDER NUMBER, of the worker.

In its next life it writes into FOLDER/steps how many steps the state of its Adam has behind its first one. All others
hold their sixth step until then, so they live, and have made five steps.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from ledger import wait_for
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

folder, dies = Path(sys.argv[1]), tt.rank() == int(sys.argv[2])
died, found = folder / "died", folder / "steps"
torch.manual_seed(0)
model = nn.Linear(8, 2)
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(192, 8), torch.randint(2, (192,))), batch_size=4)
again = died.exists()
wrapped, optimizer, loader = tt.prepare(model, optimizer, loader)
for number, (inputs, targets) in enumerate(loader, 1):
    if number == 6 and not dies:
        wait_for(found.exists)
    optimizer.zero_grad()
    F.cross_entropy(wrapped(inputs), targets).backward()
    optimizer.step()
    if dies and again and number == 1:
        written = folder / "written"
        written.write_text(str(int(optimizer.state[model.weight]["step"])))
        written.rename(found)
    if dies and not again and number == 5:
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
