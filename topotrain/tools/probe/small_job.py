"""A job of one worker and one server with next to nothing to compute: what the product itself costs.

What its step takes by the clock is the sum of what the script, the worker, the messages and the server take, because
each of them waits for the one before. So the share of the server is what is left.
"""

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from topotrain.config.job import Cluster, Job, TransportChoice
from topotrain.config.python_module import as_program
from topotrain.config.topology import layout
from topotrain.core.events import Event
from topotrain.core.protocol.message import KINDS
from topotrain.launch.agent.workspace import SPANS
from topotrain.launch.local import LocalLauncher
from topotrain.tools.monitor.trace_export import collect
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
    """What was measured in the job.

    Attributes:
        start_s: from its start until its first step.
        plain_s: of a step as plain Python, by the clock.
        plain_core_s: the same, of the script's core.
        step_s, core_s: of a step in the job.
        sent: messages that the worker sends in a step.
        received: messages that it receives.
    """

    start_s: float
    plain_s: float
    plain_core_s: float
    step_s: float
    core_s: float
    sent: int
    received: int

    def worker_step_s(self, transport: ProbedTransport) -> float:
        """Return the seconds of a core that the product adds to a worker's step, without its messages."""
        return max(0.0, self.core_s - self.plain_core_s - self.sent * transport.send_message_s)

    def server_message_s(self, transport: ProbedTransport, optimizer: ProbedOptimizer) -> float:
        """Return the seconds that a server takes for each message that it handles."""
        # The worker's last message and the server's answer: those before travel while the worker goes on.
        last = transport.send_message_s + transport.receive_message_s + transport.latency_s
        mine = self.plain_s + self.worker_step_s(transport) + (self.sent - 1) * transport.send_message_s
        return max(0.0, self.step_s - mine - 2 * last - optimizer.fixed_s) / max(1, self.sent)


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
    sent, received = _messages(folder / "small" / "run" / SPANS)
    plain, own = found["plain"], found["job"]
    return SmallJob(
        found["first"] - began, plain["wall_s"], plain["core_s"], own["wall_s"], own["core_s"], sent, received
    )


class IgnoredEvents:
    """A listener that needs no event: the outcome of the job says what failed."""

    def __call__(self, event: Event) -> None:
        """Drop the event."""


def _messages(spans: Path) -> tuple[int, int]:
    """Return how many messages a server handles, and how many it sends, in the profiled step."""
    names = Counter(span.name for each in collect(spans) if each.serves for span in each.spans)
    handled, sent = {kind.HANDLED for kind in KINDS.values()}, {kind.SENT for kind in KINDS.values()}
    return sum(names[name] for name in handled), sum(names[name] for name in sent)
