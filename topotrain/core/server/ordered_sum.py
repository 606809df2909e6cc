"""The sum of a group's parts in a fixed order, which is part of the result.

Floating-point addition is not associative. Inside a unit parts are added in rank order, then the units in order
(`Topology.sum_tree`), whatever the transport and the order of arrival.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain

import torch

Tree = Sequence[Sequence[int]]
Part = tuple[float, torch.Tensor | None]


class ScratchBuffers:
    """Numbered buffers that are used again."""

    def __init__(self) -> None:
        # One sum uses several at once: 0 for the sum of a unit, 1 for a weighted part, 2 for a result that is not kept.
        self._held: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        # By number of elements, too: most buckets have one of two sizes, and slicing costs more than a lookup.
        self._views: dict[tuple[int, torch.dtype, int], torch.Tensor] = {}

    def like(self, number: int, like: torch.Tensor) -> torch.Tensor:
        """A buffer of this number with the size and dtype of a 1-D tensor."""
        dtype, count = like.dtype, like.numel()
        view = self._views.get((number, dtype, count))
        if view is None:
            buffer = self._held.get((number, dtype))
            if buffer is None or buffer.numel() < count:
                buffer = self._held[number, dtype] = torch.empty_like(like)
                # Views of the smaller buffer would keep its memory.
                self._views = {key: each for key, each in self._views.items() if key[:2] != (number, dtype)}
            view = self._views[number, dtype, count] = buffer[:count]
        return view


def canonical_mean(
    parts: Mapping[int, Part],
    tree: Tree,
    out: torch.Tensor,
    scratch: ScratchBuffers,
    divide: bool = True,
) -> None:
    """Write the weighted mean of the parts, added in the canonical order, into `out`.

    Args:
        parts: worker index -> (weight, 1-D gradient or None where the worker has none, which counts as zero).
        tree: worker indices by unit, as `Topology.sum_tree` gives them.
        out: 1-D result. It must not overlap a part.
        scratch: gives buffers like `out`, where one is needed.
        divide: divide by the sum of all weights; else the result is a plain sum.
    """
    # With equal weights the plain sum is divided by their number: multiplying by 1/3 has other bits than dividing by 3.
    weights = _weights(parts, tree)
    equal = not divide or len(set(chain(*weights))) <= 1
    count = sum(map(len, weights))
    if divide and count > 1 and out.dtype is torch.float16:
        parts = _with_headroom(parts, equal, count if equal else _total(weights))
        weights, equal = _weights(parts, tree), False
    started = False
    lone: torch.Tensor | None = None  # the first unit's only gradient, which is not in `out` yet
    for unit in tree:
        # Workers with weight 0 repeat a sample so that all take part in the backward. Their gradients do not count.
        terms = [(parts[w][0], parts[w][1]) for w in unit if w in parts and parts[w][0] > 0]
        grads = [(weight, grad) for weight, grad in terms if grad is not None]
        if not grads:
            continue
        if not started and equal and len(grads) == 1:
            # One pass over the memory: it is not copied before the next unit is added.
            lone, started = grads[0][1], True
        elif not started:
            # The first unit is summed in `out` itself, so that a group on one host needs no other buffer.
            _sum_unit(grads, equal, out, scratch)
            started = True
        else:
            term = _scaled(grads[0], equal, scratch)
            if len(grads) > 1:
                # Apart from `out`: (a + b) + (c + d) has other bits than ((a + b) + c) + d.
                term = scratch.like(0, out)
                _sum_unit(grads, equal, term, scratch)
            torch.add(out if lone is None else lone, term, out=out)
            lone = None
    if not started:
        out.zero_()
    elif lone is not None:
        out.copy_(lone)
    if started and divide and (count > 1 or not equal):
        _divide(out, count if equal else _total(weights))


class OrderedMean:
    """The mean, or the sum, of a group's parts, with the memory that it needs.

    Args:
        tree, divide: as for `canonical_mean`.
    """

    def __init__(self, tree: Tree, divide: bool = True) -> None:
        self._tree, self._divide = tree, divide
        self._scratch = ScratchBuffers()

    def write(self, parts: Mapping[int, Part], out: torch.Tensor) -> None:
        """Write the mean of the parts into `out`."""
        canonical_mean(parts, self._tree, out, self._scratch, self._divide)

    def passing(self, parts: Mapping[int, Part]) -> torch.Tensor:
        """The mean, for a caller that has used it before it asks for the next one."""
        if len(parts) == 1:
            ((weight, gradient),) = parts.values()
            if weight > 0 and gradient is not None:
                return gradient  # one part needs no sum, and no copy
        like = next(gradient for _, gradient in parts.values() if gradient is not None)
        out = self._scratch.like(2, like)
        self.write(parts, out)
        return out


def _weights(parts: Mapping[int, Part], tree: Tree) -> list[list[float]]:
    """The weights above 0, by unit."""
    return [[parts[worker][0] for worker in unit if worker in parts and parts[worker][0] > 0] for unit in tree]


def _total(weights: Sequence[Sequence[float]]) -> float:
    """The sum of all weights, in the order in which parts are added."""
    # Commits arrive in any order, and the last bit of a sum depends on it.
    return sum(map(sum, weights), 0.0)


def _with_headroom(parts: Mapping[int, Part], equal: bool, total: float) -> dict[int, Part]:
    """The parts with smaller weights: the sum of the weights is at most 1."""
    # In float16 three gradients of 30,000 have no sum.
    # A power of two changes no bit above the denormal numbers.
    factor = 0.5 ** math.frexp(total)[1]
    return {w: ((1.0 if equal else weight) * factor if weight > 0 else 0.0, g) for w, (weight, g) in parts.items()}


def _divide(out: torch.Tensor, by: float) -> None:
    """Divide in place."""
    # With a power of two the product has the bits of the quotient, and multiplying is faster than dividing.
    if math.frexp(by)[0] == 0.5:
        out.mul_(1.0 / by)
    else:
        out.div_(by)


def _sum_unit(grads: list[tuple[float, torch.Tensor]], equal: bool, out: torch.Tensor, scratch: ScratchBuffers) -> None:
    weight, first = grads[0]
    # One pass over the memory: the first part is not copied before the second is added.
    if equal and len(grads) > 1:
        torch.add(first, grads[1][1], out=out)
        rest = grads[2:]
    else:
        torch.mul(first, 1.0 if equal else weight, out=out)
        rest = grads[1:]
    for term in rest:
        out.add_(_scaled(term, equal, scratch))


def _scaled(term: tuple[float, torch.Tensor], equal: bool, scratch: ScratchBuffers) -> torch.Tensor:
    weight, grad = term
    return grad if equal else torch.mul(grad, weight, out=scratch.like(1, grad))
