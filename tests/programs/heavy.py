"""Two halves of a chain whose activations, parameters and optimizer state are large enough to be seen in a process."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

WIDTH, DEPTH, BATCH = 1600, 4, 1024
DATA = BATCH * WIDTH * 4
PARTS = """
partition { match: "first" partition_dim: -1 location: 0 }
partition { match: "second" partition_dim: -1 location: 1 }
"""


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = half(), half()

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = self.second(self.first(x))
        return whole


def half() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def made() -> tuple[nn.Module, DataLoader[Any]]:
    data = TensorDataset(torch.randn(BATCH, WIDTH))
    return Chain(), DataLoader(data, BATCH)


def peak() -> float:
    """The most that this process has had in memory, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main() -> None:
    torch.manual_seed(0)
    model, loader = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    for _ in tt.epochs(1):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    tt.report(peak=peak())


if __name__ == "__main__":
    main()
