"""A script as users write it, whose steps are predicted, probed and measured: a model, an optimizer, a loader.

With --socket it takes as many steps as it is told to, and then waits for the next order, as `stepper` does; or steps
for so many seconds. Without it, it trains like any other script, which is what a probe measures.
"""

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import topotrain as tt
from benchmarks.models import Work, build, own_seconds
from benchmarks.programs.stepper import Line, sgd

SAMPLES = 1 << 20
"""In an epoch: more than any measurement takes."""
GROUP_SHARE = 2
"""A batch has so many times the samples of `models`, for the two workers of a group."""


class Drawn(Dataset[tuple[Tensor, Tensor]]):
    """Samples that were drawn once, again and again."""

    def __init__(self, work: Work) -> None:
        self._inputs = torch.cat([inputs for inputs, _ in work.batches])
        self._targets = torch.cat([targets.view(len(inputs), -1) for inputs, targets in work.batches])

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        at = number % len(self._inputs)
        return self._inputs[at], self._targets[at]


class Orders:
    """Says how long to go on; without a line, for ever."""

    def __init__(self, line: Line | None, rank: int) -> None:
        self._line, self._rank = line, rank
        self._orders: Iterator[dict[str, Any]] = iter(()) if line is None else line.orders()
        self._left, self._until, self._made, self._began = 1, float("inf"), 0, 0.0

    def go_on(self) -> bool:
        """Whether there is another step; waits for an order where the last one is done."""
        if self._line is None:
            return True
        if self._left > 0 and time.perf_counter() < self._until:
            return True
        if self._began:
            self._line.say(made=self._made, seconds=time.perf_counter() - self._began)
        else:
            self._line.say(rank=self._rank, pid=os.getpid(), first=time.time())
        order = next(self._orders, {"end": True})
        if "end" in order:
            return False
        self._made, self._began = 0, time.perf_counter()
        self._left = order.get("steps", 1 << 40)
        self._until = self._began + order.get("lasting", float("inf"))
        return True

    def made(self) -> None:
        """A step is made."""
        self._left -= 1
        self._made += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", default="")
    parser.add_argument("--model", required=True, help="of models, or mlp/3x4: and worker 3 is 4 times slower")
    options = parser.parse_args()
    torch.set_num_threads(1)
    name, _, straggler = options.model.partition("/")
    slow, _, factor = straggler.partition("x")
    rank = tt.rank()
    orders = Orders(Line(options.socket) if options.socket else None, rank)
    work = build(name, 0)
    # A slow worker rests for the time that is missing.
    more, rest_s = float(factor) - 1 if slow and int(slow) == rank else 0.0, 0.0
    loader = DataLoader(Drawn(work), batch_size=work.samples * GROUP_SHARE, drop_last=True)
    model, optimizer, loader = tt.prepare(work.model, sgd(work.model), loader)
    for _ in tt.epochs(1):
        for x, y in loader:
            if not orders.go_on():
                break
            y = y.flatten()
            if more and not rest_s:
                rest_s = more * own_seconds(model, work.loss_of, x, y)
            time.sleep(rest_s)
            optimizer.zero_grad()
            work.loss_of(model, x, y).backward()
            optimizer.step()
            orders.made()


if __name__ == "__main__":
    main()
