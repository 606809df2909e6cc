"""A worker's part: now and then, tell the servers what it has of the parameters.

A link, memory or a card that loses bits changes a copy, from which the worker then trains on. No loss shows that.
"""

import time

from topotrain.config.job import Apply, Compression, Job
from topotrain.config.topology import Topology
from topotrain.core.client.client_context import StepEnd
from topotrain.core.model.tensor_bits import bit_sum
from topotrain.extensions.drift.drift_messages import CopySums
from topotrain.training.context import Context, PrepareExtension
from topotrain.training.worker import Worker
from topotrain.training.worker_extension import WorkerExtension

PERIOD_S = 60.0
"""Seconds between two comparisons."""
SHARE = 0.0005
"""The share of the time that a worker spends on them at most; a server spends as much."""


def compares_copies(job: Job, topology: Topology) -> bool:
    """Whether a worker commits a step with its servers' values, all of one step."""
    cluster = job.cluster
    # Otherwise other groups change the values meanwhile, or the worker does, or they travel encoded.
    alone = not topology.synced and (topology.implicit or topology.worker_groups == 1)
    in_step = cluster.outer is None and cluster.local_steps == 1 and not cluster.backup
    return alone and in_step and job.apply is Apply.kAtStep and cluster.compression is Compression.kNone


class DriftCheck(WorkerExtension):
    """Sends `CopySums`. The clock decides when, and nothing else."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._due = worker, time.monotonic() + PERIOD_S

    def before_commit(self, step: int, end: StepEnd) -> None:
        began = time.monotonic()
        if began >= self._due:
            for server in self._worker.client.channel.servers:
                self._worker.client.channel.send(server, CopySums(step, self._sums(server.index)))
            ended = time.monotonic()
            self._due = ended + max(PERIOD_S, (ended - began) / SHARE)

    def _sums(self, shard: int) -> tuple[int, ...]:
        parts, own, found = self._worker.parts, self._worker.mirror.own, list[int]()
        pieces = (piece for bucket in self._worker.map.buckets_of(shard) for piece in bucket.pieces)
        for number, piece in enumerate(pieces):
            segment = self._worker.map.segments[piece.segment]
            tensor, known = parts.tensors[segment.parameter], parts.parameters[segment.parameter]
            # But those of other workers, those that the script has written, and those in an order of their own.
            if not tensor.is_meta and segment.parameter not in own and tensor.stride() == known.stride:
                start = segment.start + piece.lo - segment.lo
                flat = tensor.detach().as_strided((known.count,), (1,))
                found += number, bit_sum(flat[start : start + piece.hi - piece.lo])
        return tuple(found)


class DriftExtension(PrepareExtension):
    """Compares copies where that is possible."""

    def attach(self, here: Context, worker: Worker) -> None:
        if compares_copies(here.place.job, here.place.topology):
            worker.attach(DriftCheck(worker))
