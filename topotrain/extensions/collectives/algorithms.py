"""Collective algorithms as data, and the interpreter that runs them.

An algorithm is a family of spanning trees over the ranks 0..P-1, one tree per home rank. The sum of a bucket's
gradients flows up the tree to the home of the bucket, and the result flows down a tree to all ranks.

    kAuto    a star at the home. Its sum is the canonical one.
    kNaive   a star at rank 0 for every home: gather to one master, add, broadcast. The canonical sum as well.
    kRing    up the path home+1, home+2, ..., home, down the path home, home+1, .... With buckets spread evenly over
             the homes this is the ring all-reduce in chunks (Patarasuk and Yuan, 2009), P-1 hops each way.
    kTree    the binary tree in which rank (home + i) mod P has the parent (home + (i-1)//2) mod P, both ways. Each
             rank is an inner node of some homes' trees and a leaf of others'.

A bucket has one reduction at a time. No rank can send a part of the next one before it has the result of this one,
which needs the parts of all ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from topotrain.config.job import Algorithm
from topotrain.core.protocol import ProtocolError
from topotrain.extensions.collectives.collective_messages import CollectivePart

VALUES = -1  # `CollectivePart.ordinal` of a result: the new values of the bucket, not the mean of a backward

MEAN, NEW, SCRATCH = "mean", "values", "scratch"


# --- the algorithms ----------------------------------------------------------------------------------------------


def center(algorithm: Algorithm, home: int) -> int:
    """Return the rank that gets the sum of the buckets of `home`."""
    return 0 if algorithm is Algorithm.kNaive else home


def up(algorithm: Algorithm, size: int, home: int) -> tuple[int, ...]:
    """Return the parent of each rank towards `home`. The center is its own parent."""
    return _tree(algorithm, size, center(algorithm, home), 1)


def down(algorithm: Algorithm, size: int, home: int) -> tuple[int, ...]:
    """Return each rank's source of the result. The center is its own source."""
    return _tree(algorithm, size, center(algorithm, home), -1)


def _tree(algorithm: Algorithm, size: int, root: int, direction: int) -> tuple[int, ...]:
    def parent(rank: int) -> int:
        if rank == root:
            return root
        if algorithm is Algorithm.kRing:
            return (rank + direction) % size
        if algorithm is Algorithm.kTree:
            return (root + ((rank - root) % size - 1) // 2) % size
        return root

    return tuple(map(parent, range(size)))


def children(parents: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the ranks with the parent `rank`, in order."""
    return tuple(child for child, parent in enumerate(parents) if parent == rank != child)


def slots(algorithm: Algorithm, size: int, rank: int, home: int) -> tuple[str, ...]:
    """Return the buffers that a `Relay` at `rank` needs for each bucket of `home`.

    - "mean": the center makes the sum here. Other ranks receive a mean here.
    - "values": new values are received here.
    - "up0", "up1", ...: the part of each child. The sum to pass on replaces one of them.
    - "scratch": used within one call and only with unequal weights, so all buckets may share the memory.
    """
    # One buffer per child and bucket is enough, since a child's next part comes after this reduction's result.
    count = len(children(up(algorithm, size, home), rank))
    return (MEAN, NEW, SCRATCH, *(f"up{n}" for n in range(count)))


# --- inputs and outputs ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Contribution:
    """The contribution of one rank, or of a subtree, to a bucket.

    Attributes:
        weight, count: sum and number of the weights above 0.
        each: their common value, or 0.0 if they differ or there are none. With 0.0 `body` is the weighted sum, else the
            plain sum.
        present: a bit per piece of the bucket.
        body: 1-D, or None if no rank has a gradient.
    """

    weight: float
    count: int
    each: float
    present: bytes
    body: torch.Tensor | None

    @classmethod
    def of(cls, weights: Sequence[float], present: bytes, body: torch.Tensor | None) -> "Contribution":
        """Return the contribution of a unit with workers of these weights, in rank order.

        `body` is their sum. Workers without a gradient count. Workers with weight 0 do not, and `body` must hold
        nothing of them.
        """
        # A worker with weight 0 does not count, one without a gradient does: its zeros are part of the mean.
        positive = [weight for weight in weights if weight > 0]
        even = len(set(positive)) == 1
        return cls(sum(positive), len(positive), positive[0] if even else 0.0, present, body if positive else None)

    @property
    def divisor(self) -> float:
        """The divisor of the sum."""
        # Equal weights count by their number, since × 1/3 gives other bits than / 3. Without a weight the sum is 0.
        return float(self.count) if self.each else self.weight or 1.0


@dataclass(frozen=True, slots=True)
class SendPart:
    """A message to rank `to`."""

    to: int
    hop: CollectivePart


@dataclass(frozen=True, slots=True)
class CompleteSum:
    """This rank is the center, and the sum of all parts is complete.

    `part.body` is the buffer "mean" of the bucket, or None if no rank has a gradient. Divide it in place by
    `part.divisor`.
    """

    step: int
    ordinal: int
    bucket: int
    part: Contribution


@dataclass(frozen=True, slots=True)
class CollectiveResult:
    """A result has arrived: the mean of a backward, or new values."""

    hop: CollectivePart  # its ordinal is VALUES for new values


Out = SendPart | CompleteSum | CollectiveResult


# --- the interpreter ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _TreePosition:
    """One rank's position in both trees of a home."""

    parent: int
    below: tuple[int, ...]
    order: tuple[int, ...]  # ranks of the terms of a sum: the children and this rank
    result_source: int  # the source of results
    result_targets: tuple[int, ...]  # the ranks to which results are passed on


@dataclass(slots=True)
class _Sum:
    """The parts of a bucket's last reduction, by rank."""

    expected: int
    key: tuple[int, int] = (-1, -1)
    parts: dict[int, Contribution] = field(default_factory=dict)

    def begin(self, key: tuple[int, int]) -> None:
        """Begin a later reduction."""
        self.key = key
        self.parts.clear()

    @property
    def done(self) -> bool:
        return len(self.parts) == self.expected


class Relay(ABC):
    """One rank's part in the collectives of all buckets. Not thread-safe.

    A subclass provides the memory. Call `local` with this rank's part of each bucket once per reduction, also without a
    gradient. Call `arrive` with every received message. At the center, call `result` with the result of a sum. All
    three return the actions to take, in order. Reductions of a bucket have rising (step, ordinal).

    Args:
        algorithm, size, rank: the algorithm, the number of ranks, and this rank.
        homes: the rank of each bucket's home.
    """

    def __init__(self, algorithm: Algorithm, size: int, rank: int, homes: Sequence[int]) -> None:
        self._rank, self._homes = rank, homes
        self._positions = tuple(_position(algorithm, size, rank, h) for h in range(size))
        self._sums: dict[int, _Sum] = {}
        # By bucket and whether it was new values, which come after the means of a step but have the ordinal -1.
        self._last_results: dict[tuple[int, bool], tuple[int, int]] = {}

    @abstractmethod
    def buffer(self, slot: str, bucket: int) -> torch.Tensor:
        """Return 1-D memory of the bucket's size, always the same; `slots` lists all."""

    def local(self, step: int, ordinal: int, bucket: int, part: Contribution) -> list[Out]:
        """Add this rank's part.

        Its body must not change until a result of the bucket has arrived.
        """
        return self._add(self._rank, step, ordinal, bucket, part)

    def arrive(self, sender: int, hop: CollectivePart) -> list[Out]:
        """Handle a message of a neighbor. Duplicates are ignored.

        Raises:
            ProtocolError: the sender is not such a neighbor, or a reduction begins before the last one is complete.
        """
        self._check(sender, hop)
        if hop.up:
            part = Contribution(hop.weight, hop.count, hop.each, hop.present, hop.body)
            return self._add(sender, hop.step, hop.ordinal, hop.bucket, part)
        # A result that came twice was passed on already.
        if self._is_old(sender, hop):
            return []
        self._last_results[hop.bucket, hop.ordinal == VALUES] = (hop.step, hop.ordinal)
        return [*self._send_result(hop), CollectiveResult(hop)]

    def place(self, sender: int, hop: CollectivePart, viewable: bool) -> torch.Tensor | None:
        """Return memory for the body of a message.

        None, only if `viewable`: a view of the sender's memory is enough.

        Raises:
            ProtocolError: as `arrive`, or the message is a duplicate and its buffer is in use.
        """
        self._check(sender, hop)
        # A view is enough where the body is read once. A result that is passed on needs memory of this process.
        if viewable and (hop.up or not self._position(hop.bucket).result_targets or self._is_old(sender, hop)):
            return None
        # Without this check a repeated message would be received into a buffer that a sum is reading.
        if self._is_old(sender, hop):
            raise ProtocolError(f"{_name(hop)} of rank {sender} came twice")
        if not hop.up:
            return self.buffer(NEW if hop.ordinal == VALUES else MEAN, hop.bucket)
        return self._inbox(sender, hop.bucket)

    def result(
        self, step: int, ordinal: int, bucket: int, present: bytes, body: torch.Tensor | None, version: int = 0
    ) -> list[Out]:
        """Send a result from the center to all other ranks.

        The result is the mean of a bucket or, with `ordinal` VALUES, its new values. A sum without a body has a result
        without one. The body must not change until this rank has the CompleteSum of a later reduction of the bucket.
        """
        # Also sent without a body: only by the result a rank knows that the reduction is complete.
        position = self._position(bucket)
        if position.parent != self._rank:
            raise ValueError(f"rank {self._rank} is not the center of bucket {bucket}")
        return self._send_result(CollectivePart(step, ordinal, bucket, False, 0.0, 0, 0.0, present, version, body=body))

    def reset(self) -> None:
        """Forget all parts. Reductions start again, with any step."""
        self._sums.clear()
        self._last_results.clear()

    # --- up ------------------------------------------------------------------------------------------------------

    def _add(self, source: int, step: int, ordinal: int, bucket: int, part: Contribution) -> list[Out]:
        position, key = self._position(bucket), (step, ordinal)
        current = self._sums.setdefault(bucket, _Sum(len(position.order)))
        # A later reduction begins only when all ranks have the result of this one, so no part of this one is lost.
        if key > current.key:
            current.begin(key)
        if key < current.key or source in current.parts:
            return []
        current.parts[source] = part
        if not current.done:
            return []
        # Summed at once when all parts are here, in the order of ranks: the bits never depend on the order of arrival.
        total = self._total(bucket, position, current.parts)
        if position.parent == self._rank:
            return [CompleteSum(step, ordinal, bucket, total)]
        return [SendPart(position.parent, _upward(step, ordinal, bucket, total))]

    def _total(self, bucket: int, position: _TreePosition, parts: dict[int, Contribution]) -> Contribution:
        # A rank without counted samples adds neither weight nor gradient.
        counted = [parts[rank] for rank in position.order if parts[rank].count]
        weights = {part.each for part in counted}
        each = weights.pop() if len(weights) == 1 else 0.0
        # The union also has pieces of uncounted ranks: a gradient of zeros is not the same as none for the optimizer.
        present = 0
        for part in parts.values():
            present |= int.from_bytes(part.present, "little")
        bits = present.to_bytes(max(len(part.present) for part in parts.values()), "little")
        weight, count = sum(part.weight for part in counted), sum(part.count for part in counted)
        return Contribution(
            weight, count, each, bits, self._sum(bucket, position, parts, not each) if present else None
        )

    def _sum(
        self, bucket: int, position: _TreePosition, parts: dict[int, Contribution], mixed: bool
    ) -> torch.Tensor | None:
        at_center = position.parent == self._rank
        ranks = [rank for rank in position.order if parts[rank].body is not None and parts[rank].count]
        if not at_center and not ranks:
            return None
        if not at_center and len(ranks) == 1 and not (mixed and parts[ranks[0]].each):
            return parts[ranks[0]].body  # nothing to add: the part is passed on without a copy
        # Adding needs no extra memory: the buffer has been read as a term when the sum is written over it.
        # A sum to pass on is made in the buffer of the first child with a part, which is one of the first two terms.
        inbox = next(
            (rank for rank in ranks if rank in position.below), position.below[0] if position.below else self._rank
        )
        out = self.buffer(MEAN, bucket) if at_center else self._inbox(inbox, bucket)
        terms = [self._term(bucket, rank, parts[rank], mixed, out.dtype) for rank in ranks]
        # Ranks have gradients, but none with weight: the mean is zero.
        if not terms:
            return out.zero_()
        if len(terms) == 1:
            return out.copy_(terms[0])
        torch.add(terms[0], terms[1], out=out)
        for term in terms[2:]:
            out.add_(term)
        return out

    def _term(self, bucket: int, rank: int, part: Contribution, mixed: bool, dtype: torch.dtype) -> torch.Tensor:
        assert part.body is not None
        body = part.body if part.body.dtype == dtype else part.body.view(dtype)  # a view of a peer's memory is bytes
        if not (mixed and part.each):
            return body
        # The part may be a view of another process's memory, so the product goes into memory of this one.
        out = self.buffer(SCRATCH, bucket) if rank == self._rank else self._inbox(rank, bucket)
        return torch.mul(body, part.each, out=out)

    def _inbox(self, child: int, bucket: int) -> torch.Tensor:
        return self.buffer(f"up{self._position(bucket).below.index(child)}", bucket)

    # --- down ----------------------------------------------------------------------------------------------------

    def _send_result(self, hop: CollectivePart) -> list[Out]:
        return [SendPart(rank, hop) for rank in self._position(hop.bucket).result_targets]

    # --- both ----------------------------------------------------------------------------------------------------

    def _position(self, bucket: int) -> _TreePosition:
        return self._positions[self._homes[bucket]]

    def _check(self, sender: int, hop: CollectivePart) -> None:
        position = self._position(hop.bucket)
        if sender not in (position.below if hop.up else (position.result_source,)) or sender == self._rank:
            raise ProtocolError(f"{_name(hop)}: rank {sender} is not the neighbor of rank {self._rank} that sends it")
        current = self._sums.get(hop.bucket)
        if hop.up and current is not None and not current.done and (hop.step, hop.ordinal) > current.key:
            raise ProtocolError(f"{_name(hop)} of rank {sender}, but {current.key} is still being added up")

    def _is_old(self, sender: int, hop: CollectivePart) -> bool:
        key = (hop.step, hop.ordinal)
        if not hop.up:
            return key <= self._last_results.get((hop.bucket, hop.ordinal == VALUES), (-1, -1))
        current = self._sums.get(hop.bucket)
        # Old: the reduction is over, or it is the present one and has the sender's part already.
        return current is not None and (key, True) <= (current.key, current.done or sender in current.parts)


def _position(algorithm: Algorithm, size: int, rank: int, home: int) -> _TreePosition:
    above, below = up(algorithm, size, home), down(algorithm, size, home)
    mine = children(above, rank)
    return _TreePosition(above[rank], mine, tuple(sorted((*mine, rank))), below[rank], children(below, rank))


def _upward(step: int, ordinal: int, bucket: int, part: Contribution) -> CollectivePart:
    return CollectivePart(
        step, ordinal, bucket, True, part.weight, part.count, part.each, part.present, 0, body=part.body
    )


def _name(hop: CollectivePart) -> str:
    return f"hop of bucket {hop.bucket}, step {hop.step}, reduction {hop.ordinal}, {'up' if hop.up else 'down'}"
