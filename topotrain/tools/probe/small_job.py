"""A job of one worker and one server with next to nothing to compute.

The worker's share is measured by the processor time of the script's thread, with the job and without it. The server's
share is what `run --profile` records of it.
"""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from topotrain.config.job import Cluster, ConfigError, Job, TransportChoice
from topotrain.config.python_module import as_program
from topotrain.core.profiling.spans import from_json
from topotrain.core.protocol.message import KINDS
from topotrain.launch.agent.workspace import SPANS
from topotrain.tools.probe.forked_processes import ForkedProcesses
from topotrain.tools.probe.small_program import PROFILED

_PROGRAM = "topotrain.tools.probe.small_program"


def run_small_job(
    processes: ForkedProcesses, parameters: int, seconds: float, transport: Mapping[str, float], update_s: float
) -> dict[str, float]:
    """Run the job with a model of so many parameters.

    Args:
        processes: of the probe.
        parameters: of the model.
        seconds: of its steps.
        transport: the fields of shared memory in a probe.
        update_s: of the server's kernel for a slice.

    Returns:
        The fields of a probe: `worker_step_s` without messages, `server_message_s` for each that a server handles, and
        `start_s` of the job.

    Raises:
        ConfigError: the job has not come to its end.
        SystemExit: a signal has ended it.
    """
    result, workspace = processes.folder / "small.json", processes.folder / "small"
    cluster = Cluster(server_worker_separate=True, transport=TransportChoice.kShm, workspace=str(workspace))
    args = (str(result), str(parameters), f"{seconds:g}")
    job = Job(cluster=cluster, name="probe", program=as_program(_PROGRAM), args=args, threads=1)
    began = time.time()
    failed = processes.run_job(job, lambda event: None, PROFILED)
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
    """Return a worker's messages in a step, and the seconds in which a server handles them without its answers.

    They are medians over the steps before the profiled one.
    """
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
    late = [step for step in seconds if PROFILED // 2 < step < PROFILED]
    if not late:
        return 0, 0.0
    return round(median(messages[step] for step in late)), median(seconds[step] for step in late)
