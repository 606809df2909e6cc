"""One group's step on one shard: what has arrived, whom it still waits for, and what comes of it.

The sum is taken in the canonical order (`canonical`), so it is taken once everybody's part is there. That needs a
buffer per contributor, and is why parts are kept until then.

Two ways to reduce. *Visible*: every backward is a reduction of its own, the mean goes back to the workers, and the
step's gradient is the running sum of the means with the script's edits written over it. *Replacing*: a push replaces
the worker's former one; the sum is taken once, when all have committed.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from topotrain.config.sharding import Bucket, Segment
from topotrain.core.bitmaps import NO_REVISION, bits_to_int, per_bucket, per_piece
from topotrain.core.protocol import BackwardEnd, Commit, GradientOverride, ProtocolError, Push
from topotrain.core.server.commit_agreement import StepError, agree
from topotrain.core.server.component_state import State, field_values
from topotrain.core.server.nonfinite import NOBODY, look, spoiled
from topotrain.core.server.ordered_sum import Part, Tree, canonical_mean

IN_CACHE = 1 << 17
"""Elements of a bucket that are added, divided and copied before the next ones: a core's cache holds them meanwhile."""

_MOST_OPEN = 64  # backwards of a step: whoever ends one waits, as a rule, until all have ended it


@dataclass(slots=True)
class _Reduction:
    """One backward of the group (or, replacing, the whole step)."""

    pushes: dict[int, dict[int, tuple[Push, torch.Tensor]]] = field(default_factory=dict)
    ends: dict[int, BackwardEnd] = field(default_factory=dict)
    done: int = 0  # bit per bucket of the shard
    contributed: int = 0  # bit per bucket of the shard
    written: dict[int, int] = field(default_factory=dict)  # place of a bucket -> its pieces written into windows
    closed: bool = False


@dataclass(frozen=True, slots=True)
class ReducedBucket:
    """A bucket whose mean is ready: `mean` is a view that stays until the group pushes the bucket again.

    None: it has been written into the windows of all workers.
    """

    bucket: int
    present: int
    mean: torch.Tensor | None


class GradientStaging:
    """What one worker group has sent for its current step to one shard.

    Args:
        workers: number of workers in the group.
        tree: canonical order.
        buckets: the shard's buckets, consecutive ids.
        view: view(name, bucket) gives the bucket's part of the group's buffer `name`: "mean", "total", or "grad 3",
            the window of worker 3.
        segment: segment(name, segment), the same for a segment, with the shape that the update wants.
        visible: reduce every backward, or let pushes replace one another.
        divide: mean or sum.
        reader: with windows, the worker whose gradients the update reads; None without.
        arrived: takes (bucket, its pieces, the mean) as soon as a bucket's mean is there, and is done with it when it
            returns; the mean is then not kept (`apply: kOnArrival`).
        told: takes the same of each mean that is told to the workers, and makes it, in place, what they will see of
            it (where it travels encoded).
        checked: what is applied on arrival has to be finite; of a whole step `spoilers` tells.
        sees: a worker's gradient is read in its own memory, where its script may still change it.
        backup: a step may be made of what some of the workers have contributed (`choose`); replacing only.
    """

    def __init__(
        self,
        workers: int,
        tree: Tree,
        buckets: Sequence[Bucket],
        view: Callable[[str, Bucket], torch.Tensor],
        segment: Callable[[str, Segment], torch.Tensor],
        visible: bool,
        divide: bool,
        reader: int | None = None,
        arrived: Callable[[Bucket, int, torch.Tensor], None] | None = None,
        told: Callable[[Bucket, int, torch.Tensor], None] = lambda *_: None,
        checked: bool = False,
        sees: bool = False,
        backup: bool = False,
    ) -> None:
        self._told = told
        self.backup = backup
        self._checked = checked
        self._looks_early = checked and not visible and not (sees and workers == 1)
        self._reader = reader if visible else None
        self._arrived = arrived
        self._workers = workers
        self._tree = tree
        self._buckets = buckets
        self._first = buckets[0].id if buckets else 0
        self._view = view
        self._segment = segment
        self._visible = visible
        self._divide = divide
        self._scratch: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self.step = 0
        self._reset()

    def _reset(self) -> None:
        self._reductions: dict[int, _Reduction] = {}
        self._closed = 0  # of these
        self._edits: dict[int, torch.Tensor] = {}
        self._present = [0] * len(self._buckets)
        self._in_total: set[int] = set()
        self._unsummed: set[int] = set()  # replacing: buckets whose parts have not been added up
        self._looked: dict[tuple[int, int], tuple[int | None, bool]] = {}  # replacing: (place of bucket, worker)
        self._last: dict[int, Mapping[int, Part]] = {}  # with windows: what the last means were made of
        self._doubtful: set[int] = set()  # visible: buckets that may not be finite when the step is staged
        self._suspects: dict[int, int] = {}  # whose parts were not finite, and in which segment
        self.commits: dict[int, Commit] = {}
        self.staged = False
        self.complete: set[int] = set()  # with backup: the workers whose contributions are all here

    def next_step(self) -> None:
        """The step was applied (or skipped): forget its parts."""
        self.step += 1
        self._reset()

    def restart(self) -> None:
        """The group is started again: its steps count from 0, and what was not applied is forgotten."""
        self.step = 0
        self._reset()

    def forget(self, worker: int) -> None:
        """With backup: another process has this worker's place; what the former one has contributed is forgotten."""
        self.commits.pop(worker, None)
        self.complete.discard(worker)
        for reduction in self._reductions.values():
            for pushes in reduction.pushes.values():
                pushes.pop(worker, None)
        self._looked = {key: seen for key, seen in self._looked.items() if key[1] != worker}

    # --- arrivals ------------------------------------------------------------------------------------------------

    def push(self, worker: int, message: Push, body: torch.Tensor) -> list[ReducedBucket]:
        """Keep a worker's gradient of a bucket. Returns the means that became ready (visible only)."""
        self._check_ordinal(worker, message.ordinal)
        if not self._visible:
            pushes = self._reduction(0).pushes.setdefault(message.bucket, {})
            old = pushes.get(worker)
            if old is None or old[0].ordinal < message.ordinal:
                pushes[worker] = (message, body)
                if self._looks_early:  # while it is in the processor's cache
                    at = message.bucket - self._first
                    self._looked[at, worker] = look(self._buckets[at], body)
            return []
        reduction = self._reduction(message.ordinal)
        if reduction.done >> (message.bucket - self._first) & 1:
            return []
        reduction.pushes.setdefault(message.bucket, {}).setdefault(worker, (message, body))
        return self._reduce(message.ordinal, [message.bucket])

    def end(self, worker: int, message: BackwardEnd) -> list[ReducedBucket]:
        """A worker's backward is over: what it did not push, it does not have."""
        self._check_ordinal(worker, message.ordinal)
        reduction = self._reduction(message.ordinal)
        if worker in reduction.ends:
            return []
        reduction.ends[worker] = message
        return self._reduce(message.ordinal, [b.id for b in self._buckets])

    def edit(self, message: GradientOverride, body: torch.Tensor) -> None:
        """A bucket's gradient as the script left it."""
        self._edits.setdefault(message.bucket, body)

    def commit(self, worker: int, message: Commit) -> None:
        """A worker called `optimizer.step()`. Raises StepError when the group's workers disagree."""
        if worker in self.commits:
            return
        self.commits[worker] = message
        for other, theirs in self.commits.items():
            agree(other, theirs, worker, message, backup=self.backup)
        for ordinal, reduction in self._reductions.items():
            if self._visible and ordinal >= message.backwards:
                later = next(iter([*reduction.ends, *(w for p in reduction.pushes.values() for w in p)]))
                self._unequal_backwards(worker, message.backwards, later, ordinal)

    def _check_ordinal(self, worker: int, ordinal: int) -> None:
        for other, commit in self.commits.items():
            if self._visible and ordinal >= commit.backwards:
                self._unequal_backwards(other, commit.backwards, worker, ordinal)

    @staticmethod
    def _unequal_backwards(done: int, backwards: int, later: int, ordinal: int) -> None:
        raise StepError(
            f"unequal numbers of backwards in one step: worker {done} of the group called step() after {backwards}, "
            f"worker {later} is in backward number {ordinal + 1}; all workers of a group must run the same backwards "
            f"(or make one private: `with tt.local():`)"
        )

    def _reduction(self, ordinal: int) -> _Reduction:
        known = self._reductions.get(ordinal)
        if known is None:
            if len(self._reductions) - self._closed >= _MOST_OPEN:
                raise ProtocolError(f"backward {ordinal} of step {self.step}, while {_MOST_OPEN} others are not over")
            known = self._reductions[ordinal] = _Reduction()
        return known

    def _close(self, reduction: _Reduction) -> None:
        self._closed += not reduction.closed
        reduction.closed = True

    # --- the sum -------------------------------------------------------------------------------------------------

    def _reduce(self, ordinal: int, buckets: Sequence[int]) -> list[ReducedBucket]:
        reduction = self._reductions[ordinal]
        ready = []
        for bucket in buckets:
            bit = 1 << (bucket - self._first)
            if reduction.done & bit:
                continue
            parts = self._parts(reduction, bucket, bit)
            if parts is None:
                continue
            reduction.done |= bit
            reduced = self._sum(ordinal, bucket, parts, reduction)
            if reduced is not None:
                ready.append(reduced)
                if reduced.mean is not None:
                    reduction.contributed |= bit
        return ready

    def _parts(self, reduction: _Reduction, bucket: int, bit: int) -> dict[int, Part] | None:
        """The parts of a bucket in worker order, or None while somebody's is missing."""
        pushes = reduction.pushes.get(bucket, {})
        parts: dict[int, Part] = {}
        for worker in range(self._workers):
            if worker in pushes:
                parts[worker] = (pushes[worker][0].weight, pushes[worker][1])
            elif worker in reduction.ends and not bits_to_int(reduction.ends[worker].pushed) & bit:
                parts[worker] = (reduction.ends[worker].weight, None)
            else:
                return None
        return parts

    def _sum(self, ordinal: int, bucket: int, parts: Mapping[int, Part], reduction: _Reduction) -> ReducedBucket | None:
        pushes = reduction.pushes.pop(bucket, {})
        present = 0
        for push, _ in pushes.values():
            present |= bits_to_int(push.present)
        if not present:
            return None
        at = bucket - self._first
        if self._arrived is not None:
            mean = self._passing_mean(parts)
            if self._checked and self._suspect(at, present, mean, parts):
                present = 0
            self._present[at] |= present
            self._arrived(self._buckets[at], present, mean)
            return None
        if self._reader is not None:
            self._last[at] = parts
        if self._reader is not None and len(pushes) == self._workers and all(p.fresh for p, _ in pushes.values()):
            self._write_windows(at, parts)
            reduction.written[at] = present
            self._present[at] |= present
            return ReducedBucket(bucket, present, None)
        mean = self._view("mean", self._buckets[at])
        earlier = self._visible and self._reader is None and self._present[at] != 0
        if earlier and at not in self._in_total:
            # A second mean is about to overwrite the first: the running sum moves to a buffer of its own.
            self._view("total", self._buckets[at]).copy_(mean)
            self._in_total.add(at)
        self._mean(parts, mean)
        if earlier or (self._checked and self._suspect(at, present, mean, parts)):
            self._doubtful.add(at)
        self._told(self._buckets[at], present, mean)
        if earlier:
            self._view("total", self._buckets[at]).add_(mean)
        self._present[at] |= present
        return ReducedBucket(bucket, present, mean)

    def _mean(self, parts: Mapping[int, Part], out: torch.Tensor) -> None:
        canonical_mean(parts, self._tree, out, lambda k: self._scratch_like(k, out), self._divide)

    def _passing_mean(self, parts: Mapping[int, Part]) -> torch.Tensor:
        """The mean for somebody who is done with it before the next one: what one worker alone has is not copied."""
        if len(parts) == 1:
            ((weight, gradient),) = parts.values()
            if weight > 0 and gradient is not None:
                return gradient
        like = next(gradient for _, gradient in parts.values() if gradient is not None)
        out = self._scratch_like(2, like)
        self._mean(parts, out)
        return out

    def _write_windows(self, at: int, parts: Mapping[int, Part]) -> None:
        """The mean goes right into every worker's "grad": the workers need not copy, and the sum is still in cache."""
        first, *others = (self._view(f"grad {worker}", self._buckets[at]) for worker in range(self._workers))
        for lo in range(0, first.numel(), IN_CACHE):
            here = slice(lo, lo + IN_CACHE)
            self._mean({w: (weight, None if g is None else g[here]) for w, (weight, g) in parts.items()}, first[here])
            for other in others:
                other[here].copy_(first[here])

    def _scratch_like(self, k: int, like: torch.Tensor) -> torch.Tensor:
        buffer = self._scratch.get((k, like.dtype))
        if buffer is None or buffer.numel() < like.numel():
            buffer = self._scratch[(k, like.dtype)] = torch.empty_like(like)
        return buffer[: like.numel()]

    def closed(self, ordinal: int) -> tuple[int, int] | None:
        """Once per backward, when every bucket of it is reduced: the bitmap of buckets that have a mean to be sent,
        and that of the pieces that have been written into windows.

        Not before all workers are in it, also on a shard without buckets: a worker that still computes takes no answer.
        """
        reduction = self._reductions.get(ordinal)
        if reduction is None or reduction.closed or len(reduction.ends) < self._workers:
            return None
        if reduction.done != (1 << len(self._buckets)) - 1:
            return None
        self._close(reduction)
        return reduction.contributed, per_piece(self._buckets, reduction.written)

    # --- the commit ----------------------------------------------------------------------------------------------

    @property
    def visible(self) -> bool:
        """Every backward is a reduction of its own."""
        return self._visible

    @property
    def waits(self) -> bool:
        """Somebody has done all it can and waits for another worker of the group."""
        open_backward = any(reduction.ends and not reduction.closed for reduction in self._reductions.values())
        return open_backward or (bool(self.commits) and not self.staged)

    def try_stage(self) -> bool:
        """True once, when every contribution to the step is here; the gradient is then complete in its buffer."""
        if self.staged or len(self.commits) < self._workers:
            return False
        ready = self._stage_visible() if self._visible else self._stage_replacing()
        self.staged = ready
        return ready

    @property
    def first(self) -> Commit:
        """The commit of the first worker that counts: in most of its fields all agree."""
        return self.commits[min(self.commits)]

    @property
    def marks(self) -> tuple[int, ...]:
        """The data batches of the staged step; with backup every worker has its own."""
        if not self.backup:
            return self.first.marks
        return tuple(number for _, commit in sorted(self.commits.items()) for number in commit.marks)

    @property
    def hyper(self) -> bytes:
        """With backup: the hyper-parameters that most workers of the staged step say.

        A worker that was late has called its schedulers less often; where it comes to a tie, the first worker's count.
        """
        said = [commit.hyper for _, commit in sorted(self.commits.items())]
        return max(said, key=said.count)

    def completed(self) -> bool:
        """With backup: whether the contribution of one more worker is here."""
        new = {worker for worker in self.commits if worker not in self.complete and self._has_all(worker)}
        self.complete |= new
        return bool(new)

    def choose(self, members: Collection[int]) -> list[int]:
        """With backup: the step is made of these workers' contributions; returns who else had committed it."""
        others = [worker for worker in self.commits if worker not in members]
        self.commits = {worker: self.commits[worker] for worker in sorted(members)}
        self._find_present(self.commits)
        return others

    def _stage_visible(self) -> bool:
        commit = self.commits[0]
        full = (1 << len(self._buckets)) - 1
        for ordinal in range(commit.backwards):
            if ordinal not in self._reductions or self._reductions[ordinal].done != full:
                return False
        edited = bits_to_int(commit.edited)
        if self._reader is None:
            if edited and not self._edits_complete(edited):
                return False
            self._settle()
            self._take_edits(edited)
        changes = zip(
            per_bucket(self._buckets, edited), per_bucket(self._buckets, bits_to_int(commit.dropped)), strict=True
        )
        for at, ((_, new), (_, gone)) in enumerate(changes):
            self._present[at] = (self._present[at] | new) & ~gone
        return True

    def _edits_complete(self, edited: int) -> bool:
        return all(bucket.id in self._edits for bucket, mask in per_bucket(self._buckets, edited) if mask)

    def _settle(self) -> None:
        """The running sums move to the means' place: a segment's gradient must lie in one piece of memory."""
        for at in self._in_total:
            self._view("mean", self._buckets[at]).copy_(self._view("total", self._buckets[at]))
        self._in_total.clear()

    def _take_edits(self, edited: int) -> None:
        for at, (bucket, mask) in enumerate(per_bucket(self._buckets, edited)):
            target = self._view("mean", bucket)
            self._doubtful |= {at} if mask else set()
            for i, piece in enumerate(bucket.pieces):
                if mask >> i & 1:
                    part = slice(piece.lo - bucket.lo, piece.hi - bucket.lo)
                    target[part] = self._edits[bucket.id][part]

    def _stage_replacing(self) -> bool:
        if not all(map(self._has_all, self.commits)):
            return False
        self._find_present(self.commits)
        return True

    def _has_all(self, worker: int) -> bool:
        """Replacing: whether all is here of which a worker's commit speaks."""
        pushes, revisions = self._reduction(0).pushes, self.commits[worker].revisions
        for at, bucket in enumerate(self._buckets):
            held = pushes.get(bucket.id, {}).get(worker)
            if revisions[at] != NO_REVISION and (held is None or held[0].ordinal < revisions[at]):
                return False
        return True

    def _find_present(self, workers: Collection[int]) -> None:
        """Replacing: which pieces some of these have a gradient for; nothing is added up yet."""
        pushes = self._reduction(0).pushes
        for at, (bucket, dropped) in enumerate(per_bucket(self._buckets, bits_to_int(self.first.dropped))):
            self._present[at] = 0
            for worker in workers:
                if self.commits[worker].revisions[at] != NO_REVISION:
                    self._present[at] |= bits_to_int(pushes[bucket.id][worker][0].present)
            if self._present[at]:
                self._unsummed.add(at)
            self._present[at] &= ~dropped

    # --- what is not finite --------------------------------------------------------------------------------------

    def spoilers(self) -> dict[int, int]:
        """Of a staged step: the workers whose gradient is not finite, each with a segment of which that is true.

        NOBODY: the sum is not finite, and no worker's part explains it.
        """
        if self._arrived is not None:
            return self._suspects
        if self.backup:
            return self._bad_contributions()
        if not self._visible:
            return self._bad_parts()
        found: dict[int, int] = {}
        for at in range(len(self._buckets)) if self._reader is not None else sorted(self._doubtful):
            bucket, present = self._buckets[at], self._present[at]
            segment = spoiled(bucket, present, self.gradient(bucket)) if present else None
            if segment is not None:
                self._suspect(at, present, self.gradient(bucket), self._last.get(at, {}))
                found[NOBODY] = segment
        named = {worker: where for worker, where in self._suspects.items() if worker != NOBODY}
        return (named or found) if found else {}

    def _suspect(self, at: int, present: int, total: torch.Tensor, parts: Mapping[int, Part]) -> bool:
        """Note whose part makes a sum not finite; False if it is finite."""
        bucket = self._buckets[at]
        segment = spoiled(bucket, present, total)
        if segment is None:
            return False
        found = {w: look(bucket, part)[0] for w, (weight, part) in parts.items() if weight > 0 and part is not None}
        known = {worker: where for worker, where in found.items() if where is not None}
        self._suspects |= known or {NOBODY: segment}
        return True

    def _bad_parts(self) -> dict[int, int]:
        """Replacing: nothing is added up yet, so it is known whose."""
        found: dict[int, int] = {}
        for at in sorted(self._unsummed):
            bucket, large = self._buckets[at], False
            parts = self._held_parts(at)
            for worker, (weight, part) in parts.items():
                if weight > 0 and part is not None:
                    seen = self._looked.get((at, worker)) if self._looks_early else None
                    segment, is_large = look(bucket, part) if seen is None else seen
                    large = large or is_large
                    if segment is not None:
                        found[worker] = segment
            if large and len(parts) > 1:  # finite parts may have an infinite sum
                total = torch.empty_like(self._view("mean", bucket))
                self._mean({worker: part for worker, part in parts.items() if worker not in found}, total)
                segment = spoiled(bucket, self._present[at], total)
                found |= {} if segment is None else {NOBODY: segment}
        return found

    def _bad_contributions(self) -> dict[int, int]:
        """With backup: which of the complete ones are not finite.

        Nobody knows yet with whose others they will be added up: what could make any sum infinite is refused, too.
        """
        found: dict[int, int] = {}
        for at, bucket in enumerate(self._buckets):
            held = self._reduction(0).pushes.get(bucket.id, {})
            for worker in self.complete:
                if self.commits[worker].revisions[at] == NO_REVISION:
                    continue
                part = held[worker][1]
                seen = self._looked.get((at, worker)) if self._looks_early else None
                segment, large = look(bucket, part) if seen is None else seen
                if segment is None and large:
                    share = torch.finfo(part.dtype).max / self._workers / max(1.0, self.commits[worker].weight)
                    segment = bucket.pieces[0].segment if float(part.abs().max()) > share else None
                if segment is not None:
                    found[worker] = segment
        return found

    def refuse(self, workers: Collection[int]) -> bool:
        """Replacing: these workers' parts of the staged step count for nothing; whether anything is left."""
        for worker in workers:
            self.commits[worker] = replace(self.commits[worker], weight=0.0)
        self._find_present([worker for worker in self.commits if worker not in workers])
        return any(commit.weight > 0 for commit in self.commits.values())

    def _held_parts(self, at: int) -> dict[int, Part]:
        held = self._reduction(0).pushes.get(self._buckets[at].id, {})
        parts: dict[int, Part] = {}
        for worker, commit in self.commits.items():
            has = commit.revisions[at] != NO_REVISION
            parts[worker] = (commit.weight, held[worker][1] if has else None)
        return parts

    def sum_all(self) -> None:
        """Put the staged step's gradient into its buffer, where somebody needs all of it at once."""
        for at in self._unsummed:
            self._mean(self._held_parts(at), self._view("mean", self._buckets[at]))
        self._unsummed.clear()

    def gradient(self, bucket: Bucket) -> torch.Tensor:
        """The staged step's gradient of a bucket, 1-D (valid for the pieces in `present`, and until the next call).

        Where nobody asked for the whole, the parts are added up only here: the sum is still in the processor's cache
        when the update reads it.
        """
        at = bucket.id - self._first
        if at in self._unsummed:
            return self._passing_mean(self._held_parts(at))
        return self._view(self._source, bucket)

    @property
    def _source(self) -> str:
        """The buffer that the update reads: with windows, what the script has made of a worker's gradients."""
        return "mean" if self._reader is None else f"grad {self._reader}"

    def segment(self, segment: Segment) -> torch.Tensor:
        """The staged step's gradient of a segment, after `sum_all`."""
        return self._segment(self._source, segment)

    def present(self, bucket: Bucket) -> int:
        """Bitmap of the bucket's pieces that have a gradient in this step."""
        return self._present[bucket.id - self._first]

    @property
    def weight(self) -> float:
        """Sum of the weights of the step's commits."""
        return sum(commit.weight for commit in self.commits.values())

    def state_dict(self) -> State:
        """Return the state, see `component_state`. The sums are in the group's buffers, which the shard has."""
        return {
            "reductions": {number: field_values(reduction) for number, reduction in self._reductions.items()},
            "closed": self._closed,
            "edits": self._edits,
            "present": self._present,
            "in_total": self._in_total,
            "unsummed": self._unsummed,
            "looked": self._looked,
            "last": self._last,
            "doubtful": self._doubtful,
            "suspects": self._suspects,
            "commits": self.commits,
            "staged": self.staged,
            "complete": self.complete,
            "step": self.step,
        }

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self._reductions = {
            number: _Reduction(
                {b: dict(by) for b, by in pushes.items()}, dict(ends), done, contributed, dict(written), end
            )
            for number, (pushes, ends, done, contributed, written, end) in state["reductions"].items()
        }
        self._closed, self._edits, self._present = state["closed"], dict(state["edits"]), list(state["present"])
        self._in_total, self._unsummed = set(state["in_total"]), set(state["unsummed"])
        self._looked, self._last = dict(state["looked"]), dict(state["last"])
        self._doubtful, self._suspects = set(state["doubtful"]), dict(state["suspects"])
        self.commits, self.complete = dict(state["commits"]), set(state["complete"])
        self.staged, self.step = state["staged"], state["step"]

    def kept_buffers(self) -> list[str]:
        """Return the names of the group's buffers that count now, even if no message is a view of them."""
        sums = ["mean", "total"] if self._reductions or self.commits or self.staged else []
        return [*sums, "out"] if self._workers > 1 else sums  # other workers are sent the same values later
