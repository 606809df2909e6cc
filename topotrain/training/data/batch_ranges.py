"""Ranges [first, last) of an epoch's batches: those that are done, and those left.

A job that is continued counts the batches that are left from 0 again, in their order, whatever its layout is now.
`origin` leads back from them to the numbers that the epoch's batches had at first.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
Runs = tuple[tuple[int, int], ...]
"""Sorted, none of them empty, and no two of them meet."""


def merged(runs: Iterable[tuple[int, int]]) -> Runs:
    """The same batches as `Runs`; those that are named twice are there once."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(run for run in runs if run[0] < run[1]):
        # `<=`: ranges that meet are one range.
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return tuple(found)


def nth(done: Runs, position: int) -> int:
    """Number of the batch that is at this position among those that are left."""
    for first, last in done:
        if position < first:
            break
        position += last - first
    return position


def left_below(done: Runs, number: int) -> int:
    """How many batches below this number are left."""
    return number - sum(min(last, number) - first for first, last in done if first < number)


def left(items: Iterable[T], done: Runs) -> Iterator[T]:
    """The items, counted from 0, that are left, each drawn when it is needed."""
    flow, at = iter(items), 0
    for first, last in done:
        yield from islice(flow, first - at)
        for _ in islice(flow, last - first):
            pass
        at = last
    yield from flow


def origin(done: Runs, positions: Iterable[tuple[int, int]]) -> Runs:
    """`done` together with positions (ranges of them) among the batches left then."""
    found = list(done)
    for first, last in positions:
        while first < last:
            number = nth(done, first)
            # The positions go on behind the next range that is done.
            gap = next((start for start, _ in done if start > number), number + last - first)
            count = min(last - first, gap - number)
            found.append((number, number + count))
            first += count
    return merged(found)
