"""A program with steps that cost next to nothing, besides the product's part.

    python -m topotrain.tools.probe.small_program RESULT PARAMETERS SECONDS

The model has as many parameters as the probed one, of a few elements each. Its steps are made as plain Python first,
and then in the job. The result is a file of JSON. Processor time is that of the script's thread: it is not used up by
waiting, and the transports' readers have threads of their own.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles

import torch
from torch import nn

from topotrain.config.private_files import write_text
from topotrain.training.api import prepare

_ELEMENTS = 64
_WARM = 60
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
    model, optimizer = prepare(model, optimizer)

    def step() -> None:
        _backward(model)
        optimizer.step()

    step()
    first = time.time()
    in_job = _measured(step, float(seconds))
    found = {"first": first, "plain": plain, "job": in_job}
    write_text(Path(result), json.dumps(found))


def _backward(model: SmallModel) -> None:
    model.zero_grad()
    model().backward()


def _measured(step: Callable[[], None], seconds: float) -> dict[str, float]:
    """Return seconds of a step, by the clock and of this thread's core.

    It is the first quartile: other processes only ever add to what is so short.
    """
    for _ in range(_WARM):
        step()
    walls: list[float] = []
    cores: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(walls) < 3:
        wall, core = time.perf_counter(), time.thread_time()
        for _ in range(_BLOCK):
            step()
        walls.append((time.perf_counter() - wall) / _BLOCK)
        cores.append((time.thread_time() - core) / _BLOCK)
    return {"wall_s": quantiles(walls)[0], "core_s": quantiles(cores)[0]}


if __name__ == "__main__":
    main(*sys.argv[1:])
