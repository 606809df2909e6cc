"""Probes that nothing was measured for: the costs are chosen, so that results follow from arithmetic."""

from collections.abc import Sequence
from typing import Any

from topotrain.config.job import Cluster, Job
from topotrain.tools.probe.probe_file import (
    Machine,
    Probe,
    ProbedBatch,
    ProbedKernels,
    ProbedOptimizer,
    ProbedParameter,
    ProbedTransport,
)

FREE = ProbedTransport(0.0, 0.0, 0.0, 0.0, 0.0)


def made_probe(
    counts: Sequence[int] = (250_000,) * 4,
    forward_s: float = 0.03,
    backward_s: float = 0.06,
    batch: int = 32,
    cores: int = 64,
    **more: Any,
) -> Probe:
    """Return a probe of a model of these lengths on a machine where only computing takes time."""
    last = len(counts) - 1
    # The gradients of the last parameters are there first.
    model = tuple(
        ProbedParameter(f"p{i}", (n,), "float32", True, (last + 1 - i) / (last + 1)) for i, n in enumerate(counts)
    )
    compute = forward_s + backward_s
    settings: dict[str, Any] = {
        "version": 1,
        "machine": Machine("made", cores, 64 << 30),
        "versions": {"topotrain": "0", "torch": "0", "python": "0"},
        "program": "made.py",
        "model": model,
        "batch": ProbedBatch(batch, forward_s, backward_s, 0.0, 0.0, 0.0, compute / batch, 10),
        "spread": 0.0,
        "optimizer": ProbedOptimizer("SGD", 0.0, 0.0, 0.0, 0.0),
        "kernels": ProbedKernels(0.0, 0.0, 0.0),
        "transports": {"shm": FREE, "tcp": FREE},
        "worker_step_s": 0.0,
        "server_message_s": 0.0,
        "sharing": {},
        "start_s": 2.0,
    }
    return Probe(**{**settings, **more})


def made_job(**cluster: Any) -> Job:
    """Return a job with this cluster block."""
    return Job(cluster=Cluster(**cluster))
