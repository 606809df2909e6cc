"""A job of one worker and one server, with next to nothing to compute.

    python -m topotrain.tools.probe.small_job RESULT PARAMETERS SECONDS

is its program. The model has as many parameters as the probed one, of a few elements each. The worker's share of a step
is the processor time of the script's thread, in the job and as plain Python. That time is not used up by waiting, and
the transports' readers have threads of their own. The server's share is what `run --profile` records of it.
"""

import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from topotrain.config.job import Cluster, ConfigError, Job, TransportChoice
from topotrain.config.private_files import write_text
from topotrain.config.python_module import as_program
from topotrain.core.profiling.spans import from_json
from topotrain.core.protocol.message import KINDS
from topotrain.launch.agent.workspace import SPANS
from topotrain.training.api import prepare

if TYPE_CHECKING:  # the program needs no launcher
    from topotrain.tools.probe.forked_processes import ForkedProcesses

_ELEMENTS = 64
_WARM = 60
"""Steps that are not measured. The job profiles the last of them."""
_BLOCK = 10
"""Steps of which one figure is taken: the clock of a thread's processor time is coarse."""


def run_small_job(
    processes: "ForkedProcesses", parameters: int, seconds: float, transport: Mapping[str, float], update_s: float
) -> dict[str, float]:
    """Run the job; return worker_step_s, server_message_s and start_s of a probe.

    seconds: of its steps. transport: the fields of shared memory in a probe. update_s: of the server's kernel for a
    slice. Raises ConfigError where the job does not come to its end, SystemExit where a signal has ended it.
    """
    result, workspace = processes.folder / "small.json", processes.folder / "small"
    cluster = Cluster(server_worker_separate=True, transport=TransportChoice.kShm, workspace=str(workspace))
    args = (str(result), str(parameters), f"{seconds:g}")
    job = Job(cluster=cluster, name="probe", program=as_program(__name__), args=args, threads=1)
    began = time.time()
    failed = processes.run_job(job, lambda event: None, _WARM)
    if failed:
        raise ConfigError("probe", None, f"the job of one worker and one server failed: {failed}")
    found: dict[str, Any] = json.loads(result.read_text())
    sent, handled_s = _handled(workspace / "run" / SPANS)
    added_s = found["job_core_s"] - found["plain_core_s"] - sent * transport["send_message_s"]
    return {
        "worker_step_s": max(0.0, added_s),
        "server_message_s": max(0.0, handled_s - update_s) / max(1, sent),
        "start_s": found["first"] - began,
    }


def _handled(folder: Path) -> tuple[int, float]:
    """Return the medians of a step's messages, and of a server's seconds for them."""
    handled, sent = {kind.HANDLED for kind in KINDS.values()}, {kind.SENT for kind in KINDS.values()}
    seconds: dict[int, float] = defaultdict(float)
    messages: Counter[int] = Counter()
    for process in (from_json(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")):
        for span in process.spans if process.serves else ():
            step = span.numbers.get("step", 0)
            # The spans of what is sent lie inside those of what is handled.
            seconds[step] += ((span.name in handled) - (span.name in sent)) * (span.end - span.start) / 1e9
            # A server has messages to itself, too.
            messages[step] += span.name in handled and "index" in span.numbers
    late = [step for step in seconds if _WARM // 2 < step < _WARM]
    if not late:
        return 0, 0.0
    return round(median(messages[step] for step in late)), median(seconds[step] for step in late)


class _SmallModel(nn.Module):
    """So many parameters of a few elements."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.full((_ELEMENTS,), 0.01) for _ in range(count))

    def forward(self) -> torch.Tensor:
        return torch.stack([part.sum() for part in self.parts]).sum()


def main(result: str, parameters: str, seconds: str) -> None:
    """Measure, and write the result."""
    torch.set_num_threads(1)
    alone, model = _SmallModel(int(parameters)), _SmallModel(int(parameters))
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


def _backward(model: _SmallModel) -> None:
    model.zero_grad()
    model().backward()


def _core_seconds(step: Callable[[], None], seconds: float) -> float:
    """Return the seconds of this thread's core for a step.

    The first quartile, since others only add to it.
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
