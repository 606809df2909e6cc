"""Gradient sources in which every backward is a reduction of its own.

The sum of a bucket has a fixed order (`ordered_sum`), so the parts are kept until those of all workers are here.

`ReturnedMeans` sends each mean back to the workers. The step's gradient is the running sum of the means, with the
script's edits written over it. `SharedMemoryMeans` writes the means into the memory of the workers. `ArrivalMeans`
gives each mean to the update as soon as it is there (`apply: kOnArrival`).
"""

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from topotrain.config.sharding import Bucket
from topotrain.config.topology import Address
from topotrain.core.model.tensor_bits import same_bits
from topotrain.core.protocol import (
    BackwardEnd,
    Commit,
    GradientOverride,
    ProtocolError,
    Push,
    bits_to_int,
    check_bits,
    per_bucket,
    per_piece,
)
from topotrain.core.server.component_state import State, field_values
from topotrain.core.server.gradients.gradient_source import (
    CHANGED_ALIKE,
    GradientSource,
    ReducedBackward,
    ReducedBucket,
    SourceSettings,
    StepError,
)
from topotrain.core.server.gradients.unit_sums import HeldPushes
from topotrain.core.server.nonfinite import NO_WORKER, all_finite, nonfinite_segment, nonfinite_workers
from topotrain.core.server.ordered_sum import Part

IN_CACHE = 1 << 17
"""Elements of a bucket that are added, divided and copied before the next ones: a core's cache holds them meanwhile."""

_MOST_OPEN = 64  # backwards of a step: a worker that ends one waits, as a rule, until all have ended it


@dataclass(slots=True)
class Backward:
    """One backward of the group."""

    pushes: dict[int, HeldPushes] = field(default_factory=dict)  # by bucket
    ends: dict[int, BackwardEnd] = field(default_factory=dict)
    done: int = 0  # bit per bucket of the shard
    written: dict[int, int] = field(default_factory=dict)  # place of a bucket -> its pieces in the workers' memory
    closed: bool = False
    means: dict[int, int] = field(default_factory=dict)  # place of a bucket -> its pieces with a mean that is sent

    def take(self, bucket: int, bit: int) -> HeldPushes:
        """Mark a bucket as reduced. Returns its pushes, by worker."""
        # `done` stays when the pushes go: a push that comes twice must not begin a second sum.
        self.done |= bit
        return self.pushes.pop(bucket, {})

    def note(self, at: int, present: int, sent: bool) -> None:
        """These pieces of the bucket at this place have a mean."""
        (self.means if sent else self.written)[at] = present

    def lazy(self, pushes: HeldPushes) -> tuple[int, ...]:
        """The workers of which the messages about a bucket, such as `pushes`, are lazy."""
        said = {worker: end.lazy for worker, end in self.ends.items()}
        said |= {worker: push.lazy for worker, (push, _) in pushes.items()}
        return tuple(worker for worker, lazy in said.items() if lazy)

    def close(self) -> bool:
        """Mark the backward as over. Returns whether it was open."""
        was_open, self.closed = not self.closed, True
        return was_open


class BackwardsOfStep:
    """The backwards of one step, by ordinal."""

    def __init__(self) -> None:
        self._known: dict[int, Backward] = {}
        self._closed = 0

    def get(self, ordinal: int) -> Backward | None:
        """A backward that has begun."""
        return self._known.get(ordinal)

    def begin(self, step: int, ordinal: int) -> Backward:
        """A backward, begun if it is new. Raises ProtocolError if too many are open."""
        known = self._known.get(ordinal)
        if known is None:
            # The bound keeps a faulty worker from filling the server's memory.
            if len(self._known) - self._closed >= _MOST_OPEN:
                raise ProtocolError(f"backward {ordinal} of step {step}, while {_MOST_OPEN} others are not over")
            known = self._known[ordinal] = Backward()
        return known

    def close(self, backward: Backward) -> None:
        """Every bucket of a backward is reduced."""
        self._closed += backward.close()

    @property
    def any_begun(self) -> bool:
        """Whether anything of a backward is here."""
        return bool(self._known)

    def open(self, worker: int) -> Iterator[Collection[int]]:
        """The workers of each backward that this one has ended and that is not over."""
        return (each.ends for each in self._known.values() if worker in each.ends and not each.closed)

    @property
    def any_open(self) -> bool:
        """Whether a worker has ended a backward that is not over."""
        return any(backward.ends and not backward.closed for backward in self._known.values())

    def made_by(self, worker: int) -> int:
        """The number of backwards up to the last one that a worker has ended."""
        return 1 + max([ordinal for ordinal, backward in self._known.items() if worker in backward.ends], default=-1)

    def check_commit(self, worker: int, commit: Commit) -> None:
        """Raise StepError if a worker is in a later backward than this commit names."""
        for ordinal, backward in self._known.items():
            if ordinal >= commit.backwards:
                later = next(iter([*backward.ends, *(w for p in backward.pushes.values() for w in p)]))
                _refuse_backward(worker, commit, later, ordinal)

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
        return {"known": {ordinal: field_values(one) for ordinal, one in self._known.items()}, "closed": self._closed}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self._closed = state["closed"]
        self._known = {
            ordinal: Backward({bucket: dict(by) for bucket, by in pushes.items()}, dict(ends), *values)
            for ordinal, (pushes, ends, *values) in state["known"].items()
        }


def check_ordinal(commits: Mapping[int, Commit], worker: int, ordinal: int) -> None:
    """Raise StepError if a worker's backward is one that a committed worker left out."""
    for other, commit in commits.items():
        if ordinal >= commit.backwards:
            _refuse_backward(other, commit, worker, ordinal)


def _refuse_backward(done: int, commit: Commit, later: int, ordinal: int) -> None:
    if not commit.counts:
        raise StepError(
            f"worker {done} of the group changes parameters in tt.assign, and worker {later} goes backward meanwhile; "
            f"all workers of a group must enter tt.assign between the same two steps, and not inside a condition such "
            f"as `if tt.is_main():`"
        )
    raise StepError(
        f"unequal numbers of backwards in one step: worker {done} of the group called step() after {commit.backwards}, "
        f"worker {later} is in backward number {ordinal + 1}; all workers of a group must run the same backwards "
        f"(or make one private: `with tt.local():`)"
    )


class BackwardMeans(GradientSource):
    """Reduces every backward by itself.

    A worker that has committed joins backwards which others make after it, without a gradient.
    """

    joined = True

    def _reset(self) -> None:
        super()._reset()
        self._asked: dict[int, int] = {}  # by worker: the last backward that it was to join
        self._backwards = BackwardsOfStep()
        self._nonfinite: dict[int, int] = {}  # workers with parts that were not finite, and the segment

    # --- arrivals ------------------------------------------------------------------------------------------------

    def check(self, sender: Address, message: BackwardEnd | Commit) -> None:
        if isinstance(message, BackwardEnd):
            check_bits(message.pushed, len(self._buckets), sender, "the buckets of a backward")
        else:
            super().check(sender, message)

    def push(self, worker: int, message: Push, body: torch.Tensor | None) -> Iterable[ReducedBucket]:
        """As `GradientSource.push`. A second push of a bucket in a backward is ignored."""
        backward = self._backwards.begin(self.step, message.ordinal)
        if backward.done >> (message.bucket - self._first) & 1:
            return ()
        # The first push counts: a repeated one may have another body behind it by now.
        backward.pushes.setdefault(message.bucket, {}).setdefault(worker, (message, body))
        self.sums.note(body)
        return self._ready(backward, (message.bucket,))

    def end(self, worker: int, message: BackwardEnd) -> Iterable[ReducedBucket]:
        backward = self._backwards.begin(self.step, message.ordinal)
        if worker in backward.ends:
            return ()
        if message.absent:
            self.absent.add(worker)
            if worker in self.commits and self.commits[worker].backwards <= message.ordinal:
                del self.commits[worker]
        backward.ends[worker] = message
        # All buckets, since the worker's part may be missing in those that it has not pushed.
        return self._ready(backward, [bucket.id for bucket in self._buckets])

    def commit(self, worker: int, message: Commit) -> None:
        # A commit that comes twice may come when the worker has joined a later backward.
        if self._backwards.made_by(worker) <= message.backwards:
            self._asked.pop(worker, None)
            if worker in self.commits and self.commits[worker].backwards < message.backwards:
                del self.commits[worker]
            super().commit(worker, message)

    def awaited_by(self, worker: int) -> set[int]:
        return (
            super()
            .awaited_by(worker)
            .union(*(set(self.participants).difference(ends) for ends in self._backwards.open(worker)))
        )

    def take_joins(self) -> Iterator[tuple[int, int]]:
        for worker, commit in self.commits.items():
            ordinal = commit.backwards
            if self._backwards.get(ordinal) is not None and self._asked.get(worker) != ordinal:
                if not commit.counts:
                    self._backwards.check_commit(worker, commit)
                self._asked[worker] = ordinal
                yield worker, ordinal

    # --- the means -----------------------------------------------------------------------------------------------

    def _ready(self, backward: Backward, buckets: Sequence[int]) -> Iterable[ReducedBucket]:
        return tuple(self._reduce(backward, buckets))

    def _reduce(self, backward: Backward, buckets: Sequence[int]) -> Iterator[ReducedBucket]:
        for bucket in buckets:
            bit = 1 << (bucket - self._first)
            if backward.done & bit:
                continue
            parts = self._parts(backward, bucket, bit)
            if parts is None:
                continue
            pushes = backward.take(bucket, bit)
            present = 0
            for push, _ in pushes.values():
                present |= bits_to_int(push.present)
            if not present:
                continue  # no worker has a gradient here: the optimizer skips the bucket, and none is sent
            reduced = self._sum(bucket, present, parts, [push for push, _ in pushes.values()])
            # A mean that is in the workers' memory already is not sent.
            backward.note(bucket - self._first, present, sent=reduced.mean is not None)
            lazy = backward.lazy(pushes)
            yield replace(reduced, lazy=lazy) if lazy else reduced

    def _parts(self, backward: Backward, bucket: int, bit: int) -> dict[int, Part] | None:
        """The parts of a bucket in worker order, or None while a worker's is missing."""
        pushes = backward.pushes.get(bucket, {})
        parts: dict[int, Part] = {}
        for worker in self.participants:
            if worker in pushes:
                parts[worker] = (pushes[worker][0].weight, pushes[worker][1])
            # The worker has no gradient in this bucket. Its weight still counts in the mean.
            elif worker in backward.ends and not bits_to_int(backward.ends[worker].pushed) & bit:
                parts[worker] = (backward.ends[worker].weight, None)
            else:
                return None
        return None if self.sums.any and self.sums.withdraw(pushes, parts) else parts

    @abstractmethod
    def _sum(self, bucket: int, present: int, parts: Mapping[int, Part], pushes: Sequence[Push]) -> ReducedBucket:
        """Reduce a bucket of which all parts are here, at least one with a gradient."""

    def _note_nonfinite(self, bucket: Bucket, present: int, total: torch.Tensor, parts: Mapping[int, Part]) -> bool:
        """Note the workers that make a sum not finite. False: it is finite, or unchecked."""
        found = nonfinite_workers(bucket, present, total, parts) if self._settings.checked else {}
        self._nonfinite |= found
        return bool(found)

    def closed(self, ordinal: int) -> ReducedBackward | None:
        backward = self._backwards.get(ordinal)
        # A shard without buckets waits for all workers, too: a worker that still computes expects no answer.
        if backward is None or backward.closed or len(backward.ends) < len(self.participants):
            return None
        if backward.done != (1 << len(self._buckets)) - 1:
            return None
        self._backwards.close(backward)
        contributed = sum(1 << at for at in backward.means)
        lazy = backward.lazy({})
        kept = per_piece(self._buckets, backward.means) if lazy else 0
        return ReducedBackward(contributed, per_piece(self._buckets, backward.written), lazy, kept)

    # --- the staged step -----------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        return self._backwards.any_open or super().waits

    @property
    def begun(self) -> bool:
        return self._backwards.any_begun or super().begun

    def _complete(self) -> bool:
        # Of those that have seen the gradient any will do: workers that disagree in these fields have failed by now.
        commit = self.first
        if any(each.backwards != commit.backwards for each in self.commits.values()):
            return False
        # `done` has a bit also for buckets without a gradient, so a backward is complete when all are set.
        full = (1 << len(self._buckets)) - 1
        for ordinal in range(commit.backwards):
            backward = self._backwards.get(ordinal)
            if backward is None or backward.done != full:
                return False
        edited = bits_to_int(commit.edited)
        if not self._take_edits(edited):
            return False
        changes = zip(
            per_bucket(self._buckets, edited), per_bucket(self._buckets, bits_to_int(commit.dropped)), strict=True
        )
        for at, ((_, new), (_, gone)) in enumerate(changes):
            # A script may give a gradient to a parameter that no backward has reached.
            self._present[at] = (self._present[at] | new) & ~gone
        return True

    def _take_edits(self, edited: int) -> bool:
        """Write the edits (a bit per piece) over the gradient. False: one is not here."""
        return True

    def _find_nonfinite(self, places: Iterable[int]) -> dict[int, int]:
        """`nonfinite_workers` of the buckets at these places."""
        found: dict[int, int] = {}
        for at in places:
            bucket, present = self._buckets[at], self._present[at]
            segment = nonfinite_segment(bucket, present, self.gradient(bucket)) if present else None
            if segment is not None:
                found[NO_WORKER] = segment
        named = {worker: where for worker, where in self._nonfinite.items() if worker != NO_WORKER}
        # Only if the gradient is not finite now: a script may have repaired a mean that was not.
        return (named or found) if found else {}

    def state_dict(self) -> State:
        return {**super().state_dict(), "backwards": self._backwards.state_dict(), "nonfinite": self._nonfinite}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        super().load_state_dict(state)
        self._backwards.load_state_dict(state["backwards"])
        self._nonfinite = dict(state["nonfinite"])


class ReturnedMeans(BackwardMeans):
    """Sends means, at once or when workers ask, and receives changed gradients."""

    _last: tuple[int, int, Mapping[int, int]] = (-1, -1, {})
    """Step, ordinal, and pieces by place of the bucket, of the last backward, until its means are overwritten."""

    def _reset(self) -> None:
        super()._reset()
        self._edits: dict[int, torch.Tensor] = {}
        self._in_total: set[int] = set()  # places of buckets with their running sum in "total"
        self._doubtful: set[int] = set()  # places of buckets that may not be finite when the step is staged

    def edit(self, message: GradientOverride, body: torch.Tensor) -> None:
        # The first one counts, as for pushes.
        self._edits.setdefault(message.bucket, body)

    def _sum(self, bucket: int, present: int, parts: Mapping[int, Part], pushes: Sequence[Push]) -> ReducedBucket:
        at = bucket - self._first
        described = self._buckets[at]
        mean = self._buffers.view("mean", described)
        self._last = ReturnedMeans._last
        earlier = self._present[at] != 0
        if earlier and at not in self._in_total:
            # A second mean is about to overwrite the first: the running sum moves to a buffer of its own.
            self._buffers.view("total", described).copy_(mean)
            self._in_total.add(at)
        self._mean.write(parts, mean)
        # A sum of finite means may be infinite, so such a bucket is looked at when the step is staged.
        if earlier or self._note_nonfinite(described, present, mean, parts):
            self._doubtful.add(at)
        # The server goes on with the mean that the workers decode, so that both have the same numbers.
        self._settings.codec.mean(self._settings.group, described, present, mean)
        if earlier:
            self._buffers.view("total", described).add_(mean)
        self._present[at] |= present
        return ReducedBucket(bucket, present, mean)

    def closed(self, ordinal: int) -> ReducedBackward | None:
        found, backward = super().closed(ordinal), self._backwards.get(ordinal)
        if found is not None and found.lazy and backward is not None:
            self._last = self.step, ordinal, backward.means
        return found

    @property
    def keeps_means(self) -> bool:
        return bool(self._last[2])

    def kept(self, step: int, ordinal: int) -> Iterator[ReducedBucket]:
        *last, means = self._last
        for at, present in means.items() if last == [step, ordinal] else ():
            yield ReducedBucket(self._first + at, present, self._buffers.view("mean", self._buckets[at]))

    def _take_edits(self, edited: int) -> bool:
        changed = per_bucket(self._buckets, edited)
        if edited and not all(bucket.id in self._edits for bucket, mask in changed if mask):
            return False
        for at in self._in_total:  # a segment's gradient must lie in one piece of memory
            self._buffers.view("mean", self._buckets[at]).copy_(self._buffers.view("total", self._buckets[at]))
        self._in_total.clear()
        for at, (bucket, mask) in enumerate(changed):
            target = self._buffers.view("mean", bucket)
            self._doubtful |= {at} if mask else set()
            for i, piece in enumerate(bucket.pieces):
                if mask >> i & 1:
                    part = bucket.place(piece)
                    target[part] = self._edits[bucket.id][part]
        return True

    def nonfinite_workers(self) -> dict[int, int]:
        return self._find_nonfinite(sorted(self._doubtful))

    def state_dict(self) -> State:
        own = {"edits": self._edits, "in_total": self._in_total, "doubtful": self._doubtful, "last": self._last}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        super().load_state_dict(state)
        self._edits, self._in_total = dict(state["edits"]), set(state["in_total"])
        self._doubtful = set(state["doubtful"])
        step, ordinal, means = state["last"]
        self._last = step, ordinal, dict(means)


class SharedMemoryMeans(BackwardMeans):
    """Writes means into the workers' memory, where their own gradients may be.

    The update reads the memory of one worker, with the changes that its script has made. All workers of the step have
    the same means there.

    Args:
        settings: the settings; `reader` is that worker.
    """

    # One of equal gradients may look changed, as those by which a script multiplies 1. Here they can be compared.
    may_differ = ("digest",)

    def __init__(self, settings: SourceSettings) -> None:
        self._reader = settings.reader
        super().__init__(settings)

    def _sum(self, bucket: int, present: int, parts: Mapping[int, Part], pushes: Sequence[Push]) -> ReducedBucket:
        at = bucket - self._first
        self._present[at] |= present
        # A worker that already has gradients of the step in its memory adds the mean to them by itself.
        if len(pushes) == len(self.participants) and all(push.fresh for push in pushes):
            self._write(at, present, parts)
            return ReducedBucket(bucket, present, None)
        mean = self._buffers.view("mean", self._buckets[at])
        self._mean.write(parts, mean)
        self._note_nonfinite(self._buckets[at], present, mean, parts)
        return ReducedBucket(bucket, present, mean)

    def _write(self, at: int, present: int, parts: Mapping[int, Part]) -> None:
        """Write a mean right into the "grad" of every worker."""
        targets = [self._buffers.view(f"grad {worker}", self._buckets[at]) for worker in self.participants]
        # Block by block: the sum is still in the cache when it is copied.
        for lo in range(0, targets[0].numel(), IN_CACHE):
            here = slice(lo, lo + IN_CACHE)
            block = {w: (weight, None if g is None else g[here]) for w, (weight, g) in parts.items()}
            mean = self._mean.passing(block)
            # The copies overwrite the parts, and then nothing shows any more which of them is not finite.
            if self._settings.checked and not all_finite(mean):
                self._note_nonfinite(self._buckets[at], present, self._mean.passing(parts), parts)
                mean = self._mean.passing(block)
            for target in targets:
                target[here].copy_(mean)

    def _complete(self) -> bool:
        self._choose_reader()
        if not super()._complete():
            return False
        seen = [worker for worker in self.participants if worker in self.commits.keys() - self.absent]
        if len({self.commits[worker].digest for worker in seen}) > 1:
            self._refuse_different(seen)
        return True

    def _refuse_different(self, workers: Sequence[int]) -> None:
        """Raise StepError if these workers have different gradients."""
        for at, bucket in enumerate(self._buckets):
            views = [self._buffers.view(f"grad {worker}", bucket) for worker in workers]
            for i, piece in enumerate(bucket.pieces):
                first, *others = (view[bucket.place(piece)] for view in views)
                same = [same_bits(first, other) for other in others if self._present[at] >> i & 1]
                if not all(same):
                    pieces = per_piece(self._buckets, {at: 1 << i})
                    raise self._disagree(workers[0], workers[1 + same.index(False)], "digest", pieces, CHANGED_ALIKE)

    def _choose_reader(self) -> None:
        readers = [worker for worker in self.participants if worker not in self.absent]
        self._buffer = f"grad {next((each for each in readers if each == self._reader), readers[0])}"

    def nonfinite_workers(self) -> dict[int, int]:
        # A script may have changed any gradient in its memory, so all are looked at.
        return self._find_nonfinite(range(len(self._buckets)))

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        super().load_state_dict(state)
        self._choose_reader()


class ArrivalMeans(BackwardMeans):
    """Gives every mean to the update when it is there, and keeps none."""

    def _ready(self, backward: Backward, buckets: Sequence[int]) -> Iterable[ReducedBucket]:
        # Lazily: the caller applies a mean before the next one is made, which overwrites it.
        return self._reduce(backward, buckets)

    def _sum(self, bucket: int, present: int, parts: Mapping[int, Part], pushes: Sequence[Push]) -> ReducedBucket:
        at = bucket - self._first
        mean = self._mean.passing(parts)
        # Without pieces the update changes nothing, so this mean is never applied.
        if self._note_nonfinite(self._buckets[at], present, mean, parts):
            present = 0
        self._present[at] |= present
        return ReducedBucket(bucket, present, mean)

    def nonfinite_workers(self) -> dict[int, int]:
        """As `GradientSource.nonfinite_workers`. Their parts were not applied."""
        return self._nonfinite
