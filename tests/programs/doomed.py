"""Trains a ledger or a small net, and dies of the faults that the command line names.

A fault is WHO:MOMENT:STEP[:WHAT]: worker WHO, at its step number STEP (from 1, counted in each of its lives; 0: any),
does WHAT: "" it kills itself, "raise" and "hang", or it kills the named, joined by "+": processes of these roles, or
"everything". Each happens once, when all before it have. Moments:

    begin, given, after               before `prepare`; the batch is there; the step is committed
    Push, Commit, Deposit, Finish     the first message of this name has left (a Deposit: for a snapshot)
    saved                             a snapshot of a step from STEP on is on disk

In a job of several groups a worker that has no fault left waits behind its second step until all have happened.
"""

import argparse
import json
import os
import select
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from ledger import Ledger, wait_for
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt
from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.transport_contract import MessageSender
from topotrain.extensions.resume.worker_state_messages import WorkerStatePart
from topotrain.training.context import current, use

SAMPLES, BATCH = 48, 4


@dataclass(frozen=True)
class Fault:
    who: str
    moment: str
    step: int
    what: str
    marker: Path


class Doom:
    """Knows when this worker is to do something, and to whom."""

    def __init__(self, folder: Path, faults: list[str], who: str, several: bool) -> None:
        words = [(*fault.split(":"), "")[:4] for fault in faults]
        self._faults = [
            Fault(of, moment, int(step), what, folder / f"fault-{n}")
            for n, (of, moment, step, what) in enumerate(words)
        ]
        self._folder, self._who, self._several = folder, who, several
        self._before, self._wanted = self.manifests(), False
        self.step = 1

    def manifests(self) -> set[Path]:
        return set(self._folder.glob("job/manifests/*/manifest.json"))

    def _left(self) -> list[Fault]:
        return [fault for fault in self._faults if fault.who == self._who and not fault.marker.exists()]

    def at(self, moment: str) -> None:
        left = self._left()
        if left and left[0].moment == moment and left[0].step in (0, self.step):
            self._happen(left[0])

    def sent(self, message: m.Message) -> None:
        if isinstance(message, WorkerStatePart):
            if message.number <= 0:
                return
            self._wanted = True
        self.at(type(message).__name__)

    def stepped(self) -> None:
        self.at("after")
        left = self._left()
        if left and left[0].moment == "saved" and self.step > left[0].step and self._wanted:
            wait_for(lambda: self.manifests() - self._before)  # the others deposit theirs without us
            self._happen(left[0])
        if self._several and self.step == 2 and not left:
            wait_for(lambda: all(fault.marker.exists() for fault in self._faults))
        self.step += 1

    def _happen(self, fault: Fault) -> None:
        for earlier in self._faults[: self._faults.index(fault)]:
            wait_for(earlier.marker.exists)
        victims = [pid for name in fault.what.split("+") for pid in self._pids(name)]
        fault.marker.open("x").close()
        if fault.what == "raise":
            raise ArithmeticError("the user's own mistake")
        if fault.what == "hang":
            signal.pause()
        for pid in sorted(victims, key=lambda pid: pid == os.getpid()):
            os.kill(pid, signal.SIGKILL)

    def _pids(self, name: str) -> list[int]:
        if name in ("raise", "hang"):
            return []
        if name in ("", self._who):
            return [os.getpid()]
        path = self._folder / "job" / "processes.json"
        while True:  # somebody who has just started again is not listed yet
            wait_for(path.exists)
            entries = json.loads(path.read_text())
            found = [entry["pid"] for entry in entries if name == "everything" or name in entry["roles"]]
            if all(Path(f"/proc/{pid}").exists() for pid in found):
                return found
            select.select([], [], [], 0.01)


class DoomedSender:
    """Sends the worker's messages: the last place that still knows one message from another."""

    def __init__(self, sender: MessageSender, doom: Doom) -> None:
        self._sender, self._doom = sender, doom

    def send(self, to: Address, message: m.Message) -> None:
        self._sender.send(to, message)
        self._doom.sent(message)


class Net(nn.Module):
    """A batch norm has statistics that no server knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 1))

    def forward(self, numbers: Tensor) -> Tensor:
        x = torch.sin(numbers[:, None] * torch.arange(1.0, 7.0))
        return nn.functional.mse_loss(self.layers(x).squeeze(1), x.sum(1))


def note(folder: Path, number: int) -> None:
    (folder / f"loader-{os.getpid()}").touch()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("faults", nargs="*")
    parser.add_argument("--net", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--loaders", type=int, default=0)
    parser.add_argument("--curve", type=Path, help="where each worker writes its losses, a line per batch")
    given = parser.parse_args()
    here = current()
    assert here is not None
    doom = Doom(given.folder, given.faults, str(here.me), here.place.topology.worker_groups > 1)
    doom.at("begin")
    torch.manual_seed(3)
    model: nn.Module = Net() if given.net else Ledger(SAMPLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if given.net else 1.0, momentum=0.9 if given.net else 0.0)
    loader = DataLoader(
        TensorDataset(torch.arange(SAMPLES)),
        batch_size=BATCH,
        shuffle=True,
        num_workers=given.loaders,
        worker_init_fn=partial(note, given.folder),
    )
    model, optimizer, loader = tt.prepare(model, optimizer, loader)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7 if given.net else 1.0)
    use()
    assert here.worker is not None
    channel = here.worker.client.channel
    channel._sender = DoomedSender(channel._sender, doom)
    for epoch in tt.epochs(given.epochs):
        for (numbers,) in loader:
            doom.at("given")
            optimizer.zero_grad()
            loss = model(numbers)
            loss.backward()
            if given.curve is not None:
                with (given.curve / f"{here.me.index}").open("a") as lines:
                    lines.write(f"{epoch} {numbers.tolist()} {loss.item().hex()}\n")
            optimizer.step()
            doom.stepped()
        schedule.step()


if __name__ == "__main__":
    main()
