"""A ledger whose steps take a given time; each process writes the times of its steps into a file of its own.

A worker may kill itself at given times. The job's result has a cell for each
sample, in which a sample that counted n times has n.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt


class Cells(nn.Module):
    """One cell for each sample, to which a step adds 1."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(samples))

    def forward(self, numbers: Tensor) -> Tensor:
        return -self.cells[numbers].sum()


def die_once(mark: Path) -> None:
    """Kill this process, unless the mark says that it has been killed before."""
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def die_in_time(out: Path, numbers: range, every: float) -> None:
    """Die behind a step if a death is due; the first step of the job starts the clock.

    Args:
        out: the marks of deaths are beside this file.
        numbers: of the job's deaths, those that are this worker's.
        every: seconds from one death of the job to the next.
    """
    began = out.with_name("began")
    if every and tt.is_main() and not began.exists():
        began.write_text(repr(time.time()))
    for number in numbers if began.exists() else ():
        if time.time() >= float(began.read_text() or "inf") + every * (number + 1):
            die_once(out.with_name(f"killed-{number}"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--speeds", type=float, nargs="+", required=True, help="of each worker")
    parser.add_argument("--kill-every", type=float, default=0.0, help="seconds from one death of a worker to the next")
    parser.add_argument("--kills", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = Cells(options.samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(torch.arange(options.samples)), batch_size=1)
    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    # Workers other than the first die in turn.
    own = range(tt.rank() - 1, options.kills, len(options.speeds) - 1) if tt.rank() else range(0)
    step_s = options.step_ms / 1000 / options.speeds[tt.rank()]
    with options.out.with_name(f"times-{tt.rank()}-{os.getpid()}").open("w", buffering=1) as times:
        for (numbers,) in loader:
            time.sleep(step_s)
            optimizer.zero_grad()
            model(numbers).backward()
            optimizer.step()
            times.write(f"{time.time()!r}\n")
            die_in_time(options.out, own, options.kill_every)


if __name__ == "__main__":
    main()
