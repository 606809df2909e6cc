"""The gradients of a unit's workers, until they can be added up.

The lead keeps one collection for all servers that it adds up for. A collection returns the sums that can be made now,
and makes none.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from topotrain.config.sharding import SliceMap
from topotrain.core.protocol import NO_REVISION, bits_to_int
from topotrain.extensions.host_sums.host_sum_messages import HostBackwardEnd, HostCommit, HostGradient, HostStepEnd


@dataclass(frozen=True, slots=True)
class UnitSum:
    """Gradients of a bucket that are to be sent.

    Attributes:
        gradients: by worker, in rank order, at least one.
        weights: of these workers.
        number: as in `HostPush`.
        apart: send them one by one.
    """

    step: int
    ordinal: int
    bucket: int
    gradients: Mapping[int, HostGradient]
    weights: Mapping[int, float]
    number: int = 0
    apart: bool = False


class UnitGradients(ABC):
    """The gradients of the workers of a unit."""

    def __init__(self, workers: Sequence[int]) -> None:
        self._workers = tuple(workers)

    @abstractmethod
    def add(self, worker: int, gradient: HostGradient) -> list[UnitSum]:
        """Keep a gradient."""

    @abstractmethod
    def separate(self, step: int, ordinal: int, bucket: int) -> list[UnitSum]:
        """The sum of a bucket is of no use: its gradients are needed one by one."""

    def end(self, worker: int, message: HostBackwardEnd) -> list[UnitSum]:
        """A worker's backward is over."""
        return []

    def commit(self, worker: int, message: HostCommit) -> list[UnitSum]:
        """A worker is about to commit a step."""
        return []

    def take_ends(self) -> list[tuple[int, HostStepEnd]]:
        """Return the (shard, end) of steps that are complete, once."""
        return []


@dataclass(slots=True)
class _Backward:
    """One backward of the unit."""

    gradients: dict[int, dict[int, HostGradient]] = field(default_factory=dict)  # by bucket and worker
    ends: dict[int, int] = field(default_factory=dict)  # worker -> bits of its buckets
    summed: set[int] = field(default_factory=set)
    apart: bool = False


class BackwardGradients(UnitGradients):
    """The gradients of backwards that are sums of their own.

    The first gradient of each worker counts. A bucket is summed when every worker has pushed it, or has ended the
    backward without it.
    """

    def __init__(self, workers: Sequence[int]) -> None:
        super().__init__(workers)
        self._backwards: dict[tuple[int, int], _Backward] = {}  # by (step, ordinal)

    def _backward(self, step: int, ordinal: int) -> _Backward | None:
        """A backward, begun if it is new. None: a later one has begun, so it is over."""
        key = (step, ordinal)
        known = self._backwards.get(key)
        if known is None and not any(other > key for other in self._backwards):
            # No worker begins a backward before the means of the one before, for which each gradient was needed.
            known = _Backward()
            self._backwards = {key: known}
        return known

    def add(self, worker: int, gradient: HostGradient) -> list[UnitSum]:
        backward = self._backward(gradient.step, gradient.ordinal)
        if backward is None:
            return []
        backward.gradients.setdefault(gradient.bucket, {}).setdefault(worker, gradient)
        return self._complete(backward, gradient.step, gradient.ordinal, (gradient.bucket,))

    def end(self, worker: int, message: HostBackwardEnd) -> list[UnitSum]:
        backward = self._backward(message.step, message.ordinal)
        if backward is None:
            return []
        backward.ends[worker] = bits_to_int(message.pushed)
        return self._complete(backward, message.step, message.ordinal, sorted(backward.gradients))

    def _complete(self, backward: _Backward, step: int, ordinal: int, buckets: Iterable[int]) -> list[UnitSum]:
        found = []
        for bucket in buckets:
            held = backward.gradients[bucket]
            if bucket not in backward.summed and all(
                worker in held or (worker in backward.ends and not backward.ends[worker] >> bucket & 1)
                for worker in self._workers
            ):
                backward.summed.add(bucket)
                found.append(self._sum(backward, step, ordinal, bucket))
        return found

    def _sum(self, backward: _Backward, step: int, ordinal: int, bucket: int) -> UnitSum:
        held = backward.gradients[bucket]
        ordered = {worker: held[worker] for worker in self._workers if worker in held}
        weights = {worker: gradient.weight for worker, gradient in ordered.items()}
        return UnitSum(step, ordinal, bucket, ordered, weights, apart=backward.apart)

    def separate(self, step: int, ordinal: int, bucket: int) -> list[UnitSum]:
        """As `UnitGradients.separate`. The other buckets of the backward follow."""
        backward = self._backwards.get((step, ordinal))
        if backward is None or bucket not in backward.summed:
            return []
        backward.apart = True
        return [self._sum(backward, step, ordinal, bucket)]


@dataclass(slots=True)
class _Sent:
    """The last sum of a bucket: the revision and the weight of each worker."""

    revisions: Mapping[int, int]
    weights: Mapping[int, float]
    number: int
    apart: bool


class CommittedGradients(UnitGradients):
    """The gradients of steps in which a later push replaces an earlier one.

    A bucket is summed when every worker has a newer push of it than in the sum before, and again at the commits if they
    name other pushes, or other weights.

    Args:
        workers: of the unit.
        slice_map: of the model.
        shards: the servers that this worker adds up for.
    """

    def __init__(self, workers: Sequence[int], slice_map: SliceMap, shards: Iterable[int]) -> None:
        super().__init__(workers)
        self._buckets = {shard: [bucket.id for bucket in slice_map.buckets_of(shard)] for shard in shards}
        self._shard = {bucket: shard for shard, buckets in self._buckets.items() for bucket in buckets}
        self._begin(-1)

    def _begin(self, step: int) -> None:
        self._step = step
        self._held: dict[int, dict[int, HostGradient]] = {}  # by bucket and worker
        self._sent: dict[int, _Sent] = {}
        self._commits: dict[int, dict[int, HostCommit]] = {}  # by shard and worker
        self._ended: set[int] = set()
        self._ends: list[tuple[int, HostStepEnd]] = []

    def _is_current(self, step: int) -> bool:
        # No worker begins a step before all have committed the one before, and got the reply.
        if step > self._step:
            self._begin(step)
        return step == self._step

    def add(self, worker: int, gradient: HostGradient) -> list[UnitSum]:
        shard = self._shard.get(gradient.bucket)
        if shard is None or not self._is_current(gradient.step):
            return []
        held = self._held.setdefault(gradient.bucket, {})
        old = held.get(worker)
        if old is not None and old.ordinal >= gradient.ordinal:
            return []
        held[worker] = gradient
        if len(self._commits.get(shard, ())) == len(self._workers):
            return self._finish(shard)  # on a transport that reorders, a commit may overtake its pushes
        sent = self._sent.get(gradient.bucket)
        if len(held) < len(self._workers):
            return []
        if sent is not None and any(held[w].ordinal <= sent.revisions.get(w, -1) for w in self._workers):
            return []
        return [self._sum(gradient.bucket, held, {w: held[w].weight for w in held}, apart=False)]

    def _sum(
        self, bucket: int, gradients: Mapping[int, HostGradient], weights: Mapping[int, float], apart: bool
    ) -> UnitSum:
        ordered = {worker: gradients[worker] for worker in self._workers if worker in gradients}
        before = self._sent.get(bucket)
        number = 0 if before is None else before.number + 1
        revisions = {worker: gradient.ordinal for worker, gradient in ordered.items()}
        self._sent[bucket] = _Sent(revisions, dict(weights), number, apart)
        return UnitSum(self._step, 0, bucket, ordered, weights, number, apart)

    def commit(self, worker: int, message: HostCommit) -> list[UnitSum]:
        if message.shard not in self._buckets or not self._is_current(message.step):
            return []
        commits = self._commits.setdefault(message.shard, {})
        commits.setdefault(worker, message)
        return self._finish(message.shard) if len(commits) == len(self._workers) else []

    def _finish(self, shard: int) -> list[UnitSum]:
        """Return the sums that the commits need, once all their pushes are here."""
        commits, buckets = self._commits[shard], self._buckets[shard]
        if shard in self._ended:
            return []
        wanted: dict[int, dict[int, HostGradient]] = {}
        for at, bucket in enumerate(buckets):
            wanted[bucket] = {}
            for worker, commit in commits.items():
                revision = commit.revisions[at]
                gradient = self._held.get(bucket, {}).get(worker)
                if revision == NO_REVISION:
                    continue
                if gradient is None or gradient.ordinal < revision:
                    return []
                wanted[bucket][worker] = gradient
        self._ended.add(shard)
        # The servers may leave out gradients that are not finite, and then need the others one by one.
        apart = not all(commit.finite for commit in commits.values())
        found = [self._last_sum(bucket, gradients, commits, apart) for bucket, gradients in wanted.items() if gradients]
        numbers = bytes(self._sent[b].number + 1 if b in self._sent else 0 for b in buckets)
        self._ends.append((shard, HostStepEnd(self._step, numbers)))
        return [each for each in found if each is not None]

    def _last_sum(
        self, bucket: int, gradients: Mapping[int, HostGradient], commits: Mapping[int, HostCommit], apart: bool
    ) -> UnitSum | None:
        weights = {worker: commits[worker].weight for worker in gradients}
        revisions = {worker: gradient.ordinal for worker, gradient in gradients.items()}
        sent = self._sent.get(bucket)
        if sent is not None and (sent.revisions, sent.weights, sent.apart) == (revisions, weights, apart):
            return None
        return self._sum(bucket, gradients, weights, apart)

    def separate(self, step: int, ordinal: int, bucket: int) -> list[UnitSum]:
        sent = self._sent.get(bucket)
        if step != self._step or sent is None or sent.apart:
            return []
        gradients = {worker: self._held[bucket][worker] for worker in sent.revisions}
        return [self._sum(bucket, gradients, sent.weights, apart=True)]

    def take_ends(self) -> list[tuple[int, HostStepEnd]]:
        ends, self._ends = self._ends, []
        return ends
