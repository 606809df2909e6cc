"""Which part of a tensor which worker has, as boxes, and what travels when a layout becomes another one.

A box is a range (first, end) per dimension, in coordinates of the whole tensor: all samples of the group, worker 0's
first. Nothing here knows data: the same functions serve the plan, the runner and the tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from topotrain.parallel.program.split_program import LayoutEdge, LocationKind, SymbolicShape, ValueLocation

Box = tuple[tuple[int, int], ...]


def even(count: int, parts: int) -> tuple[tuple[int, int], ...]:
    """`count` things in `parts` ranges whose lengths differ by at most one."""
    return tuple((count * k // parts, count * (k + 1) // parts) for k in range(parts))


def box(layout: ValueLocation, worker: int, shape: SymbolicShape, samples: Sequence[int]) -> Box | None:
    """The part of a value that `worker` has; None where it has nothing by its layout.

    Args:
        samples: each worker's number of samples.

    Raises:
        ValueError: a layout over the samples, but the shape has no batch dimension; OWN, which has no place in a whole.
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
    """The lengths of a box's ranges."""
    return tuple(end - first for first, end in part)


def within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Indices of `inner` in a tensor that holds `outer`."""
    return tuple(slice(first - start, end - start) for (first, end), (start, _) in zip(inner, outer, strict=True))


@dataclass(frozen=True, slots=True)
class Transfer:
    """Worker `target` gets `box` from worker `source`, which may be itself."""

    source: int
    target: int
    box: Box


def transfers(edge: LayoutEdge, samples: Sequence[int]) -> tuple[Transfer, ...]:
    """All that travels over an edge, by target, then by source; empty boxes do not.

    What every worker has already (SAME, WHOLE) it takes from itself.
    """
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
