"""Two models with an optimizer each: a GAN, or two ledgers (see ledger.py), of which every batch has two steps.

`--die RANK --at STEP`: the process of this worker kills itself once, behind both steps with a batch. As long as the
file `--hold` is there, the main worker stops between its two steps with batch `--at`, for somebody to kill it.
"""

import argparse
import os
import signal
import threading
from pathlib import Path

import torch
from ledger import Ledger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

SAMPLES, BATCH = 96, 4


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 6))

    def forward(self, noise: Tensor) -> Tensor:
        return self.layers(noise)


class Judge(nn.Module):
    """Dropout draws random numbers, and a batch norm has statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 30), nn.BatchNorm1d(30), nn.Dropout(0.3), nn.ReLU(), nn.Linear(30, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def real_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    spread = torch.randn(SAMPLES, 6, generator=generator) * torch.arange(1.0, 7.0)
    return TensorDataset(torch.arange(SAMPLES), spread + 2.0, torch.randn(SAMPLES, 3, generator=generator))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["gan", "ledger"])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--die", type=int, default=-1)
    parser.add_argument("--lived", type=Path, default=Path("lived"))
    parser.add_argument("--hold", type=Path, default=Path("nothing"))
    parser.add_argument("--at", type=int, default=30)
    given = parser.parse_args()
    torch.manual_seed(5)
    ledgers = given.kind == "ledger"
    first: nn.Module = Ledger(SAMPLES) if ledgers else Generator()
    second: nn.Module = Ledger(SAMPLES) if ledgers else Judge()
    if ledgers:
        opt_first: torch.optim.Optimizer = torch.optim.SGD(first.parameters(), lr=1.0)
        opt_second: torch.optim.Optimizer = torch.optim.SGD(second.parameters(), lr=1.0)
    else:
        opt_first = torch.optim.Adam(first.parameters(), lr=0.01, betas=(0.5, 0.9))
        opt_second = torch.optim.SGD(second.parameters(), lr=0.05, momentum=0.5)
    loader = DataLoader(real_data(), batch_size=BATCH, shuffle=True)
    first, second, opt_first, opt_second, loader = tt.prepare(first, second, opt_first, opt_second, loader)
    decay = [
        torch.optim.lr_scheduler.StepLR(each, 1, gamma=1.0 if ledgers else 0.7) for each in (opt_first, opt_second)
    ]
    batches, still = 0, threading.Event()

    def between(both: bool) -> None:
        if batches == given.at and tt.rank() == given.die and both and not given.lived.exists():
            given.lived.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if batches == given.at and not both and given.die < 0:
            print("holding" if given.hold.exists() else "there", flush=True)
            if given.hold.exists() and tt.is_main():
                still.wait()

    softplus = nn.functional.softplus
    for _ in tt.epochs(given.epochs):
        for numbers, x, noise in loader:
            batches += 1
            opt_second.zero_grad()
            if ledgers:
                second(numbers).backward()
            else:
                softplus(-second(x)).mean().backward()
                softplus(second(first(noise).detach())).mean().backward()
            still.wait(0.005)  # computing, in place of a larger model
            opt_second.step()
            between(both=False)
            opt_first.zero_grad()
            # Gradients of the second model are left, as in most scripts of a GAN.
            (first(numbers) + second(numbers) if ledgers else softplus(-second(first(noise))).mean()).backward()
            opt_first.step()
            between(both=True)
        for each in decay:
            each.step()
