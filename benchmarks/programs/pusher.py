"""A script that moves 40 MB of gradients by order, without a backward: what an exchange costs by itself.

As a job of topotrain it calls the worker's client, as the hooks of a backward do: the gradient lies in the
buffer "local", is pushed bucket by bucket, and the new values (or the means) are waited for. The other ways are the
peers: the same work by memory copies in one process, and by Gloo.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import topotrain as tt
from benchmarks.programs.counting import CountingMode
from benchmarks.programs.stepper import Line

TENSORS, ELEMENTS = 10, 1 << 20  # 40 MiB of float32
RATE, MOMENTUM, SLOPE = 0.01, 0.9, 1e-3


class Flat(nn.Module):
    """Parameters of 40 MiB in so many tensors, and nothing to do with them."""

    def __init__(self, tensors: int = TENSORS) -> None:
        super().__init__()
        whole = torch.zeros(TENSORS * ELEMENTS)
        # The last one takes the rest where the number does not divide them.
        size = whole.numel() // tensors
        sizes = [size] * (tensors - 1) + [whole.numel() - size * (tensors - 1)]
        self.parts = nn.ParameterList([nn.Parameter(part.clone()) for part in whole.split(sizes)])


def _sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, fused=True)


class Copies:
    """Two memory copies and one fused update on one core."""

    def __init__(self) -> None:
        count = TENSORS * ELEMENTS
        self.model = Flat()
        self._gradients, self._sent = torch.full((count,), SLOPE), torch.zeros(count)
        self._values, self._back = torch.zeros(count), torch.zeros(count)
        rows = zip(self.model.parts, self._values.split(ELEMENTS), self._sent.split(ELEMENTS), strict=True)
        for part, values, gradient in rows:
            part.data, part.grad = values, gradient
        self._optimizer = _sgd(self.model)

    def step(self) -> None:
        self._sent.copy_(self._gradients)
        self._optimizer.step()
        self._back.copy_(self._values)

    def value(self) -> float:
        return float(self._back.double().mean())


class Gloo:
    """One all-reduce of everything; with `update`, then the mean and a fused update on every rank."""

    def __init__(self, update: bool) -> None:
        dist.init_process_group("gloo")
        self._update, self._size = update, dist.get_world_size()
        self.model, self._gradients = Flat(), torch.full((TENSORS * ELEMENTS,), SLOPE if update else 1.0)
        for part, gradient in zip(self.model.parts, self._gradients.split(ELEMENTS), strict=True):
            part.grad = gradient
        self._optimizer = _sgd(self.model)
        self._rounds = 0

    def step(self) -> None:
        dist.all_reduce(self._gradients)
        if self._update:
            self._gradients.div_(self._size)
            self._optimizer.step()
        self._rounds += 1
        if not self._update and self._rounds % 32 == 0:
            self._gradients.fill_(1.0)  # sums of sums would leave the range of float32

    def value(self) -> float:
        return float(sum(part.detach().double().mean() for part in self.model.parts)) / TENSORS


class MeasuredClient:
    """The client of a worker of a job.

    Args:
        reduce: stop at the means (an all-reduce); else go on to the new values.
        tensors: the number of tensors that the 40 MiB are divided into.
    """

    def __init__(self, reduce: bool, tensors: int = TENSORS) -> None:
        from topotrain.config.job import Apply
        from topotrain.training import context

        self.model = Flat(tensors)
        self.model, _optimizer = tt.prepare(self.model, _sgd(self.model))
        context.use()
        here = context.current()
        assert here is not None
        assert here.worker is not None
        self._worker, self._client = here.worker, here.worker.client
        self._reduce, self._on_arrival = reduce, here.place.job.apply is Apply.kOnArrival
        self._visible = here.place.job.grads.value == "kVisible" and here.place.topology.workers_per_group > 1
        self._flats, self._map = self._worker.buffers.flats, self._worker.map
        for space in self._map.spaces:
            self._flats.flat("local", space.index).fill_(SLOPE)
        self._hyper: bytes = self._worker.hyper()
        if self._on_arrival:
            self._client.gradients.set_rates(self._hyper)
        self._steps = self._backwards = 0

    def step(self) -> None:
        ordinal = self._backwards if self._reduce else 0
        reduces = self._visible or self._on_arrival
        for bucket in reversed(self._map.buckets):  # as a backward fills them
            body = self._flats.view("local", bucket)
            present = (1 << len(bucket.pieces)) - 1
            fresh = self._client.model.windowed
            self._client.gradients.push(self._steps, ordinal if reduces else 1, bucket, 1.0, present, body, fresh)
        if reduces:
            self._client.gradients.end_backward(self._steps, ordinal, 1.0, (1 << len(self._map.buckets)) - 1)
        if self._visible:
            self._client.gradients.wait_means()
        self._backwards += 1
        if not self._reduce:
            self._commit(reduces)

    def _commit(self, reduces: bool) -> None:
        from topotrain.core.client.client import StepEnd

        revisions = () if reduces else (1,) * len(self._map.buckets)
        self._client.steps.commit(self._steps, StepEnd(int(reduces), 1.0, True, self._hyper, (), revisions))
        self._steps += 1

    def value(self) -> float:
        if self._reduce:
            return float(self._flats.view("grad", self._map.buckets[0]).double().mean())
        return float(sum(part.detach().double().sum() for part in self.model.parts)) / (TENSORS * ELEMENTS)


def make(way: str) -> Any:
    if way == "copies":
        return Copies()
    if way.startswith("gloo"):
        return Gloo(update=way == "gloo step")
    name, _, tensors = way.partition(":")
    return MeasuredClient(name == "reduce", int(tensors or TENSORS))


def take_orders(line: Line, step: Callable[[], None], value: Callable[[], float], done: int) -> None:
    """Make steps, count what they compute, and say what they led to, as ordered; `done` steps were made before."""
    for order in line.orders():
        if "steps" in order:
            began = time.perf_counter()
            for _ in range(order["steps"]):
                step()
            done += order["steps"]
            line.say(seconds=time.perf_counter() - began)
        elif "count" in order:
            with CountingMode({}) as mode:
                for _ in range(order["count"]):
                    step()
            done += order["count"]
            line.say(counts=mode.counts)
        elif "check" in order:
            line.say(value=value(), steps=done)
        else:
            break


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    ways = "copies, gloo step, gloo reduce, step, reduce, or step:N for N tensors"
    parser.add_argument("--way", required=True, help=ways)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as in servers; momentum of a constant gradient has none anyway
    line = Line(options.socket)
    work = make(options.way)
    step: Callable[[], None] = work.step
    step()
    line.say(pid=os.getpid())
    take_orders(line, step, work.value, done=1)
    if options.way.startswith("gloo"):
        os._exit(0)  # taking Gloo's group apart hangs at times
    if options.way == "reduce":
        from topotrain.training import context

        here = context.current()
        assert here is not None
        os._exit(0)  # the step in which it stopped is never committed


if __name__ == "__main__":
    main()
