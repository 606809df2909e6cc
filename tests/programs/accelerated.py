"""A loop of accelerate with two models, a frozen third one and a validation; each is prepared by a call of its own.

Later epochs read a new loader, and the validation a stream. A state is loaded again, and the main process alone says
when to stop.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from topotrain.compat.integrations.accelerate import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
options = parser.parse_args()
folder = Path(options.out).with_suffix(".states")


class Stream(IterableDataset):
    def __iter__(self):
        return zip(x, y, strict=True)


torch.manual_seed(4)
x = torch.randn(46, 5)
y = x.prod(1, keepdim=True)
accelerator = Accelerator(cpu=True)
teacher = accelerator.prepare(nn.Linear(5, 1).requires_grad_(False))
learner, critic = (nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 1)) for _ in range(2))
learner = accelerator.prepare(learner)
optimizer = accelerator.prepare(torch.optim.SGD(learner.parameters(), lr=0.1, momentum=0.9))
loader = accelerator.prepare(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True))
critic, other = accelerator.prepare(critic, torch.optim.Adam(critic.parameters(), lr=0.01))
rows = accelerator.prepare(DataLoader(Stream(), batch_size=20))
with accelerator.main_process_first():
    if accelerator.is_main_process:
        folder.mkdir()
        (folder / "rate").write_text("0.12")
    optimizer.param_groups[0]["lr"] = json.loads((folder / "rate").read_text())
found = []
for epoch in range(4):
    if epoch == 1:
        loader = accelerator.prepare(DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True))
    if epoch == 3:
        accelerator.load_state(folder)
    for number, (a, b) in enumerate(loader):
        other.zero_grad()
        accelerator.backward((critic(a) - (learner(a) - b).square().detach()).square().mean())
        other.step()
        optimizer.zero_grad()
        predicted = learner(a)
        accelerator.backward((predicted - b).square().mean() + 0.1 * (predicted - teacher(a)).square().mean())
        optimizer.step()
        if epoch == 3 and number == 1 and accelerator.is_main_process:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    with torch.no_grad():
        found.append(torch.stack([(learner(a) - b).square().sum() for a, b in (*rows, *loader)]).sum())
    if epoch == 1:
        accelerator.save_state(folder)
accelerator.save({**nn.ModuleList([learner, critic]).state_dict(), "validation": torch.stack(found)}, options.out)
