"""Time what servers compute: updates, sums, copies, and small operations.

All of it runs on one thread, as in a server, and with the product's own code.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from topotrain.config.job import Cluster, Slicing
from topotrain.config.topology import layout
from topotrain.core.model.schema import slice_map_for, torch_dtype
from topotrain.core.optim.adapter import WHOLE, OptimizerSpec, SliceUpdate, describe_all, hyper
from topotrain.core.server.ordered_sum import OrderedMean
from topotrain.parallel.api.dry_run import PreparedArguments
from topotrain.tools.probe.probe_file import ProbedKernels, ProbedOptimizer
from topotrain.training.parameters.flat_parameters import ModelParts

_MOST_ELEMENTS = 1 << 24
"""Of a model that is updated. More say nothing new, and need memory."""
_BUCKET = 1 << 18
_BUCKETS = 24
"""Buckets of 1 MiB that a sum goes through, so that no cache has them all."""
_SMALL = 64
_CALLS = 200
_ROUNDS = 5

Segment = tuple[int, int, torch.Tensor]
"""What a server updates: its key, the number of the parameter, and the value."""


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)


def _seconds(work: Callable[[], object], calls: int = 1) -> float:
    """Return the seconds of a call.

    The shortest round counts, because other processes only add to it.
    """
    work()
    found = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for _ in range(calls):
            work()
        found.append((time.perf_counter() - began) / calls)
    return min(found)


def time_kernels() -> ProbedKernels:
    with _one_thread():
        first, second, out = (torch.randn(_BUCKETS, _BUCKET) for _ in range(3))
        mean = OrderedMean([[0, 1]])

        def sums() -> None:
            for number in range(_BUCKETS):
                mean.write({0: (1.0, first[number]), 1: (1.0, second[number])}, out[number])

        def copies() -> None:
            for number in range(_BUCKETS):
                out[number].copy_(first[number])

        small = torch.zeros(_SMALL)
        operation_s = _seconds(lambda: torch.add(small, small, out=small), _CALLS)
        nbytes = first.nbytes
        # The mean of two reads both and writes one, and then reads and writes that one.
        byte_s = max(0.0, _seconds(sums) - 2 * _BUCKETS * operation_s) / (5 * nbytes)
        copy_byte_s = max(0.0, _seconds(copies) - _BUCKETS * operation_s) / nbytes
    return ProbedKernels(operation_s, byte_s, copy_byte_s)


def time_optimizer(made: PreparedArguments) -> ProbedOptimizer:
    """Time the update of the script's optimizers on a server.

    Raises:
        ConfigError: servers cannot run an optimizer.
    """
    parts, names = made.parts(), made.optimizer_names(None)
    whole = any(name in WHOLE for name in names)
    spec = describe_all(made.optimizers, parts.tensors, Slicing.kTensor if whole else Slicing.kElement, "", parts.aside)
    settings = hyper(*made.optimizers)
    trained = next((index for index, group in enumerate(spec.assignment) if group >= 0), 0)
    with _one_thread():
        buckets = [_tensors(parts)] if whole else _buckets(parts, trained)
        updates, counts = zip(*(_update(spec, settings, segments) for segments in buckets), strict=True)
        small, _ = _update(spec, settings, [(0, trained, torch.zeros((8, 8) if whole else _SMALL))])
        fixed_s = _seconds(small, _CALLS)
        all_s = _seconds(lambda: [update() for update in updates])
    element_s = max(0.0, all_s - len(updates) * fixed_s) / max(1, sum(counts))
    return ProbedOptimizer(" and ".join(names), made.state_factor(), fixed_s, element_s, made.momentum(None))


def _update(spec: OptimizerSpec, settings: bytes, segments: Sequence[Segment]) -> tuple[Callable[[], object], int]:
    """Return a server's update of some segments, and its number of elements."""
    update = SliceUpdate(spec, segments)
    # Small gradients: the values must stay finite for as long as this is timed.
    gradients = {key: torch.randn_like(value) * 1e-3 for key, _, value in segments if update.optimizes(key)}
    return partial(update.apply, settings, gradients), sum(each.numel() for each in gradients.values())


def _tensors(parts: ModelParts) -> list[Segment]:
    """Return the whole tensors, which a server has in the memory of its host."""
    return [(index, index, torch.zeros_like(each, device="cpu")) for index, each in enumerate(parts.tensors)]


def _buckets(parts: ModelParts, trained: int) -> Iterator[list[Segment]]:
    """Yield the buckets of the only server of a job with this model.

    trained: the number of a parameter that is trained.
    """
    if sum(tensor.numel() for tensor in parts.tensors) < _BUCKET:
        # Of so few elements the seconds of each cannot be told from those of the call.
        yield [(0, trained, torch.zeros(_BUCKET))]
        return
    slices = slice_map_for(parts.parameters, layout(Cluster(server_worker_separate=True)))
    left = _MOST_ELEMENTS
    for bucket in slices.buckets:
        if left > 0:
            left -= bucket.hi - bucket.lo
            flat = torch.zeros(bucket.hi - bucket.lo, dtype=torch_dtype(slices.spaces[bucket.space].dtype))
            yield [
                (each.segment, slices.segments[each.segment].parameter, flat[each.lo - bucket.lo : each.hi - bucket.lo])
                for each in bucket.pieces
            ]
