"""A program whose steps cost next to nothing: what remains is the product's part of a step.

    python -m topotrain.tools.probe.small_program RESULT PARAMETERS SECONDS [STEPS]

The model has as many parameters as the probed one, of a few elements each. Its steps are made as plain Python first,
and then in the job. The result is a file of JSON. Processor time is that of the script's thread: it is not used up by
waiting, and the transports' readers have threads of their own.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import nn

import topotrain as tt
from topotrain.config.private_files import write_text
from topotrain.training import context

_ELEMENTS = 64
_WARM = 20
_BLOCK = 10
"""Steps of which one figure is taken: the clock of a thread's processor time is coarse."""
PROFILED = _WARM
"""The step that the job profiles. None of the measured steps is recorded."""


class SmallModel(nn.Module):
    """So many parameters of a few elements."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.full((_ELEMENTS,), 0.01) for _ in range(count))

    def forward(self) -> torch.Tensor:
        """Return the sum of all elements."""
        return torch.stack([part.sum() for part in self.parts]).sum()


def main(result: str, parameters: str, seconds: str) -> None:
    """Measure, and write the result."""
    torch.set_num_threads(1)
    alone, model = SmallModel(int(parameters)), SmallModel(int(parameters))
    plain = _measured(lambda: _backward(alone), float(seconds) / 4)
    # A rate of 0: however many steps there are, the values stay as they are.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = tt.prepare(model, optimizer)

    def step() -> None:
        _backward(model)
        optimizer.step()

    step()
    first = time.time()
    in_job = _measured(step, float(seconds))
    here = context.current()
    buckets = 0 if here is None or here.worker is None else len(here.worker.map.buckets)
    found = {"first": first, "plain": plain, "job": in_job, "buckets": buckets}
    write_text(Path(result), json.dumps(found))


def _backward(model: SmallModel) -> None:
    model.zero_grad()
    model().backward()


def _measured(step: Callable[[], None], seconds: float) -> dict[str, float]:
    """Return medians of a step: seconds by the clock, and of this thread's core."""
    for _ in range(_WARM):
        step()
    walls, cores, until = [], [], time.perf_counter() + seconds
    while time.perf_counter() < until or len(walls) < 3:
        wall, core = time.perf_counter(), time.thread_time()
        for _ in range(_BLOCK):
            step()
        walls.append((time.perf_counter() - wall) / _BLOCK)
        cores.append((time.thread_time() - core) / _BLOCK)
    return {"wall_s": median(walls), "core_s": median(cores)}


if __name__ == "__main__":
    main(*sys.argv[1:])
