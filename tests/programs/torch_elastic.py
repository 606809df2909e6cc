"""DistributedDataParallel that can be started again: it goes on after the last step that rank 0 has saved.

Plain PyTorch: topotrain is only behind `torchrun --rdzv-backend=redis`. The first rank 1 kills itself at a step.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--kill-at", type=int, default=-1)
options = parser.parse_args()

distributed.init_process_group("gloo")
rank, size = distributed.get_rank(), distributed.get_world_size()
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
saved, first = options.folder / "saved.pt", 0
if saved.exists():
    state = torch.load(saved)
    first = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
parallel = DistributedDataParallel(model)
with (options.folder / "lives").open("a") as lives:
    lives.write(f"rank {rank} of {size} from step {first}\n")
for step in range(first, options.steps):
    dead = options.folder / "dead"
    if rank == 1 and step == options.kill_at and not dead.exists():
        dead.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    mine = x.chunk(size)[rank]
    optimizer.zero_grad()
    parallel(mine).square().mean().backward()
    optimizer.step()
    if rank == 0:
        state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, saved.with_suffix(".new"))
        saved.with_suffix(".new").rename(saved)
distributed.destroy_process_group()
# Without Python's own end: the reducer of DistributedDataParallel would hold the interpreter's lock while it joins a
# thread of Gloo that may wait for this lock.
os._exit(0)
