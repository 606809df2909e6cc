"""A script whose model may be split, and that trains by order as stepper.py does; it tells what it waited and sent.

--way job/NET: with topotrain, two workers as the conf says; plain/NET: ordinary PyTorch in one process, which an order
may tell to take the batch in so many parts; half/NET: the same with half of the batch. The batch is the group's; each
worker takes half of it.
"""

import argparse
import time
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

import topotrain as tt
from benchmarks.programs.stepper import Line
from topotrain.parallel.runtime.network_channel import NetworkChannel

WORKERS, SAMPLES, INPUTS, WIDTH, CLASSES = 2, 2048, 64, 512, 10


def tower(*layers: nn.Module) -> nn.Sequential:
    """Layers, and three wide ones after them."""
    found = list(layers)
    for _ in range(3):
        found += [nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*found)


class Branches(nn.Module):
    """Two equal towers over the same input, and a small head over both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = tower(nn.Linear(INPUTS, WIDTH)), tower(nn.Linear(INPUTS, WIDTH))
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.left(x), self.right(x)], 1).relu())


class Stages(nn.Module):
    """Two towers, one after the other, of equal work: the first has the small layer from the input, of which nobody
    needs the input's gradient, the second the small one to the classes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = tower(nn.Linear(INPUTS, WIDTH)), tower()
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


class Losing(Stages):
    """The same, with the loss inside: what schedule: k1F1B takes."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(x), y)


NETS: dict[str, type[nn.Module]] = {"branches": Branches, "stages": Stages, "losing": Losing}


def batch(samples: int) -> tuple[Tensor, Tensor]:
    """Samples with their classes, the same in every process."""
    rng = torch.Generator().manual_seed(1)
    return torch.randn(samples, INPUTS, generator=rng), torch.randint(CLASSES, (samples,), generator=rng)


class Counted:
    """A worker's passage to the others of its group that counts: seconds that it waited for values, bytes that left."""

    def __init__(self, crossing: Any) -> None:
        self.waited, self.sent = 0.0, 0
        self._send, self._wait, self._me = crossing.send, crossing.wait_any, crossing.me
        crossing.send, crossing.wait_any = self.send, self.wait_any

    def send(self, to: int, key: Any, tensor: Tensor, grad: bool = False) -> None:
        if to != self._me and key.edge >= 0:  # what is no edge is a word about the step
            self.sent += tensor.nbytes
        self._send(to, key, tensor, grad)

    def wait_any(self, wanted: Collection[Any]) -> None:
        began = time.perf_counter()
        self._wait(wanted)
        self.waited += time.perf_counter() - began


def counted() -> Counted | None:
    """The count of this worker's passage, None where nothing is split."""
    from topotrain.training import context

    context.use()
    here = context.current()
    if here is None or here.worker is None or here.split is None:
        return None
    return Counted(here.worker.client.extension(NetworkChannel))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--way", required=True)
    options = parser.parse_args()
    way, _, net = options.way.partition("/")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    line = Line(options.socket)
    model: nn.Module = NETS[net]()
    optimizer: Any = SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    inputs, labels = batch(SAMPLES)
    try:
        if way == "job":
            model, optimizer = tt.prepare(model, optimizer)
        if way != "plain":
            inputs, labels = (whole.chunk(WORKERS)[tt.rank()] for whole in (inputs, labels))
        count = counted()
        loss = step(model, optimizer, inputs, labels)
    except Exception as error:
        line.say(rank=tt.rank(), refused=f"{type(error).__name__}: {error}".splitlines()[0])
        raise
    line.say(rank=tt.rank(), samples=len(inputs), loss=loss)
    for order in line.orders():
        if "steps" not in order:
            break
        waited, sent = (0.0, 0) if count is None else (count.waited, count.sent)
        began, computed = time.perf_counter(), time.process_time()
        for _ in range(order["steps"]):
            loss = step(model, optimizer, inputs, labels, order.get("parts", 1))
        seconds, computed = time.perf_counter() - began, time.process_time() - computed
        told = {} if count is None else {"waited": count.waited - waited, "sent": count.sent - sent}
        line.say(seconds=seconds, computed=computed, loss=loss, **told)


def step(model: nn.Module, optimizer: Any, inputs: Tensor, labels: Tensor, parts: int = 1) -> float:
    """Take one, in so many parts one after the other; its loss, of these samples."""
    optimizer.zero_grad()
    found = 0.0
    for x, y in zip(inputs.chunk(parts), labels.chunk(parts), strict=True):
        loss = model(x, y) if isinstance(model, Losing) else F.cross_entropy(model(x), y)
        (loss if parts == 1 else loss / parts).backward()
        found += loss.item() / parts
    optimizer.step()
    return found


if __name__ == "__main__":
    main()
