"""Time what servers compute: updates, sums, copies, and small operations.

All of it runs on one thread, as in a server, and with the product's own code.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from topotrain.config.async_momentum import momentum_of
from topotrain.config.job import Cluster, Slicing
from topotrain.config.sharding import Bucket
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


@dataclass(frozen=True)
class OneThread:
    """Computes on one thread inside the block."""

    before: int

    @classmethod
    def now(cls) -> "OneThread":
        """Remember the present number of threads."""
        return cls(torch.get_num_threads())

    def __enter__(self) -> None:
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self.before)


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
    """Time sums, copies and small operations."""
    with OneThread.now(), torch.no_grad():
        first, second, out = (torch.randn(_BUCKETS, _BUCKET) for _ in range(3))
        mean = OrderedMean([[0, 1]])

        def sums() -> None:
            for number in range(_BUCKETS):
                mean.write({0: (1.0, first[number]), 1: (1.0, second[number])}, out[number])

        def copies() -> None:
            for number in range(_BUCKETS):
                out[number].copy_(first[number])

        small = [torch.zeros(_SMALL) for _ in range(3)]
        operation_s = _seconds(lambda: torch.add(small[0], small[1], out=small[2]), _CALLS)
        nbytes = _BUCKETS * _BUCKET * first.element_size()
        # The mean of two reads both and writes one, and then reads and writes that one.
        fixed = 2 * _BUCKETS * operation_s
        byte_s = max(0.0, _seconds(sums) - fixed) / (5 * nbytes)
        copy_byte_s = max(0.0, _seconds(copies) - _BUCKETS * operation_s) / nbytes
    return ProbedKernels(operation_s, byte_s, copy_byte_s)


def time_optimizer(parts: ModelParts, optimizers: Sequence[Optimizer]) -> ProbedOptimizer:
    """Time the update of the script's optimizers on a server.

    Raises:
        ConfigError: servers cannot run an optimizer.
    """
    whole = any(type(each).__name__ in WHOLE for each in optimizers)
    slicing = Slicing.kTensor if whole else Slicing.kElement
    spec = describe_all(optimizers, parts.tensors, slicing, "", parts.aside)
    settings = hyper(*optimizers)
    with OneThread.now(), torch.no_grad():
        buckets = _whole(parts) if whole else _slices(parts, slicing, _first(spec))
        made = [_Update(spec, settings, bucket) for bucket in buckets]
        elements = sum(update.elements for update in made)

        def all_of_it() -> None:
            for update in made:
                update()

        small = _Update(spec, settings, [_Segment(0, _first(spec), torch.zeros(_SMALL if not whole else (8, 8)))])
        fixed_s = _seconds(small, _CALLS)
        element_s = max(0.0, _seconds(all_of_it) - len(made) * fixed_s) / max(1, elements)
    names = " and ".join(type(each).__name__ for each in optimizers)
    momentum = max(momentum_of(type(each).__name__, each.param_groups) for each in optimizers)
    state = PreparedArguments(None, optimizers, None).state_factor()
    return ProbedOptimizer(names, state, fixed_s, element_s, momentum)


@dataclass(frozen=True)
class _Segment:
    """A part of a parameter that a server updates."""

    key: int
    parameter: int
    value: torch.Tensor


class _Update:
    """The update of some segments, as a server makes it for one bucket."""

    def __init__(self, spec: OptimizerSpec, settings: bytes, segments: Sequence[_Segment]) -> None:
        self._update = SliceUpdate(spec, [(each.key, each.parameter, each.value) for each in segments])
        self._settings = settings
        taken = [each for each in segments if self._update.optimizes(each.key)]
        # Small gradients: the values must stay finite for as long as this is timed.
        self._gradients = {each.key: torch.randn_like(each.value) * 1e-3 for each in taken}
        self.elements = sum(each.value.numel() for each in taken)

    def __call__(self) -> None:
        self._update.apply(self._settings, self._gradients)


def _first(spec: OptimizerSpec) -> int:
    return next((index for index, group in enumerate(spec.assignment) if group >= 0), 0)


def _whole(parts: ModelParts) -> Iterator[list[_Segment]]:
    """Yield the whole tensors as one bucket."""
    # A server has them in the memory of its host.
    made = (torch.zeros_like(tensor.detach(), device="cpu") for tensor in parts.tensors)
    yield [_Segment(index, index, tensor) for index, tensor in enumerate(made)]


def _slices(parts: ModelParts, slicing: Slicing, trained: int) -> Iterator[list[_Segment]]:
    """Yield the buckets of the only server of a job with this model.

    trained: the number of a parameter that is trained.
    """
    if sum(tensor.numel() for tensor in parts.tensors) < _BUCKET:
        # Of so few elements the seconds of each cannot be told from those of the call.
        yield [_Segment(0, trained, torch.zeros(_BUCKET))]
        return
    topology = layout(Cluster(server_worker_separate=True, slicing=slicing))
    slices, left = slice_map_for(parts.parameters, topology), _MOST_ELEMENTS
    for bucket in slices.buckets:
        if left <= 0:
            return
        left -= bucket.hi - bucket.lo
        yield _segments(bucket, slices.spaces[bucket.space].dtype, [s.parameter for s in slices.segments])


def _segments(bucket: Bucket, dtype: str, parameters: Sequence[int]) -> list[_Segment]:
    flat = torch.zeros(bucket.hi - bucket.lo, dtype=torch_dtype(dtype))
    return [
        _Segment(piece.segment, parameters[piece.segment], flat[piece.lo - bucket.lo : piece.hi - bucket.lo])
        for piece in bucket.pieces
    ]
