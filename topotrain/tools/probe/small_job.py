"""A job of one worker and one server with next to nothing to compute.

The worker's share is measured by the processor time of the script's thread, with the job and without it. The server's
share is what `run --profile` records of it.
"""

import json
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from topotrain.config.job import Cluster, Job, TransportChoice
from topotrain.config.python_module import as_program
from topotrain.config.topology import layout
from topotrain.core.events import Event
from topotrain.core.profiling.spans import from_json
from topotrain.core.protocol.message import KINDS
from topotrain.launch.agent.workspace import SPANS
from topotrain.launch.local import LocalLauncher
from topotrain.tools.probe.probe_file import ProbedOptimizer, ProbedTransport
from topotrain.tools.probe.small_program import PROFILED

_PROGRAM = "topotrain.tools.probe.small_program"


class SmallJobFailed(Exception):
    """The job has not come to its end. code: its exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class SmallJob:
    """The measurements of the job.

    Attributes:
        start_s: from its start until its first step.
        plain_s, step_s: of a step by the clock, as plain Python and in the job.
        plain_core_s, core_s: the same, of the script's core.
        server_s: for which the server handles the messages of a step, without sending its answers.
        sent: messages that the worker sends in a step.
    """

    start_s: float
    plain_s: float
    plain_core_s: float
    step_s: float
    core_s: float
    server_s: float
    sent: int

    def worker_step_s(self, transport: ProbedTransport) -> float:
        """Return the core seconds that a worker's step has more, without its messages."""
        return max(0.0, self.core_s - self.plain_core_s - self.sent * transport.send_message_s)

    def server_message_s(self, optimizer: ProbedOptimizer) -> float:
        """Return the seconds that a server takes for each message that it handles."""
        return max(0.0, self.server_s - optimizer.fixed_s) / max(1, self.sent)


def run_small_job(folder: Path, forkserver: str, parameters: int, seconds: float) -> SmallJob:
    """Run the job with a model of so many parameters.

    Raises:
        SmallJobFailed: the job has not come to its end.
    """
    result = folder / "small.json"
    cluster = Cluster(server_worker_separate=True, transport=TransportChoice.kShm, workspace=str(folder / "small"))
    job = Job(
        cluster=cluster,
        name="probe",
        program=as_program(_PROGRAM),
        args=(str(result), str(parameters), f"{seconds:g}"),
        threads=1,
    )
    began = time.time()
    outcome = LocalLauncher(forkserver=forkserver, profile=PROFILED).start(job, layout(cluster), IgnoredEvents())
    if outcome.code:
        text = outcome.cause.text if outcome.cause is not None else f"exit code {outcome.code}"
        raise SmallJobFailed(f"the job of one worker and one server failed: {text}", outcome.code)
    found = json.loads(result.read_text())
    handled = _handled(folder / "small" / "run" / SPANS)
    plain, own = found["plain"], found["job"]
    return SmallJob(
        start_s=found["first"] - began,
        plain_s=plain["wall_s"],
        plain_core_s=plain["core_s"],
        step_s=own["wall_s"],
        core_s=own["core_s"],
        server_s=handled.seconds,
        sent=handled.messages,
    )


class IgnoredEvents:
    """A listener that needs no event: the outcome of the job says what failed."""

    def __call__(self, event: Event) -> None:
        """Drop the event."""


@dataclass(frozen=True)
class _Handled:
    """The messages of workers that a server handles in a step, and their seconds."""

    messages: int
    seconds: float


def _handled(folder: Path) -> _Handled:
    """Read the spans of the server: medians over the steps before the profiled one."""
    handled, sent = {kind.HANDLED for kind in KINDS.values()}, {kind.SENT for kind in KINDS.values()}
    seconds: dict[int, float] = defaultdict(float)
    messages: Counter[int] = Counter()
    for file in folder.glob("*.json"):
        process = from_json(file.read_text(encoding="utf-8"))
        for span in process.spans if process.serves else ():
            step = span.numbers.get("step", 0)
            # The spans of what is sent lie inside those of what is handled.
            if span.name in handled:
                seconds[step] += (span.end - span.start) / 1e9
                # A server has messages to itself, too.
                messages[step] += "index" in span.numbers
            elif span.name in sent:
                seconds[step] -= (span.end - span.start) / 1e9
    late = [step for step in seconds if PROFILED // 2 < step < PROFILED]
    if not late:
        return _Handled(0, 0.0)
    return _Handled(round(median(messages[step] for step in late)), median(seconds[step] for step in late))
