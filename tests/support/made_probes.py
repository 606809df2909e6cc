"""Probes with given numbers, for predictions whose result is known."""

from collections.abc import Sequence
from dataclasses import replace

from topotrain.tools.probe.probe_file import (
    VERSION,
    Machine,
    Probe,
    ProbedBatch,
    ProbedKernels,
    ProbedOptimizer,
    ProbedParameter,
    ProbedTransport,
)

FREE = ProbedTransport(0.0, 0.0, 0.0, 0.0, 0.0)
"""A transport that costs nothing: only links and computing take time."""
SMALL_MODEL = (
    ProbedParameter("first", (70, 3), "float32", True, 1.0),
    ProbedParameter("frozen", (40,), "float32", False, 1.0),
    ProbedParameter("wide", (900,), "float64", True, 0.6),
    ProbedParameter("last", (33, 7), "float32", True, 0.2),
)


def model_of(megabytes: float, layers: int = 16) -> tuple[ProbedParameter, ...]:
    """A model of so many equal layers; the last one has its gradient first."""
    count = round(megabytes * 1e6 / 4 / layers / 1000)
    return tuple(
        ProbedParameter(f"layer{n}", (count, 1000), "float32", True, (layers - n) / layers) for n in range(layers)
    )


def probe_of(
    model: Sequence[ProbedParameter] = SMALL_MODEL,
    forward_s: float = 0.004,
    backward_s: float = 0.008,
    samples: int = 48,
    transport: ProbedTransport = FREE,
    spread: float = 0.0,
) -> Probe:
    """A probe in which computing takes this long, and all else what is given; kernels cost nothing."""
    return Probe(
        version=VERSION,
        made_at=0.0,
        machine=Machine("made", 64, 1 << 36, "Linux"),
        versions={},
        program="made.py",
        model=tuple(model),
        batch=ProbedBatch(samples, forward_s, backward_s, 0.0, 0.0, 0.0, 0.0, 1, 0),
        spread=spread,
        optimizer=ProbedOptimizer("SGD", 0.0, 0.0, 0.0, 0.0),
        kernels=ProbedKernels(0.0, 0.0, 0.0),
        transports={"shm": transport, "tcp": transport},
        worker_step_s=0.0,
        server_message_s=0.0,
        sharing={},
        start_s=1.0,
    )


def without_growth(probe: Probe) -> Probe:
    """The same, with a step that takes as long for any number of samples."""
    batch = probe.batch
    return replace(probe, batch=replace(batch, fixed_s=batch.forward_s + batch.backward_s, per_sample_s=1e-15))
