"""docs/journey.md against a traced run: the gradient of one element passes the functions that the page names, in order.

A small job with two workers and two servers runs in this process with a profiler on every thread. Of all calls those
are kept that have to do with the element: calls for its bucket or its parameter, and what these call in turn. A page
that names a function that is gone, or two functions in the wrong order, fails.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from in_process_job import PATIENCE_S, Trainer, job_of, run_local
from journey_pages import Tracer, check_is_function, check_order, own_files, stops_in
from torch import nn

from topotrain.config.sharding import Bucket
from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Message, Push

PAGE = Path(__file__).parents[2] / "docs" / "journey.md"
WEIGHT, ELEMENT = 0, 255  # the element: the last one of the first parameter
COORDINATOR, HOME = Address(Role.SERVER, 0, 0), Address(Role.SERVER, 0, 1)
WORKERS = (Address(Role.WORKER, 0, 0), Address(Role.WORKER, 0, 1))
MOST_FILES = 38  # two of them only if values or means arrive before the worker waits for them, one as the script looks
"""Files that the gradient enters. It may only become smaller, but for a module of 1,000 lines that became three."""


def stops() -> list[str]:
    """The functions that the page's list names, one per stop."""
    return stops_in(PAGE.read_text(encoding="utf-8").partition("\n## The death of a worker")[0])


class ElementTracer(Tracer):
    """Follows what is both for our worker and for the element: a pair of these two for each call."""

    def __init__(self) -> None:
        super().__init__()
        self.bucket = -1  # the element's
        self.other_pushed = threading.Event()
        self._came: set[tuple[str, type[Message]]] = set()
        self._lock = threading.Lock()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note what the calling thread does, and what it brings about on others."""
        self.calls().append((True, True))
        self.watching = True
        try:
            yield
        finally:
            self.watching = False

    def is_noted(self, concern: Any) -> bool:
        return concern == (True, True)

    def concerns(self, frame: FrameType, caller: Any, first: bool) -> tuple[bool, bool]:
        """What a call is for: its arguments say so (a message, a bucket, a parameter's index), or whoever calls."""
        ours, element = caller or (False, False)
        code = frame.f_code
        given = {name: frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]}
        sender, message, bucket, index = (given.get(name) for name in ("sender", "message", "bucket", "index"))
        if isinstance(message, Message):
            ours = ours if sender is None else self._is_on_the_way(sender, message)
            return ours, getattr(message, "bucket", self.bucket) == self.bucket
        if isinstance(bucket, Bucket | int):
            return ours, (bucket if isinstance(bucket, int) else bucket.id) == self.bucket
        if index is not None and Path(code.co_filename).stem in ("gradient_hooks", "mean_path", "flat_parameters"):
            return ours, bool(index == WEIGHT)
        return ours, element

    def _is_on_the_way(self, sender: Address, message: Message) -> bool:
        """Our worker's messages at the element's home, the home's at the coordinator and at our worker, and what the
        others say of the same kind afterwards: whoever is last has the effect."""
        bucket = getattr(message, "bucket", self.bucket)
        if isinstance(message, Push) and sender == WORKERS[1] and bucket == self.bucket:
            self.other_pushed.set()
        before = {f"to {HOME}": WORKERS[0], f"to {COORDINATOR}": HOME, f"to {WORKERS[0]}": HOME}
        here = threading.current_thread().name
        if here not in before or bucket != self.bucket or not self.watching:
            return False
        with self._lock:
            if sender == before[here]:
                self._came.add((here, type(message)))
            return (here, type(message)) in self._came or (here == f"to {HOME}" and sender == COORDINATOR)


class Given(nn.Module):
    """A layer whose weights all start as 10. The loss is the sum of its output, so a gradient is its worker's input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        nn.init.constant_(self.layer.weight, 10.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum(dim=1).mean()


@dataclass
class Trip:
    seen: list[str]
    gradient: float
    value: float


@pytest.fixture(scope="module")
def trip() -> Trip:
    """The first step of the job that the page tells of."""
    tracer, gradients = ElementTracer(), []

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Given()
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    def script(t: Trainer) -> None:
        batch = torch.cat([torch.full((2, 16), 1.0), torch.full((2, 16), 3.0)])  # the first half is worker 0's
        (tracer.bucket,) = (bucket.id for bucket in t.worker.map.buckets if holds(t.worker.map, bucket))
        if t.me != WORKERS[0]:
            step(t, batch)
            return
        assert t.worker.map.buckets[tracer.bucket].shard == HOME.index
        assert tracer.other_pushed.wait(PATIENCE_S)  # so that the sum follows at once
        with tracer.watch():
            gradients.append(step(t, batch))

    with tracer.everywhere():
        job = job_of(nworkers_per_group=2, nservers_per_group=2, server_worker_separate=True)
        ended = run_local(job, build, script)
    return Trip(list(tracer.seen), gradients[0], float(ended.values["layer.weight"].view(-1)[ELEMENT]))


def step(t: Trainer, batch: torch.Tensor) -> float:
    t.optimizer.zero_grad()
    t.backward(t.losses(lambda model, x: model(x), batch))
    gradient = float(t.model.layer.weight.grad.view(-1)[ELEMENT])
    t.optimizer.step()
    return gradient


def holds(slice_map: Any, bucket: Bucket) -> bool:
    """Whether the element lies in this bucket."""
    pieces = [(slice_map.segments[piece.segment], piece) for piece in bucket.pieces]
    return any(s.parameter == WEIGHT and s.start + p.lo - s.lo <= ELEMENT < s.start + p.hi - s.lo for s, p in pieces)


@pytest.mark.parametrize("page", sorted(PAGE.parent.glob("journey*.md")), ids=lambda page: page.name)
def test_every_stop_is_a_function_of_the_package(page: Path) -> None:
    found = stops_in(page.read_text(encoding="utf-8"))
    assert len(found) >= 12
    for stop in found:
        check_is_function(stop, page)


def test_the_gradient_passes_the_stops_in_the_order_of_the_page(trip: Trip) -> None:
    check_order(stops(), trip.seen, PAGE)


def test_the_gradient_enters_few_files(trip: Trip) -> None:
    assert len(own_files(trip.seen)) <= MOST_FILES, sorted(own_files(trip.seen))


def test_the_numbers_of_the_page_are_those_of_the_run(trip: Trip) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert (trip.gradient, trip.value) == (2.0, 9.0)
    assert "is 10" in text
    assert "is 2" in text
    assert "is 9" in text
