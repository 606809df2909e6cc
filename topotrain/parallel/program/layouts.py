"""Parts of a tensor on each worker as boxes, and transfers between layouts.

A box is a range (first, end) per dimension, in coordinates of the whole tensor with all samples of the group, worker
0's first. Nothing here touches data: the planner, the runner and the tests use the same functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from topotrain.parallel.program.split_program import LayoutEdge, LocationKind, SymbolicShape, ValueLocation

Box = tuple[tuple[int, int], ...]


def even(count: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Split `count` items into `parts` ranges of lengths that differ by at most one."""
    return tuple((count * k // parts, count * (k + 1) // parts) for k in range(parts))


def box(layout: ValueLocation, worker: int, shape: SymbolicShape, samples: Sequence[int]) -> Box | None:
    """Return the part of a value that `worker` has, or None if it has no part.

    Args:
        samples: each worker's number of samples.

    Raises:
        ValueError: the layout is BATCH and the shape has no batch dimension, or the layout is OWN, which is part of no
            whole tensor.
    """
    sizes = shape.at(sum(samples))
    ranges = [(0, size) for size in sizes]
    if layout.where is LocationKind.AT:
        return tuple(ranges) if layout.worker == worker else None
    if layout.where is LocationKind.OWN:
        raise ValueError(f"a value of shape {sizes} that each worker has for itself is part of no whole tensor")
    if layout.where is LocationKind.BATCH:
        if shape.batch < 0:
            raise ValueError(f"a value of shape {sizes} without a batch dimension cannot lie by samples")
        first = sum(samples[:worker])
        ranges[shape.batch] = (first * shape.per_sample, (first + samples[worker]) * shape.per_sample)
    elif layout.where is LocationKind.FEATURE:
        ranges[layout.dim] = even(sizes[layout.dim], len(samples))[worker]
    return tuple(ranges)


def sizes_of(part: Box) -> tuple[int, ...]:
    """Return the lengths of a box's ranges."""
    return tuple(end - first for first, end in part)


def within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Return the indices of `inner` in a tensor that holds `outer`."""
    return tuple(slice(first - start, end - start) for (first, end), (start, _) in zip(inner, outer, strict=True))


@dataclass(frozen=True, slots=True)
class Transfer:
    """Worker `target` gets `box` from worker `source`, which may be the same."""

    source: int
    target: int
    box: Box


def transfers(edge: LayoutEdge, samples: Sequence[int]) -> tuple[Transfer, ...]:
    """Return the transfers of an edge, by target, then by source, without empty boxes."""
    # A value that every worker has is taken from the worker itself.
    workers = range(len(samples))
    own = edge.source.where in (LocationKind.SAME, LocationKind.WHOLE)
    parts = [box(edge.source, worker, edge.shape, samples) for worker in workers]
    found = []
    for target in workers:
        wanted = box(edge.target, target, edge.shape, samples)
        for source in (target,) if own else workers:
            common = _common(parts[source], wanted)
            if common is not None:
                found.append(Transfer(source, target, common))
    return tuple(found)


def _common(one: Box | None, other: Box | None) -> Box | None:
    if one is None or other is None:
        return None
    ranges = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(first >= end for first, end in ranges) else ranges
