"""The gradient of a worker group's step on one shard: the contract of its sources.

A source collects the contributions to a step until they are complete, and then gives the step's gradient bucket by
bucket. `ParameterShard` has one source per worker group. The sources of the core are in `committed_pushes` and
`backward_means`; an extension may bring another (`GradientExtension.gradient_source`).
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch

from topotrain.config.sharding import Bucket, Segment
from topotrain.config.topology import Address
from topotrain.core.model.body_codec import ServerBodyCodec
from topotrain.core.model.schema import FlatBuffers
from topotrain.core.protocol import (
    BackwardEnd,
    Commit,
    GradientOverride,
    ProtocolError,
    Push,
    bits_to_int,
    per_bucket,
)
from topotrain.core.server.component_state import State
from topotrain.core.server.gradients.unit_sums import UnitSums
from topotrain.core.server.ordered_sum import OrderedMean, Tree

MUST_AGREE = {
    # First: workers of which only some are in `tt.assign` differ in other fields, too.
    "counts": "whether this is a step (True) or a change of parameters in tt.assign (False)",
    "optimizer": "the optimizer (its number, from 0) that makes the step",
    "backwards": "the number of backwards",
    "hyper": "the optimizer's hyper-parameters",
    "inv_scale": "the loss scale",
    "resets": "how often gradients were dropped before another backward (by zero_grad, or as backward() has raised)",
    "edited": "which gradients the script changed",
    "dropped": "which gradients the script set to None",
    "digest": "what the script made of the gradients",
    "clip_norm": "the gradient clipping",
    "marks": "the batches of the step",
}
_agreed = attrgetter(*MUST_AGREE)

CHANGED_ALIKE = (
    "what a script does with gradients between backward() and step() must be the same on all workers of a group: "
    "tt.mean(value) makes one number of theirs, tt.broadcast(value) gives all the same noise, and a condition must not "
    "look at the worker. A .grad that no backward made is the mean of the group after tt.clip_grad_norm_ only: it must "
    "not be changed in place before (`p.grad = g.clone()` sets one that autograd changed so itself)"
)


class StepError(Exception):
    """Workers of one group disagree about a step; the text names both."""


SAME_BATCHES = (
    "a batch that one worker leaves out (a `continue`, an exception that is caught, a loss that is not finite) has to "
    "be left out by all of them: let all workers decide alike, or let a worker with nothing to learn from its share "
    "call `tt.weight(0)` and then optimizer.step() as the others do, without a backward"
)


def ended_first(worker: int, steps: int) -> str:
    """Return the error for a script that has ended before others of its group."""
    return (
        f"worker {worker} ended its script after {steps} steps while others of its group go on; "
        f"all workers of a synchronous group must take the same steps"
    )


def ages_of(commit: Commit) -> tuple[int, ...]:
    """The ages of a commit's backwards; -1: none was made of a batch that counts."""
    return commit.ages or (0,) * commit.backwards


def other_batches(one: int, first: Commit, other: int, second: Commit) -> str:
    """Say that the backwards of two workers in one step are of different batches."""

    def batches(commit: Commit) -> str:
        spans = zip(commit.marks[1::3], commit.marks[2::3], strict=True)
        given = " and ".join(f"batch {lo + 1}" if lo == hi else f"batches {lo + 1} to {hi + 1}" for lo, hi in spans)
        # With the same batches the difference is which of them a backward is of.
        made = sum(age >= 0 for age in ages_of(commit))
        count = f" and {made} backward(s)" if first.marks == second.marks else ""
        return f"after {given or 'no batch'} of the data{count}"

    return (
        f"workers {one} and {other} of a group take different batches into step {first.step + 1}: worker {one} makes "
        f"it {batches(first)}, worker {other} {batches(second)}; {SAME_BATCHES}"
    )


def _apart(name: str, one: object, other: object) -> str:
    """Name the difference of two values of a field of `Commit`."""
    if name in ("edited", "dropped", "digest"):
        return CHANGED_ALIKE
    if name != "hyper":
        return f"{_short(one)} and {_short(other)}"
    # A worker sends its hyper-parameters only when they have changed.
    here, there = (_settings(value) if isinstance(value, bytes) and value else {} for value in (one, other))
    differ = [key for key in {**here, **there} if here.get(key, 0) != there.get(key, 0)]
    found = "; ".join(f"{key} {here.get(key, 'as before')} and {there.get(key, 'as before')}" for key in differ[:3])
    return (
        f"{found}. All workers of a group must set the same; a value that a worker computes from its share of the "
        f"data, such as a loss, is the same on all of them as tt.mean(value)"
    )


def _settings(hyper: bytes) -> dict[str, object]:
    """Return the values of an `adapter.hyper` text by name, and by group if several."""
    try:
        groups = json.loads(hyper)
        several = len(groups) > 1
        return {
            f"{name} of group {number}" if several else name: value
            for number, group in enumerate(groups)
            for name, value in group.items()
        }
    except (ValueError, AttributeError, TypeError):  # a peer may send any bytes
        return {"settings": _short(hyper)}


def _short(value: object) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


@dataclass(frozen=True, slots=True)
class GroupBuffers:
    """The buffers of one worker group on a shard, by name.

    "mean" and "total" are sums. "grad 3" is the memory of worker 3, where the server can see it.
    """

    flats: FlatBuffers
    group: int

    def view(self, name: str, bucket: Bucket) -> torch.Tensor:
        """A bucket's part of a buffer, 1-D."""
        return self.flats.view(f"{name} {self.group}", bucket)

    def segment(self, name: str, segment: Segment) -> torch.Tensor:
        """A segment's part of a buffer, in the shape that the update needs."""
        return self.flats.segment(f"{name} {self.group}", segment)


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """The settings of one worker group's gradient source on one shard.

    Attributes:
        workers: the number of workers in the group.
        tree: the order of the sum.
        buckets: the shard's buckets, with consecutive ids.
        buffers: the group's buffers on the shard.
        visible: every backward is a reduction of its own, with a mean.
        divide: a mean, or a plain sum.
        checked: a gradient that is not finite is looked for.
        reader: the server reads this worker's gradients in the worker's own memory. None: all gradients are sent.
        codec: how means travel.
        hyper_differs: the hyper-parameters of the workers may differ.
        names: of the parameters, by segment.
    """

    workers: int
    tree: Tree
    buckets: Sequence[Bucket]
    buffers: GroupBuffers
    visible: bool = False
    divide: bool = True
    checked: bool = False
    reader: int | None = None
    codec: ServerBodyCodec = field(default_factory=ServerBodyCodec)
    hyper_differs: bool = False
    names: Sequence[str] = ()

    @property
    def group(self) -> int:
        """The worker group."""
        return self.buffers.group


@dataclass(frozen=True, slots=True)
class ReducedBucket:
    """A bucket of a backward, with its mean.

    `mean` is a view that stays until the group pushes the bucket again. None: the mean is in the memory of all workers
    already. `lazy` are the workers that ask for it when they need it.
    """

    bucket: int
    present: int
    mean: torch.Tensor | None
    lazy: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class ReducedBackward:
    """A backward of a group that is over on this shard.

    Attributes:
        contributed: a bit per bucket with a mean that was sent, or applied.
        written: a bit per piece with a mean in the memory of the workers.
        lazy: the workers that were sent no mean.
        kept: for these, a bit per piece with a mean.
    """

    contributed: int
    written: int
    lazy: Collection[int] = ()
    kept: int = 0


class StagedGradient(ABC):
    """The gradient of an update on one shard, which is complete."""

    @abstractmethod
    def sum_all(self) -> None:
        """Put the gradient into one buffer, each segment in one piece."""

    @abstractmethod
    def gradient(self, bucket: Bucket) -> torch.Tensor:
        """The gradient of a bucket, 1-D, until the next call.

        Only the pieces in `present` are valid.
        """

    @abstractmethod
    def segment(self, segment: Segment) -> torch.Tensor:
        """The gradient of a segment, after `sum_all`."""

    @abstractmethod
    def present(self, bucket: Bucket) -> int:
        """Bitmap of the bucket's pieces that have a gradient in this update."""


class GradientSource(StagedGradient):
    """The gradient of one worker group's current step on one shard."""

    words: Mapping[str, str] = {}
    """Names of fields of a commit in the error of workers that disagree, where they differ from the usual ones."""
    may_differ: Collection[str] = ()
    """Fields in which the commits of a step may differ."""
    joined = False
    """Whether a worker that has committed takes part in later backwards of others, and commits again."""

    def __init__(self, settings: SourceSettings) -> None:
        self.workers = settings.workers
        self.participants = tuple(range(settings.workers))
        """The workers that a step needs. The others have no process, or have not joined the group again."""
        self.hyper_differs = settings.hyper_differs
        """Whether hyper-parameters may differ: new processes may have called their schedulers less often."""
        self.visible = settings.visible
        self._settings = settings
        self._buckets = settings.buckets
        self._buffers = settings.buffers
        self._first = settings.buckets[0].id if settings.buckets else 0
        self._buffer = "mean"  # the name of the buffer that the update reads
        self._mean = OrderedMean(settings.tree, settings.divide)
        self.sums = UnitSums(settings.tree, settings.divide)
        self.step = 0
        self._reset()

    def _reset(self) -> None:
        self.sums.clear()
        self._present = [0] * len(self._buckets)  # by bucket: its pieces that have a gradient
        self.commits: dict[int, Commit] = {}
        self.absent: set[int] = set()
        """Workers that were in `step()` before the last backward. Their scripts have not seen the step's gradient."""
        self.staged = False
        self.members: tuple[int, ...] = ()
        """The workers with complete contributions, if a step may be made of some. Empty: a step needs all workers."""

    def next_step(self, participants: Sequence[int] | None = None) -> None:
        """Begin the step after one that was applied, skipped or dropped.

        participants: the workers that it needs, if others than before. The hyper-parameters of the first one count.
        """
        # A dropped step keeps its number, so that what is still sent for it counts for no other one.
        self.step += 1
        if participants is not None:
            self.participants, self.hyper_differs = tuple(participants), True
        self._reset()

    def restart(self) -> None:
        """Forget all that is not applied: the group is started again at step 0."""
        self.step = 0
        self.participants = tuple(range(self.workers))
        self._reset()

    def forget(self, worker: int) -> None:
        """Forget what a worker has sent for the step. Another process has its place."""
        self.commits.pop(worker, None)
        self.absent.discard(worker)

    # --- arrivals ------------------------------------------------------------------------------------------------

    def check(self, sender: Address, message: BackwardEnd | Commit) -> None:
        """Check an end or a commit. Raises ProtocolError if no correct worker sends it."""
        if isinstance(message, BackwardEnd):
            raise ProtocolError(f"{sender} ends a backward, where what is pushed counts when it is committed")
        check_revisions(sender, message, len(self._buckets))

    @abstractmethod
    def push(self, worker: int, message: Push, body: torch.Tensor | None) -> Iterable[ReducedBucket]:
        """Keep a worker's gradient. The caller must read all means that are returned.

        body: None: the gradient is in the sum of the worker's unit (`unit_sums`).
        """

    def end(self, worker: int, message: BackwardEnd) -> Iterable[ReducedBucket]:
        """End a worker's backward. It has no gradient in the buckets that were not pushed."""
        return ()

    def edit(self, message: GradientOverride, body: torch.Tensor) -> None:
        """Keep a bucket's gradient as the script left it. Most sources have no use for it."""
        return

    def commit(self, worker: int, message: Commit) -> None:
        """Keep a worker's commit. Raises StepError if the group's workers disagree."""
        if worker in self.commits:
            return  # delivered twice: the first one counts
        # All others agree with it. A commit with fewer backwards does not count if its worker can join those.
        alike = [w for w, c in self.commits.items() if not self.joined or c.backwards == message.backwards]
        self.commits[worker] = message
        if not alike:
            return
        first = min(alike, key=self.absent.__contains__)
        # In nearly every step all fields are equal.
        if _agreed(self.commits[first]) != _agreed(message):
            self._check_fields(first, worker)
        if "marks" not in self.may_differ:
            self._check_ages(first, worker)

    def _check_fields(self, first: int, worker: int) -> None:
        """Raise StepError if two commits differ in a field in which they must agree."""
        theirs, message = self.commits[first], self.commits[worker]
        differs = [*self.may_differ, *(["hyper"] if self.hyper_differs else [])]
        differs += ["edited", "dropped", "digest"] if self.absent & {first, worker} else []
        # A server with none of these gradients cannot name them.
        differs += [] if any(message.edited) else ["digest"]
        for name in MUST_AGREE:
            if name not in differs and getattr(theirs, name) != getattr(message, name):
                if name == "marks":
                    raise StepError(other_batches(first, theirs, worker, message))
                values = getattr(theirs, name), getattr(message, name)
                pieces = bits_to_int(message.edited) if name == "digest" else 0
                if name in ("edited", "dropped"):
                    pieces = bits_to_int(values[0]) ^ bits_to_int(values[1])
                raise self._disagree(first, worker, name, pieces, _apart(name, *values))

    def _disagree(self, one: int, other: int, name: str, pieces: int, what: str) -> StepError:
        """The error of two commits that differ in a field, about these pieces."""
        found = {
            self._settings.names[piece.segment]: None
            for bucket, mask in per_bucket(self._buckets, pieces)
            for i, piece in enumerate(bucket.pieces)
            if mask >> i & 1 and self._settings.names
        }
        names = f" ({', '.join([*found][:2])}{', …' if len(found) > 2 else ''})" if found else ""
        words = f"{self.words.get(name, MUST_AGREE[name])}{names}"
        return StepError(f"workers {one} and {other} of a group disagree about {words} in step {self.step + 1}: {what}")

    def _check_ages(self, first: int, worker: int) -> None:
        """Raise StepError if backwards of two commits are of different batches."""
        one, other = self.commits[first], self.commits[worker]
        # Without ages, as in most steps, all backwards are of the last batch.
        if (one.ages or other.ages or one.backwards != other.backwards) and ages_of(one) != ages_of(other):
            raise StepError(other_batches(first, one, worker, other))

    def closed(self, ordinal: int) -> ReducedBackward | None:
        """The end of a backward of all workers, once, when each bucket is reduced."""
        return None

    @property
    def keeps_means(self) -> bool:
        """Whether `kept` has means."""
        return False

    def kept(self, step: int, ordinal: int) -> Iterable[ReducedBucket]:
        """The means of this backward, if it is the last one, also after the step."""
        return ()

    def awaited_by(self, worker: int) -> set[int]:
        """The workers without which a worker cannot go on in the step."""
        return set(self.participants) - self.commits.keys() if worker in self.commits else set()

    def take_joins(self) -> Iterable[tuple[int, int]]:
        """Workers that committed before a backward of others, with its number, once each."""
        return ()

    # --- the staged step -----------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether a worker has sent all it can, and waits for another worker of the group."""
        return bool(self.commits) and not self.staged

    def try_stage(self) -> bool:
        """True once, when every contribution to the step is here."""
        if self.staged or len(self.commits) < len(self.participants):
            return False
        self.staged = self._complete()
        return self.staged

    @abstractmethod
    def _complete(self) -> bool:
        """Whether the gradient of the committed step is here. Fills `_present`."""

    @property
    def begun(self) -> bool:
        """Whether anything of the step is here."""
        return bool(self.commits) or self.staged

    @property
    def first(self) -> Commit:
        """The commit of the first worker that counts. In most of its fields all agree."""
        known = [worker for worker in self.participants if worker in self.commits]
        return self.commits[min(known, key=self.absent.__contains__) if self.absent else known[0]]

    @property
    def marks(self) -> tuple[int, ...]:
        """The data batches of the staged step."""
        return self.first.marks

    @abstractmethod
    def nonfinite_workers(self) -> dict[int, int]:
        """The workers with a gradient that is not finite, each with a segment of it.

        -1: the sum is not finite, and no worker's part explains it.
        """

    def refuse(self, workers: Collection[int]) -> bool:
        """Leave these workers' parts out of the staged step. False: nothing would be left."""
        return False

    # --- the gradient --------------------------------------------------------------------------------------------

    def sum_all(self) -> None:
        """As `StagedGradient.sum_all`. Nothing to do where the gradient is in one buffer."""

    def gradient(self, bucket: Bucket) -> torch.Tensor:
        return self._buffers.view(self._buffer, bucket)

    def segment(self, segment: Segment) -> torch.Tensor:
        return self._buffers.segment(self._buffer, segment)

    def present(self, bucket: Bucket) -> int:
        return self._present[bucket.id - self._first]

    # --- a second copy -------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Return the state, see `component_state`. The shard has the group's buffers."""
        return {
            "present": self._present,
            "commits": self.commits,
            "absent": self.absent,
            "staged": self.staged,
            "members": self.members,
            "step": self.step,
            "participants": self.participants,
            "hyper_differs": self.hyper_differs,
        }

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self._present, self.commits = list(state["present"]), dict(state["commits"])
        self.absent = set(state["absent"])
        self.staged, self.members, self.step = state["staged"], state["members"], state["step"]
        self.participants, self.hyper_differs = state["participants"], state["hyper_differs"]


def check_revisions(sender: Address, message: Commit, buckets: int) -> None:
    """Raise ProtocolError for a commit with another number of revisions than this."""
    if len(message.revisions) != buckets:
        said = f"revisions of {len(message.revisions)} buckets"
        raise ProtocolError(f"{sender}: the commit of step {message.step}: {said}")
