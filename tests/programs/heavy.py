"""Two halves of a chain whose activations, parameters and optimizer state are large enough to be seen in a process.

The process gives all large memory back at once. By itself glibc keeps some, and how much depends on which of its
threads asked for memory when: tens of megabytes more or less from run to run, which no plan can know.

The argument `empty` makes a model of next to nothing: what its process takes beside it, every process takes.
"""

import ctypes
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

WIDTH, DEPTH, BATCH, STEPS = 1600, 4, 256, 2
DATA = BATCH * WIDTH * 4
PARTS = """
partition { match: "first" partition_dim: -1 location: 0 }
partition { match: "second" partition_dim: -1 location: 1 }
"""


class Chain(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = half(width), half(width)

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = self.second(self.first(x))
        return whole


def half(width: int) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(width, width), nn.Tanh())))


def made(width: int = WIDTH) -> tuple[nn.Module, DataLoader[Any]]:
    data = TensorDataset(torch.randn(BATCH, width))
    return Chain(width), DataLoader(data, BATCH)


def memory(name: str) -> float:
    """What this process has in memory now (VmRSS), of files (RssFile) or of its own (RssAnon), or has had at its most
    (VmHWM), bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def give_back_at_once() -> None:
    """Every piece of a megabyte or more is mapped for itself; said once, the bound no longer moves."""
    assert ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, 1 << 20)


_M_MMAP_THRESHOLD = -3


def main() -> None:
    give_back_at_once()
    itself, files, own = memory("VmRSS"), memory("RssFile"), memory("RssAnon")
    torch.manual_seed(0)
    model, loader = made(16 if "empty" in sys.argv else WIDTH)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    for _ in tt.epochs(STEPS):  # the optimizer's state stands beside activations from the second step on
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    grown = {"files": memory("RssFile") - files, "own": memory("RssAnon") - own}
    tt.report(itself=itself, apart=itself - files, peak=memory("VmHWM"), **grown)


if __name__ == "__main__":
    main()
