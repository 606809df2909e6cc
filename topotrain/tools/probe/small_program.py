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
    plain_core_s = _core_seconds(lambda: _backward(alone), float(seconds) / 4)
    # A rate of 0: however many steps there are, the values stay as they are.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = prepare(model, optimizer)

    def step() -> None:
        _backward(model)
        optimizer.step()

    step()
    found = {"first": time.time(), "plain_core_s": plain_core_s, "job_core_s": _core_seconds(step, float(seconds))}
    write_text(Path(result), json.dumps(found))


def _backward(model: SmallModel) -> None:
    model.zero_grad()
    model().backward()


def _core_seconds(step: Callable[[], None], seconds: float) -> float:
    """Return the seconds of this thread's core for a step.

    It is the first quartile: other processes only ever add to what is so short.
    """
    for _ in range(_WARM):
        step()
    found: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(found) < 3:
        began = time.thread_time()
        for _ in range(_BLOCK):
            step()
        found.append((time.thread_time() - began) / _BLOCK)
    return quantiles(found)[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
