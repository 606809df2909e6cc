"""Costs of a split program: memory of workers, bytes on edges, operations.

- Bytes on edges are exact, because they are read from the transfers that the workers use.
- Memory is what each worker holds of the parameters, and what autograd keeps for the backward, counted on fake tensors.
- Operations are counted on shapes. Times computed from them are estimates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from topotrain.parallel.estimate.fake_run import NOTHING, StepCost, rehearse, with_gradient
from topotrain.parallel.placement.parameter_owners import ParameterOwners, WholeTensor
from topotrain.parallel.program.layouts import even, transfers
from topotrain.parallel.program.split_program import LayoutEdge, Program

Pairs = Mapping[tuple[int, int], int]
"""Bytes by (sender, receiver), which are workers of the group. No worker sends to itself."""


@dataclass(frozen=True, slots=True)
class EdgeCost:
    """Bytes that one edge moves per training step, by pair of workers."""

    edge: LayoutEdge
    forward: Pairs
    backward: Pairs

    @property
    def nbytes(self) -> tuple[int, int]:
        """Total bytes of the forward, and of the backward."""
        return sum(self.forward.values()), sum(self.backward.values())


@dataclass(frozen=True, slots=True)
class WorkerCost:
    """Memory in bytes and operations of one worker per training step.

    Attributes:
        parameters, buffers: the parts that the worker holds.
        trainable: bytes of the parameters that have a gradient.
        kept: bytes that stay from the forward for the backward.
        peak: most bytes that are live in the forward, `kept` included.
        flops: operations of the forward, and of the backward.
    """

    worker: int
    parameters: int
    trainable: int
    buffers: int
    kept: int
    peak: int
    flops: tuple[int, int]


@dataclass(frozen=True, slots=True)
class CostReport:
    """All costs of a program for given numbers of samples.

    `steps[worker][step]` is the cost of a step on a worker that runs it.
    """

    program: Program
    samples: tuple[int, ...]
    microbatches: int
    edges: tuple[EdgeCost, ...]
    workers: tuple[WorkerCost, ...]
    steps: tuple[Mapping[int, StepCost], ...]

    def pairs(self, backward: bool = False) -> Pairs:
        """Return bytes per step by (sender, receiver), summed over all edges."""
        found: dict[tuple[int, int], int] = {}
        for edge in self.edges:
            for pair, size in (edge.backward if backward else edge.forward).items():
                found[pair] = found.get(pair, 0) + size
        return MappingProxyType(dict(sorted(found.items())))

    def sent(self, worker: int) -> tuple[int, int]:
        """Return the bytes that a worker sends per step, forward and backward."""
        forward, backward = (self.pairs(back) for back in (False, True))
        return (
            sum(size for (source, _), size in forward.items() if source == worker),
            sum(size for (source, _), size in backward.items() if source == worker),
        )


def estimate_costs(
    program: Program,
    model: nn.Module,
    division: ParameterOwners,
    samples: Sequence[int],
    microbatches: int = 1,
    examples: Mapping[str, Any] = NOTHING,
) -> CostReport:
    """Compute the costs of a program with these samples per worker.

    Nothing is computed on real tensors, and nothing is sent.

    Args:
        program: the program of all workers of a group.
        model: whole or localized. Parameters may be on the meta device.
        division: the owners of its parameters (`parameter_owners.divide`).
        samples: each worker's share of the group's batch.
        microbatches: the number of parts into which each share is cut.
        examples: arguments of the forward for the group's batch, by name. Arguments that are tensors may be left out.

    Raises:
        ValueError: `samples` has not one number for each worker.
    """
    if len(samples) != program.workers:
        raise ValueError(f"samples = {tuple(samples)}: must be one number for each of {program.workers} workers")
    graded = with_gradient(program, model)
    parts = chunks(samples, microbatches)
    edges = tuple(_edge(edge, parts, edge.value in graded) for edge in program.edges)
    steps, workers = [], []
    for worker in range(program.workers):
        done = rehearse(program, model, division, worker, samples, examples)
        held = [_held(whole, worker) for whole in division.parameters]
        trained = [_held(whole, worker) for whole in division.parameters if whole.tensor.requires_grad]
        others = buffer_bytes(division, worker)
        flops = [(cost.flops, cost.backward_flops) for cost in done.costs.values()]
        both = (sum(forward for forward, _ in flops), sum(back for _, back in flops))
        workers.append(WorkerCost(worker, sum(held), sum(trained), others, done.kept, done.peak, both))
        steps.append(MappingProxyType(done.costs))
    return CostReport(program, tuple(samples), microbatches, edges, tuple(workers), tuple(steps))


def chunks(samples: Sequence[int], microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Return the samples of each worker in each micro-batch. Shares are cut evenly."""
    cuts = [even(share, microbatches) for share in samples]
    return tuple(tuple(high - low for low, high in (cut[m] for cut in cuts)) for m in range(microbatches))


def buffer_bytes(division: ParameterOwners, worker: int) -> int:
    """Return the bytes of the model's buffers that a worker holds."""
    return sum(_held(whole, worker) for whole in (*division.buffers, *division.passing))


def _held(whole: WholeTensor, worker: int) -> int:
    like = whole.like()
    return sum(share.of(like).numel() for share in whole.shares if share.here(worker)) * like.element_size()


def _edge(edge: LayoutEdge, parts: Sequence[Sequence[int]], graded: bool) -> EdgeCost:
    size = getattr(torch, edge.shape.dtype).itemsize
    forward: dict[tuple[int, int], int] = {}
    for samples in parts:
        for move in transfers(edge, samples):
            count = 1
            for low, high in move.box:
                count *= high - low
            # Workers send themselves nothing, and values without samples are not sent.
            if move.source != move.target and count:
                pair = (move.source, move.target)
                forward[pair] = forward.get(pair, 0) + count * size
    # A gradient has the size of its value, and takes the way back.
    backward = {(target, source): nbytes for (source, target), nbytes in forward.items()} if graded else {}
    return EdgeCost(edge, MappingProxyType(forward), MappingProxyType(backward))
