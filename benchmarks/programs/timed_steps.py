"""A ledger whose steps take a given time; each process writes the times of its steps into a file of its own.

A worker may kill itself at given times, and the first one may kill a server. The job's result has a cell for each
sample, in which a sample that counted n times has n.
"""

import argparse
import json
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


class Deaths:
    """What dies, and when; each death happens once, over all starts of the job.

    Args:
        out: the marks of deaths are beside this file.
        workers: how many the job has.
    """

    def __init__(self, out: Path, workers: int, options: argparse.Namespace) -> None:
        self._out, self._options = out, options
        self._began = 0.0
        self._steps = 0
        # Workers other than the first die in turn.
        self._own = range(tt.rank() - 1, options.kills, workers - 1) if tt.rank() else ()

    def after_step(self) -> None:
        """A step of this process is over."""
        self._steps += 1
        if self._options.server and tt.is_main() and self._steps == self._options.server_at:
            self._kill_server()
        if self._options.kill_every:
            self._kill_own()

    def _marked(self, name: str) -> bool:
        """Mark a death with its time. Returns False where it is marked already."""
        try:
            with open(self._out.with_name(name), "x") as file:
                file.write(repr(time.time()))
        except FileExistsError:
            return False
        return True

    def _kill_server(self) -> None:
        entries = json.loads((self._out.parent / "work" / "processes.json").read_text())
        victim = next(entry["pid"] for entry in entries if self._options.server in entry["roles"])
        if self._marked("killed-server"):
            os.kill(victim, signal.SIGKILL)

    def _kill_own(self) -> None:
        began = self._out.with_name("began")
        if not self._began and not began.exists():
            if tt.is_main():
                began.write_text(repr(time.time()))
            return
        self._began = self._began or float(began.read_text() or time.time())
        for number in self._own:
            late = time.time() - self._began - self._options.kill_every * (number + 1)
            if late >= 0 and self._marked(f"killed-{number}"):
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--speeds", type=float, nargs="+", required=True, help="of each worker")
    parser.add_argument("--kill-every", type=float, default=0.0, help="seconds from one death of a worker to the next")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--server", default="", help='"server 0/1" is killed by the first worker')
    parser.add_argument("--server-at", type=int, default=0, help="behind so many steps of that worker")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = Cells(options.samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(torch.arange(options.samples)), batch_size=1)
    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    deaths = Deaths(options.out, len(options.speeds), options)
    step_s = options.step_ms / 1000 / options.speeds[tt.rank()]
    with options.out.with_name(f"times-{tt.rank()}-{os.getpid()}").open("w", buffering=1) as times:
        for (numbers,) in loader:
            time.sleep(step_s)
            optimizer.zero_grad()
            model(numbers).backward()
            optimizer.step()
            times.write(f"{time.time()!r}\n")
            deaths.after_step()


if __name__ == "__main__":
    main()
